"""Runs an action on all ranks, and ends all of them if any rank fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from hvpipe.errors import HvpipeError
from hvpipe.session import Session

Result = TypeVar("Result")


def on_all_ranks(
    session: Session, what: str, action: Callable[[], Result], *, patiently: bool = False
) -> Result:
    """Call `action` on every rank and return its result; collective.

    Args:
        session: The session.
        what: Names the action in the error. It begins with a word that is the same on all ranks.
        action: This rank's action.
        patiently: Whether it may take longer than other waits for a rank.

    Returns:
        This rank's result.

    Raises:
        HvpipeError: The action failed on some rank. All ranks get the reason of the lowest such rank.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    verb = what.split()[0]  # names of models, and paths, may differ between ranks
    if patiently:
        session.agree_patiently(verb, session.settings.timeout_s)
    reasons = session.engine.allgather_object(None if error is None else _reason(error), verb)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            message = f"{what} should succeed on every rank. Received: rank {rank}: {reason}"
            raise HvpipeError(message) from error
    return result


@contextlib.contextmanager
def ending_all(
    session: Session, what: str = "A step", *, but: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """End all ranks' communication if this rank leaves `what` early: messages and sums are under way.

    `but` are errors that all ranks raise together.
    """
    try:
        yield
    except but:
        raise
    except BaseException as error:
        session.engine.fail_in_step(f"{type(error).__name__}: {error}", what)
        raise


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, HvpipeError) else f"{type(error).__name__}: {error}"
