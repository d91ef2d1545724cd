"""The rows of bench.gpu.check: what was verified or measured on one rank, with the result."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hvpipe

Numbers = NDArray[np.float64]


class Rows:
    """Collects the rows of a rank. Rank 0 keeps those so far in a file.

    `way` says how data travels, "" with one rank. `failed` says that a part could not be done on this rank.
    `judged` says whether figures are compared with what is wanted.
    """

    def __init__(self, path: Path, *, judged: bool) -> None:
        self._path = path
        self._judged = judged
        self._rank, self._size = hvpipe.rank(), hvpipe.size()  # unknown after shutdown
        self._rows: list[dict[str, object]] = []
        self.way = ""
        self.failed = False

    @property
    def found(self) -> list[dict[str, object]]:
        return self._rows

    def part(self, part: Callable[[], None], what: str = "") -> None:
        """Run a part. An error becomes a row of this name, and the other parts run all the same."""
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            self.note(
                what or part.__name__.replace("_", " "), f"FAILED: {type(error).__name__}: {error}", ok=False
            )

    def note(self, what: str, result: str, ok: bool | None = None, **figures: float) -> None:
        """Add a row. `ok` is None if nothing can be right or wrong."""
        ranks = f"{self._size} rank{'s' if self._size > 1 else ''}{self.way}"
        self._rows.append({"what": f"{ranks}: {what}", "result": result, "ok": ok, "figures": figures})
        if self._rank == 0:
            self._path.write_text(json.dumps(self._rows))

    def judged(self, good: bool) -> bool | None:
        """Return `good`, or None if figures are not judged."""
        return good if self._judged else None

    def verified(self, what: str, errors: Sequence[float], tolerance: float) -> None:
        """Add a row for the largest error of any rank."""
        error = max(hvpipe.allgather_object(max(errors)))
        self.note(what, f"error {error:.1e}", error <= tolerance, error=error, tolerance=tolerance)
