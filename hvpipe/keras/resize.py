"""What follows the number of ranks: the learning rate, if it should, and what the user derives from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import keras

from hvpipe.keras.compat import learning_rate_variable
from hvpipe.session import Resize, Session

logger = logging.getLogger("hvpipe")

_hooks: list[Callable[[Resize], None]] = []


def on_resize(call: Callable[[Resize], None]) -> Callable[[Resize], None]:
    """Call a function on every rank after the number of ranks has changed, before training continues.

    For what your code derives from `hvpipe.size()` and `hvpipe.rank()`. All ranks have the same state then.
    The number changes when ranks are lost, and when `hk.Checkpoint` resumes a training of more or fewer.

    Args:
        call: Takes a `Resize` with `old_size`, `size`, `old_rank`, `rank` and `lost`.

    Returns:
        `call`, so that this serves as a decorator.

    Example:
        ```python
        @hk.on_resize
        def tell(change):
            print(f"{change.size} ranks go on, {change.old_size} began")
        ```
    """
    _hooks.append(call)
    return call


def tell_resize(change: Resize) -> None:
    """Call what `on_resize` was given."""
    for call in _hooks:
        call(change)


def joined(first: Resize, later: Resize) -> Resize:
    """Return two changes, one after the other, as one."""
    left = [rank for rank in range(first.old_size) if rank not in first.lost]
    lost = sorted([*first.lost, *(left[rank] for rank in later.lost)])
    return Resize(first.old_size, later.size, first.old_rank, later.rank, tuple(lost))


def scale_learning_rate(
    session: Session, optimizer: Any, old_size: int, size: int, callbacks: Iterable[Any]
) -> None:
    """Scale the learning rate as --lr-scaling asks.

    Args:
        session: The session.
        optimizer: The optimizer.
        old_size: The number of ranks before.
        size: The number of ranks now.
        callbacks: Those of the `fit`, which may set the rate again.
    """
    scaling = session.settings.lr_scaling
    if scaling == "none":
        return
    rate = learning_rate_variable(getattr(optimizer, "inner_optimizer", optimizer))
    if not hasattr(rate, "assign"):
        logger.warning("hvpipe: --lr-scaling has no effect on a learning rate of a schedule.")
        return
    setting = [one for one in callbacks if isinstance(one, keras.callbacks.LearningRateScheduler)]
    if setting and session.world.rank == 0:
        logger.warning(
            "hvpipe: --lr-scaling lasts until callback %s sets the learning rate. Let that depend on "
            "hvpipe.size().",
            type(setting[0]).__name__,
        )
    ratio = size / old_size
    rate.assign(rate * (ratio if scaling == "linear" else ratio**0.5))
