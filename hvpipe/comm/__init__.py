"""Communication: who launched the ranks, how MPI joins them, and the Python face of the C++ engine."""
