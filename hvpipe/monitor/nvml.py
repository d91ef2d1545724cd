"""The GPUs that NVML lists. The only file that imports pynvml (the package nvidia-ml-py)."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.monitor.visible_gpus import GpuInfo, MigDevice


class NvmlMissing(HvpipeError):
    """NVML cannot be used here; the message says why."""


class Nvml:
    """An initialised NVML. Use it as a context manager, or `close` it.

    Raises:
        NvmlMissing: Without the package, without a driver, or if the driver refuses.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlMissing("nvidia-ml-py is not installed (pip install 'hvpipe[gpu]')") from error
        try:
            pynvml.nvmlInit()
        except Exception as error:  # NVMLError, or OSError if the library does not load
            raise NvmlMissing(f"NVML does not start: {error}") from error
        self.library: Any = pynvml

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut NVML down."""
        with contextlib.suppress(self.library.NVMLError):
            self.library.nvmlShutdown()

    def gpus(self) -> list[GpuInfo]:
        """Return all GPUs that the driver shows to this process, in the order of nvidia-smi."""
        try:
            count = int(self.library.nvmlDeviceGetCount())
        except self.library.NVMLError as error:
            raise NvmlMissing(f"NVML lists no GPUs: {error}") from error
        found = []
        for index in range(count):
            with contextlib.suppress(
                self.library.NVMLError
            ):  # a GPU that fell off the bus, or that is not permitted
                found.append(self._gpu(self.library.nvmlDeviceGetHandleByIndex(index)))
        return found

    def driver_version(self) -> str:
        """Return the version of the driver, or "" if it does not tell."""
        with contextlib.suppress(self.library.NVMLError):
            return _text(self.library.nvmlSystemGetDriverVersion())
        return ""

    def handles(self, uuid: str) -> tuple[Any, Any]:
        """Return the device with this UUID, and its GPU: the same, or the whole GPU of a MIG device."""
        device = self.library.nvmlDeviceGetHandleByUUID(uuid)
        if uuid.startswith("MIG-"):
            return device, self.library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
        return device, device

    def _gpu(self, handle: Any) -> GpuInfo:
        return GpuInfo(
            uuid=_text(self.library.nvmlDeviceGetUUID(handle)),
            name=_text(self.library.nvmlDeviceGetName(handle)),
            memory_bytes=self._memory_bytes(handle),
            instances=tuple(self._instances(handle)),
        )

    def _memory_bytes(self, handle: Any) -> int | None:
        with contextlib.suppress(self.library.NVMLError):
            return int(self.library.nvmlDeviceGetMemoryInfo(handle).total)
        return None

    def _instances(self, handle: Any) -> list[MigDevice]:
        nvml = self.library
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] == 0:
                return []
            most = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
        except nvml.NVMLError:  # a GPU without MIG
            return []
        found = []
        for index in range(most):
            with contextlib.suppress(nvml.NVMLError):  # an unused index
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                found.append(
                    MigDevice(
                        _text(nvml.nvmlDeviceGetUUID(device)),
                        int(nvml.nvmlDeviceGetGpuInstanceId(device)),
                        int(nvml.nvmlDeviceGetComputeInstanceId(device)),
                        self._memory_bytes(device),
                    )
                )
        return found


def list_gpus() -> list[GpuInfo]:
    """Return the GPUs that NVML lists; [] without a GPU, a driver or nvidia-ml-py."""
    try:
        with Nvml() as nvml:
            return nvml.gpus()
    except NvmlMissing:
        return []


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
