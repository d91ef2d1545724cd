"""The errors that hvpipe raises. Every message says what is needed, then what was received, if anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HvpipeError(RuntimeError):
    """A wrong argument, setting or file. Base class of all errors below.

    Example:
        ```python
        try:
            hvpipe.init(timeout_s=60)
        except hvpipe.HvpipeError as error:
            print(error)
        ```
    """


class InitError(HvpipeError):
    """The ranks cannot be joined: MPI is missing, or MPI or the launcher is unsuitable."""


class BuildMismatchError(InitError):
    """hvpipe was built against another TensorFlow or MPI than the one that runs."""


class MismatchError(HvpipeError):
    """The ranks disagree about something that must be the same on all: shapes, dtypes, models, call order."""


class DeadlineError(HvpipeError):
    """A wait took longer than the time limit (HVPIPE_TIMEOUT). The message names the awaited operation."""


class PeerError(HvpipeError):
    """Another rank failed or left while this rank depended on it."""


class PlanError(HvpipeError):
    """No plan satisfies the request (memory, stages), or a plan is for another model or cluster."""


class LaunchError(HvpipeError):
    """`hvpipe run` cannot start: no mpirun, too few slots, or contradicting options."""


def name_lost(ranks: Sequence[int], size: int | None = None) -> str:
    """Return "rank 2 of 4 was lost", "ranks 1 and 2 were lost", or "a rank was lost" for none."""
    of = "" if size is None else f" of {size}"
    if not ranks:
        return f"a rank{of} was lost"
    *others, last = map(str, ranks)
    named = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
    return f"{named}{of} {'were' if others else 'was'} lost"


def listed(items: Iterable[str], separator: str = ", ", most: int = 8) -> str:
    """List items for a message: all, or if there are many, the first and how many more."""
    given = list(items)
    more = [f"{len(given) - most:,} more"] if len(given) > most + 1 else []
    return separator.join((given[:most] if more else given) + more)
