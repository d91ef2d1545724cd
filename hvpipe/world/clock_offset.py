"""How far the clocks of ranks differ."""

from __future__ import annotations

import time
from collections.abc import Callable

_ROUNDS = 32


def clock_offset_s(
    rank: int, size: int, send: Callable[[int, float, str], None], receive: Callable[[int, str], float]
) -> float:
    """Return the seconds to add to this rank's `time.monotonic()` to get rank 0's. Collective.

    Each rank in turn asks rank 0 for its time. The fastest round trip counts, so the error is below half of
    that round trip.

    Args:
        rank: This rank.
        size: The number of ranks.
        send: Sends a number to a rank, and says in errors what it is.
        receive: Receives one, and says in errors what it is.
    """
    if rank == 0:
        for other in range(1, size):
            for _ in range(_ROUNDS):
                receive(other, "clock question")
                send(other, time.monotonic(), "clock answer")
        return 0.0
    trips = []
    for _ in range(_ROUNDS):
        asked_s = time.monotonic()
        send(0, asked_s, "clock question")
        rank0_s = receive(0, "clock answer")
        answered_s = time.monotonic()
        trips.append((answered_s - asked_s, rank0_s - (asked_s + answered_s) / 2))
    return min(trips)[1]
