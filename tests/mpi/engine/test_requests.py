"""Requests: bits that any rank sets, and that all ranks see alike after the next exchange."""

from __future__ import annotations

import hvpipe
from hvpipe.session import current

STOP, BUSY = 1, 2


def test_all_ranks_see_what_one_asks_for() -> None:
    engine, last = current().engine, hvpipe.size() - 1
    engine.agree("nobody asks")
    assert engine.requests() == 0
    engine.request(BUSY)
    if hvpipe.rank() == last:
        engine.request(STOP)
    engine.agree("all are busy, one asks to stop")
    assert engine.requests() == STOP | BUSY
    engine.request(BUSY, False)
    engine.agree("one asks to stop")
    assert engine.requests() == STOP
    engine.request(STOP, False)
    engine.agree("nobody asks any more")
    assert engine.requests() == 0


def test_they_travel_with_every_kind_of_exchange() -> None:
    engine = current().engine
    if hvpipe.rank() == 0:
        engine.request(STOP)
    engine.broadcast_object("anything", "test")
    assert engine.requests() == STOP
    engine.request(STOP, False)
    engine.agree("the next exchange")
    assert engine.requests() == 0
