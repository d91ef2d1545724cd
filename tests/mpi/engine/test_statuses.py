"""What ranks tell rank 0 of their work, beside all collectives."""

from __future__ import annotations

import time

import hvpipe
from hvpipe.engine.engine import EngineClient
from hvpipe.session import current


def test_rank_0_hears_the_newest_of_each_rank() -> None:
    engine = current().engine
    for text in ("old", "new"):
        engine.tell_rank_0(f"{text} {hvpipe.rank()}")
    wanted = {f"new {rank}".encode() for rank in range(1, hvpipe.size())} if hvpipe.rank() == 0 else set()
    heard: set[bytes] = set()
    deadline_s = time.monotonic() + 60
    while not wanted <= heard and time.monotonic() < deadline_s:
        heard |= set(engine.take_statuses())
        time.sleep(0.01)
    hvpipe.barrier()
    assert wanted <= heard
    assert engine.take_statuses() == []


def test_what_is_on_its_way_at_the_end_harms_nobody() -> None:
    """An engine frees its communicators only after the last text has come."""
    session = current()
    for turn in range(5):
        engine = EngineClient(session.world, session.settings)
        engine.tell_rank_0("x" * 20_000 * turn)
        engine.agree("some have sent it, others not yet")
        time.sleep(0.19)  # the texts go out every 0.2 s
        engine.stop()
    assert len(session.engine.agree("still here")) == hvpipe.size()
