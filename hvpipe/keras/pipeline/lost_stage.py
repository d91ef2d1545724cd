"""Ends a pipeline that has lost ranks, so that `hvpipe run --elastic` starts it again on the remaining ones.

a rank is lost       every call of the engine raises, and so `fit` does on the remaining ranks
the remaining ranks  agree on who is lost, and complete the checkpoint under way if they can
                     write one of the last step if replicas have all that the lost ranks had
                     exit
hvpipe run           starts them again; they plan anew, and resume from the newest checkpoint
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvpipe.environment.job_folder import STOPPED, TOO_FEW, tell_loss
from hvpipe.environment.settings import job_name
from hvpipe.errors import name_lost
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")


@contextlib.contextmanager
def leaving_after_loss(session: Session, callbacks: Sequence[Any]) -> Iterator[None]:
    """End the remaining ranks with SystemExit if the `fit` inside fails because ranks were lost.

    Without --elastic or hk.Checkpoint, the error goes on to the caller.
    """
    saver = next((callback for callback in callbacks if hasattr(callback, "lose")), None)
    left, lost = list(range(session.world.size)), list[int]()
    try:
        yield
    except Exception:
        if saver is None or not session.settings.elastic or not session.has_lost_ranks():
            raise
        while True:
            try:
                change = session.go_on_without_lost()
                lost += [left[rank] for rank in change.lost]
                left = [rank for number, rank in enumerate(left) if number not in change.lost]
                steps = saver.lose(lost)
                session.agree_patiently("the checkpoint after a loss")
                running = session.engine.agree("saving replicas", float(saver.runs))
                saved = saver.save_replicas() if all(running) else None
            except Exception:
                if not session.has_lost_ranks():  # no other rank was lost meanwhile
                    raise
            else:
                sys.exit(_tell(session, saver.folder, lost, steps, saved))


def _tell(session: Session, folder: Path, lost: Sequence[int], steps: int, saved: int | None) -> int:
    """Say who is lost, and return the code to exit with. `saved`: the step that replicas have saved."""
    if saved is not None:
        steps = saved
        loses = f"The remaining ranks have all stages, and wrote a checkpoint of step {saved}."
    else:
        loses = "The remaining ranks could not save the last step."
    settings, world = session.settings, session.world
    enough = world.size >= settings.min_ranks
    if world.rank == 0:
        logger.warning(
            "hvpipe: %s in step %d. %s %s",
            name_lost(lost, world.size + len(lost)),
            steps + 1,
            loses,
            f"All ranks exit with code {STOPPED}, to start again from the newest checkpoint."
            if enough
            else f"{world.size} ranks are left, and --min-np asks for {settings.min_ranks}: all ranks exit "
            f"with code {TOO_FEW}. The newest checkpoint stays.",
        )
    job = job_name()
    if enough and job is not None and world.local_rank == 0:
        tell_loss(job, folder, lost, steps + 1)
    return STOPPED if enough else TOO_FEW
