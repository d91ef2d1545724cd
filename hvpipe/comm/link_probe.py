"""The links between the ranks, measured with the engine's own messages: a ping-pong of every pair in turn."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

import numpy as np

from hvpipe.comm.engine import Engine
from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Link
from hvpipe.specs.cluster_fit import fit_link

SIZES_BYTES = (1, 1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 4 << 20)
"""From a byte to what a large activation takes; most are cut into the engine's segments."""

_WARM_UPS = 2
_TAG = 0


def measure_links(
    engine: Engine,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeats: int = 7,
    pairs: Sequence[tuple[int, int]] | None = None,
    computing: Callable[[], object] | None = None,
) -> dict[tuple[int, int], Link]:
    """The link between every two ranks (a, b), a < b, or of `pairs` alone; the same on all ranks. Collective.

    Two ranks at a time send each other messages of each size, `repeats` times there and back, while all
    others wait; a one-way time is half of the median. Latency and bandwidth are fitted to these: see
    `fit_link`. Where a pair takes t seconds, n ranks take n (n - 1) / 2 times that.

    A transfer of a pipeline comes while its ranks compute, which takes cores from what moves it. So with
    `computing`, which should take some milliseconds without the interpreter's lock, one of the two calls it
    over and over meanwhile, then the other one does; a time is the mean of both.
    """
    if repeats < 1 or len(set(sizes_bytes)) < 2 or min(sizes_bytes) < 1:
        raise HvpipeError(
            "Links want at least one repeat of messages of at least two sizes. "
            f"Received: sizes_bytes={list(sizes_bytes)}, repeats={repeats}"
        )
    rank, size = engine.world.rank, engine.world.size
    every = list(combinations(range(size), 2))
    if unknown := set(pairs or ()) - set(every):
        raise HvpipeError(
            f"A pair of ranks should be (a, b) with 0 <= a < b < {size}. Received: {sorted(unknown)}"
        )
    mine: dict[tuple[int, int], Link] = {}
    for pair in every if pairs is None else pairs:
        engine.agree(f"links: ranks {pair[0]} and {pair[1]}")
        if rank not in pair:
            continue
        found = []
        for busy in (None,) if computing is None else pair:
            with _repeated(computing if rank == busy else None):
                found.append(_one_way_s(engine, pair, sizes_bytes, repeats))
        if rank == pair[0]:
            mine[pair] = fit_link(sizes_bytes, [statistics.mean(each) for each in zip(*found, strict=True)])
    engine.agree("links: the last pair")
    return {pair: link for some in engine.allgather_object(mine) for pair, link in some.items()}


@contextmanager
def _repeated(work: Callable[[], object] | None) -> Iterator[None]:
    """Calls `work`, if any, over and over on a thread of its own meanwhile; its error comes at the end."""
    if work is None:
        yield
        return
    ended = threading.Event()
    failed: list[Exception] = []

    def repeat() -> None:
        try:
            while not ended.is_set():
                work()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=repeat, name="hvpipe links", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


def _one_way_s(
    engine: Engine, pair: tuple[int, int], sizes_bytes: Sequence[int], repeats: int
) -> list[float]:
    """Of a message of each size, in seconds, on the pair's first rank; the other one answers."""
    first, second = pair
    if engine.world.rank == first:
        return [_ping_pong_s(engine, second, nbytes, repeats) for nbytes in sizes_bytes]
    for nbytes in sizes_bytes:
        _answer(engine, first, nbytes, repeats)
    return []


def _ping_pong_s(engine: Engine, peer: int, nbytes: int, repeats: int) -> float:
    """Half the median time of a message there and the same back, in seconds."""
    data = np.zeros(nbytes, np.uint8)
    what = f"a message of {nbytes} bytes that measures the link"
    taken_s = []
    for _ in range(_WARM_UPS + repeats):
        # Expected before it can come, as in a pipeline.
        back = engine.receive(nbytes, peer, _TAG, what)
        started_s = time.perf_counter()
        sent = engine.send(data, peer, _TAG, what)
        back.wait()
        taken_s.append(time.perf_counter() - started_s)
        sent.wait()
    return statistics.median(taken_s[_WARM_UPS:]) / 2


def _answer(engine: Engine, peer: int, nbytes: int, repeats: int) -> None:
    data = np.zeros(nbytes, np.uint8)
    what = f"a message of {nbytes} bytes that measures the link"
    there = engine.receive(nbytes, peer, _TAG, what)
    for left in reversed(range(_WARM_UPS + repeats)):
        there.wait()
        back = engine.send(data, peer, _TAG, what)
        if left:
            there = engine.receive(nbytes, peer, _TAG, what)
        back.wait()
