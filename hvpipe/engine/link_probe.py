"""Measures the links between ranks with the engine's own messages: ping-pong between each pair in turn."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

import numpy as np

from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Link
from hvpipe.specs.cluster_fit import fit_link, sustained

SIZES_BYTES = (1, 1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 4 << 20)
"""From one byte to the size of a large activation. The engine cuts the larger ones into segments."""

_WARM_UPS = 2
_IDLE_REPEATS = 3
_TAG = 0


def measure_links(
    engine: EngineClient,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeats: int = 7,
    pairs: Sequence[tuple[int, int]] | None = None,
    computing: Callable[[], object] | None = None,
) -> dict[tuple[int, int], Link]:
    """Measure the link between every two ranks. Collective.

    Two ranks at a time send each other messages of each size and back, while all others wait. The one-way
    time is half of the median round trip. `fit_link` fits latency and bandwidth to these times; `sustained`
    corrects a bandwidth that is only that of a burst. If a pair takes t seconds, n ranks take n (n - 1) / 2
    times as long.

    Args:
        engine: The engine of this rank.
        sizes_bytes: Message sizes, at least two different ones.
        repeats: Round trips per size.
        pairs: The pairs (a, b), a < b, to measure; None for all.
        computing: Work that one of the two ranks repeats meanwhile, then the other one; the time is the mean
            of both. A pipeline transfers while its ranks compute, which takes cores from the transfer. A call
            should take some milliseconds and release the interpreter's lock.

    Returns:
        The link of each pair, the same on all ranks.

    Raises:
        HvpipeError: For bad sizes, repeats or pairs.
    """
    if repeats < 1 or len(set(sizes_bytes)) < 2 or min(sizes_bytes) < 1:
        raise HvpipeError(
            "Measuring links needs at least one repeat and messages of at least two sizes. "
            f"Received: sizes_bytes={list(sizes_bytes)}, repeats={repeats}"
        )
    rank, size = engine.world.rank, engine.world.size
    every = list(combinations(range(size), 2))
    if unknown := set(pairs or ()) - set(every):
        raise HvpipeError(
            f"A pair of ranks should be (a, b) with 0 <= a < b < {size}. Received: {sorted(unknown)}"
        )
    less, more = sorted(set(sizes_bytes))[-2:]
    two_largest = (less, more)
    mine: dict[tuple[int, int], Link] = {}
    for pair in every if pairs is None else pairs:
        engine.agree(f"links: ranks {pair[0]} and {pair[1]}")
        if rank not in pair:
            continue
        found = []
        for busy in (None,) if computing is None else pair:
            with _repeated(computing if rank == busy else None):
                found.append(_one_way_s(engine, pair, sizes_bytes, repeats))
        idle_s = _one_way_s(engine, pair, two_largest, min(repeats, _IDLE_REPEATS))
        if rank == pair[0]:
            fitted = fit_link(sizes_bytes, [statistics.mean(each) for each in zip(*found, strict=True)])
            mine[pair] = sustained(fitted, two_largest, (idle_s[0], idle_s[1]))
    found_by = engine.allgather_object(mine, "links: the last pair")
    return {pair: link for some in found_by for pair, link in some.items()}


@contextmanager
def _repeated(work: Callable[[], object] | None) -> Iterator[None]:
    """Repeat `work`, if any, on a separate thread during the block; raise its error after the block."""
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
    engine: EngineClient, pair: tuple[int, int], sizes_bytes: Sequence[int], repeats: int
) -> list[float]:
    """Return the one-way time per size, in seconds, on the first rank of the pair. The other rank answers."""
    first, second = pair
    if engine.world.rank == first:
        return [_ping_pong_s(engine, second, nbytes, repeats) for nbytes in sizes_bytes]
    for nbytes in sizes_bytes:
        _answer(engine, first, nbytes, repeats)
    return []


def _ping_pong_s(engine: EngineClient, peer: int, nbytes: int, repeats: int) -> float:
    """Return half the median round trip of a message, in seconds."""
    data = np.zeros(nbytes, np.uint8)
    what = f"a message of {nbytes} bytes that measures the link"
    taken_s = []
    for _ in range(_WARM_UPS + repeats):
        # Post the receive before the answer can arrive, as a pipeline does.
        back = engine.receive(nbytes, peer, _TAG, what)
        started_s = time.perf_counter()
        sent = engine.send(data, peer, _TAG, what)
        back.wait()
        taken_s.append(time.perf_counter() - started_s)
        sent.wait()
    return statistics.median(taken_s[_WARM_UPS:]) / 2


def _answer(engine: EngineClient, peer: int, nbytes: int, repeats: int) -> None:
    data = np.zeros(nbytes, np.uint8)
    what = f"a message of {nbytes} bytes that measures the link"
    there = engine.receive(nbytes, peer, _TAG, what)
    for left in reversed(range(_WARM_UPS + repeats)):
        there.wait()
        back = engine.send(data, peer, _TAG, what)
        if left:
            there = engine.receive(nbytes, peer, _TAG, what)
        back.wait()
