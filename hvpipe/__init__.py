"""hvpipe: pipelined data-parallel training of Keras models across MPI ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SESSION = (
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
)
_ERRORS = ("BuildMismatchError", "DeadlineError", "HvpipeError", "InitError", "MismatchError", "PeerError")

__all__ = ["__version__", *_SESSION, *_ERRORS]

if TYPE_CHECKING:
    from hvpipe.errors import *  # noqa: F403
    from hvpipe.session import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # On first use, so that importing hvpipe costs next to nothing and needs neither MPI nor NumPy.
    import importlib

    if name in ("keras", "plan"):
        return importlib.import_module(f"hvpipe.{name}")
    if name not in (*_SESSION, *_ERRORS):
        raise AttributeError(f"module 'hvpipe' has no attribute {name!r}")
    home = "hvpipe.session" if name in _SESSION else "hvpipe.errors"
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
