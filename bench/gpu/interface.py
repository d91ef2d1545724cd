"""What bench.gpu.check_worker needs from an array library and its device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class GpuUnderTest(Protocol):
    """Arrays on this rank's device, work for it, and its clock. All work goes to the default stream."""

    name: str

    def put(self, values: Numbers, dtype: str) -> Any:
        """Return a new device array of these numbers."""

    def get(self, array: Any) -> Numbers:
        """Return the numbers of a device array, once all enqueued work is done."""

    def faces(self, array: Any) -> dict[str, Any]:
        """Return the same memory as other libraries and protocols present it."""

    def copy(self, target: Any, source: Any) -> None: ...

    def multiply(self) -> None:
        """Enqueue a matrix product, much shorter than an all-reduce of 64 MB."""

    def hold(self) -> None:
        """Keep the device waiting while the host enqueues what is measured."""

    def side_stream(self) -> AbstractContextManager[object]:
        """Use another stream inside the block. It and the default stream do not wait for each other."""

    def synchronize(self) -> None: ...

    def mark(self) -> Any:
        """Return a point in the enqueued work."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks; waits for both."""
