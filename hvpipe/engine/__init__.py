"""The Python face of the C++ engine."""
