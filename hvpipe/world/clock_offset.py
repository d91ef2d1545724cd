"""How far the clocks of ranks differ."""

from __future__ import annotations

import time
from collections.abc import Callable

_ROUNDS = 32


def clock_offset_s(
    rank: int, size: int, send: Callable[[int, float, str], None], receive: Callable[[int, str], float]
) -> float:
    """Return the seconds to add to this rank's `time.monotonic()` to get rank 0's. Collective.

    Along a binomial tree: a rank asks another one, which already knows rank 0's time, and then answers
    others. Each rank talks to at most ceil(log2(size)) others. The fastest round trip counts, so the error
    is below half of that round trip, for each of the ranks between this one and rank 0.

    Args:
        rank: This rank.
        size: The number of ranks.
        send: Sends a number to a rank, and says in errors what it is.
        receive: Receives one, and says in errors what it is.
    """
    ahead_s = 0.0
    for distance in (1 << bit for bit in reversed(range((size - 1).bit_length()))):
        place = rank % (2 * distance)
        if place == distance:
            ahead_s = _ask(rank - distance, send, receive)
        elif place == 0 and rank + distance < size:
            for _ in range(_ROUNDS):
                receive(rank + distance, "clock question")
                send(rank + distance, time.monotonic() + ahead_s, "clock answer")
    return ahead_s


def _ask(other: int, send: Callable[[int, float, str], None], receive: Callable[[int, str], float]) -> float:
    trips = []
    for _ in range(_ROUNDS):
        asked_s = time.monotonic()
        send(other, asked_s, "clock question")
        rank0_s = receive(other, "clock answer")
        answered_s = time.monotonic()
        trips.append((answered_s - asked_s, rank0_s - (asked_s + answered_s) / 2))
    return min(trips)[1]
