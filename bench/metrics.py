"""The formulas of the benchmarks: bandwidths as nccl-tests defines them, bounds, ratios and means."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from bench.errors import BenchError

_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def ring_factor(ranks: int) -> float:
    """Return how often each rank sends (and receives) the buffer in an all-reduce: 2 (n - 1) / n."""
    return 2 * (ranks - 1) / ranks


def bus_bandwidth(size_bytes: int, seconds: float, ranks: int) -> float:
    """Return size / time x 2 (n - 1) / n, the "busbw": what each link carries each way."""
    return size_bytes / seconds * ring_factor(ranks)


def communication_bound_s(gradient_bytes: int, ranks: int, bits_per_s: float | None) -> float:
    """Return the least seconds to all-reduce the gradients over links of a rate; 0 without a limit."""
    if bits_per_s is None:
        return 0.0
    return gradient_bytes * ring_factor(ranks) * 8 / bits_per_s


def relative_spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles over the median: 0.05 is "within 5 % half the time"."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def sizes(smallest_bytes: int, largest_bytes: int) -> list[int]:
    """Return the sizes of a sweep, each four times the one before. The largest is always included."""
    if smallest_bytes < 4 or largest_bytes < smallest_bytes:
        raise BenchError(
            "A sweep needs 4 <= smallest <= largest bytes. "
            f"Received: smallest={smallest_bytes}, largest={largest_bytes}"
        )
    sweep = []
    size = smallest_bytes
    while size < largest_bytes:
        sweep.append(size)
        size *= 4
    return [*sweep, largest_bytes]


def parse_size(text: str) -> int:
    """Return bytes for "4096", "4K", "256MB" (K, M, G are powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BenchError(f"A size must be a whole number with K, M, G or nothing. Received: size={text!r}")
    return int(match[1]) * _SIZE_UNITS[match[2].upper()]


def format_size(size_bytes: int) -> str:
    """Return the shortest exact text: 4 KB, 256 MB, 1000 B."""
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale} {unit}"
    return f"{size_bytes} B"


def format_time(seconds: float) -> str:
    """Format seconds with three digits in a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:  # avoids 1e+03 of the next smaller unit
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def repetitions(sample_s: float, one_s: float, most: int = 1000) -> int:
    """Return how many back-to-back operations of one_s fill a sample of sample_s, from 1 to `most`."""
    return min(most, max(1, round(sample_s / max(one_s, 1e-9))))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format columns aligned to the right, two spaces apart, below the header."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
