"""Communication: who launched the ranks, how MPI joins them, and the Python face of the C++ engine."""

from hvpipe.moved import moved_names

# `hvpipe.comm` was a module before.
__getattr__ = moved_names(
    __name__, dict.fromkeys(("SingleWorld", "World", "open_world", "started_world"), "hvpipe.comm.world")
)
