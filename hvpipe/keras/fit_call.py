"""What `fit` was called with, kept for callbacks that resume it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FitCall:
    """The arguments of the `fit` that runs.

    Attributes:
        x: The data.
        steps_per_epoch: As given; None: an epoch is one pass over the data.
        callbacks: The user's callbacks.
    """

    x: Any = None
    steps_per_epoch: int | None = None
    callbacks: Sequence[Any] = field(default_factory=tuple)


@contextlib.contextmanager
def running(callbacks: Sequence[Any]) -> Iterator[None]:
    """Let callbacks undo what they have done to the model if the `fit` inside ends with an exception."""
    try:
        yield
    except BaseException:
        for callback in callbacks:
            if hasattr(callback, "abandon"):
                callback.abandon()
        raise


def in_order(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks in the order to call them.

    A callback may have another one in its `at_epoch_ends`. It runs first, and that other one runs last. So
    together they see a step boundary before the others act on the next batch, and the end of an epoch after
    the others have acted on it.
    """
    first = [callback for callback in callbacks if hasattr(callback, "at_epoch_ends")]
    others = [callback for callback in callbacks if not hasattr(callback, "at_epoch_ends")]
    return [*first, *others, *(callback.at_epoch_ends for callback in first)]
