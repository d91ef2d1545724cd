"""The world of ranks: who launched it, how the ranks are joined, and the C++ engine's Python face."""
