"""hvpipe: pipelined data-parallel training of Keras models across MPI ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The module of each public name.
_HOMES = {
    "hvpipe.collectives": (
        *("allgather", "allgather_object", "allreduce", "barrier", "broadcast", "broadcast_object"),
    ),
    "hvpipe.session": (
        *("counters", "init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"),
        "trace_path",
    ),
    "hvpipe.errors": (
        *("BuildMismatchError", "DeadlineError", "HvpipeError", "InitError", "MismatchError", "PeerError"),
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_SUBPACKAGES = ("keras", "plan")

__all__ = [
    "BuildMismatchError",
    "DeadlineError",
    "HvpipeError",
    "InitError",
    "MismatchError",
    "PeerError",
    "__version__",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "counters",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "trace_path",
]

if TYPE_CHECKING:
    from hvpipe.collectives import allgather as allgather
    from hvpipe.collectives import allgather_object as allgather_object
    from hvpipe.collectives import allreduce as allreduce
    from hvpipe.collectives import barrier as barrier
    from hvpipe.collectives import broadcast as broadcast
    from hvpipe.collectives import broadcast_object as broadcast_object
    from hvpipe.errors import BuildMismatchError as BuildMismatchError
    from hvpipe.errors import DeadlineError as DeadlineError
    from hvpipe.errors import HvpipeError as HvpipeError
    from hvpipe.errors import InitError as InitError
    from hvpipe.errors import MismatchError as MismatchError
    from hvpipe.errors import PeerError as PeerError
    from hvpipe.session import counters as counters
    from hvpipe.session import init as init
    from hvpipe.session import is_initialized as is_initialized
    from hvpipe.session import local_rank as local_rank
    from hvpipe.session import local_size as local_size
    from hvpipe.session import rank as rank
    from hvpipe.session import shutdown as shutdown
    from hvpipe.session import size as size
    from hvpipe.session import trace_path as trace_path


def __getattr__(name: str) -> Any:
    # Import on first use: `import hvpipe` costs next to nothing, and needs neither MPI nor NumPy.
    import importlib

    if name in _SUBPACKAGES:
        return importlib.import_module(f"hvpipe.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvpipe' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
