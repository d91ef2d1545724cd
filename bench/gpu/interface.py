"""What bench.gpu.check_worker wants of an array library and its device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class GpuUnderTest(Protocol):
    """Arrays on this rank's device, work for it, and its clock; all is enqueued on the default stream."""

    name: str

    def put(self, values: Numbers, dtype: str) -> Any:
        """A new device array of these numbers."""

    def get(self, array: Any) -> Numbers:
        """The numbers of a device array, once all that was enqueued is done."""

    def faces(self, array: Any) -> dict[str, Any]:
        """The same memory as other libraries and protocols show it."""

    def copy(self, target: Any, source: Any) -> None: ...

    def multiply(self) -> None:
        """A matrix product, much shorter than an all-reduce of 64 MB."""

    def hold(self) -> None:
        """Keep the device waiting while the host enqueues what is measured."""

    def side_stream(self) -> AbstractContextManager[object]:
        """Another stream inside the block, which does not wait for the default one nor that for it."""

    def synchronize(self) -> None: ...

    def mark(self) -> Any:
        """A point in what is enqueued."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """From one mark to another; waits for both."""
