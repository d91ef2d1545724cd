"""Tables of stages as text: aligned columns, names of layers, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table. Columns with figures are aligned to the right, others to the left."""
    widths = [max(len(row[c]) for row in (header, *rows)) for c in range(len(header))]
    left = [not any(row[c][:1].isdigit() for row in rows) for c in range(len(header))]
    for row in (header, *rows):
        cells = (
            f"{cell:<{width}}" if to_left else f"{cell:>{width}}"
            for cell, width, to_left in zip(row, widths, left, strict=True)
        )
        yield "  ".join(cells).rstrip()


def layers_text(layers: Sequence[str]) -> str:
    """Name the layers of a stage: the first, the last, and how many."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]} ({len(layers)})"


def bytes_text(value_bytes: float) -> str:
    """Write a number of bytes with its unit."""
    if value_bytes >= 1e9:
        return f"{value_bytes / 1e9:.3g} GB"
    return f"{value_bytes / 1e6:.3g} MB" if value_bytes >= 1e5 else f"{value_bytes:,.0f} B"
