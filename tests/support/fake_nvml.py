"""A stand-in for pynvml with the calls that hvpipe makes. Tests define its GPUs and its failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, LOST = 3, 4, 6, 15


class NVMLError(Exception):
    """Stands in for pynvml's error. `value` is NVML's error code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        known = {3: "Not Supported", 4: "Insufficient Permissions", 9: "Driver Not Loaded", 15: "GPU is lost"}
        return known.get(self.value, f"NVML Error with code {self.value}")


@dataclass
class FakeGpu:
    """A GPU. `fields` maps field ids to values, and `fails` maps calls or field ids to error codes."""

    index: int
    instances: list[FakeInstance] = field(default_factory=list)
    fields: dict[int, float] = field(default_factory=dict)
    fails: dict[str | int, int] = field(default_factory=dict)
    processes: dict[int, int | None] = field(default_factory=dict)
    process_samples: list[SimpleNamespace] = field(default_factory=list)
    whole: FakeGpu | None = None

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index}aaa"

    memory_used = 1000


@dataclass
class FakeInstance(FakeGpu):
    """A MIG device, number `place` of its GPU."""

    place: int = 0
    memory_used = 100

    @property
    def uuid(self) -> str:
        return f"MIG-{self.index}b{self.place}"


class FakeNvml:
    """Stands in for the pynvml module.

    `starts` is the error code of nvmlInit; `opened` counts open sessions.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 0x02000028
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION = 83
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198

    def __init__(self, gpus: list[FakeGpu], starts: int = 0) -> None:
        self.gpus = gpus
        self.starts = starts
        self.opened = 0
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        if self.starts:
            raise NVMLError(self.starts)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._answer(self.gpus[index], "nvmlDeviceGetHandleByIndex", lambda: self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        return next(
            one for gpu in self.gpus for one in (gpu, *gpu.instances) if one.uuid == uuid
        )  # as NVML does: it accepts only the whole UUID

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        return b"Made-up GPU"

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return self._answer(gpu, "nvmlDeviceGetMigMode", lambda: [int(bool(gpu.instances))] * 2)

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.instances):
            raise NVMLError(NOT_FOUND)
        return gpu.instances[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: FakeGpu) -> FakeGpu:
        return next(gpu for gpu in self.gpus if device in gpu.instances)

    def nvmlDeviceGetGpuInstanceId(self, device: FakeInstance) -> int:
        return device.place + 1

    def nvmlDeviceGetComputeInstanceId(self, device: FakeInstance) -> int:
        return 0

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return self._answer(
            gpu, "nvmlDeviceGetUtilizationRates", lambda: SimpleNamespace(gpu=40 + gpu.index, memory=20)
        )

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        """As NVML: the first version counts what the driver keeps for itself as used."""
        name, reserved = ("nvmlDeviceGetMemoryInfo_v2", 0) if version else ("nvmlDeviceGetMemoryInfo", 500)
        used = gpu.memory_used + reserved
        return self._answer(gpu, name, lambda: SimpleNamespace(used=used, total=8000))

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return self._answer(gpu, "nvmlDeviceGetClockInfo", lambda: 1500)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer(gpu, "nvmlDeviceGetTemperature", lambda: 61)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, asked: list[tuple[int, int]]) -> list[Any]:
        return self._answer(
            gpu, "nvmlDeviceGetFieldValues", lambda: [self._field(gpu, id_, scope) for id_, scope in asked]
        )

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "nvmlDeviceGetPowerUsage", lambda: 250_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "nvmlDeviceGetTotalEnergyConsumption", lambda: 7_000)

    def nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:
        return self._answer(gpu, "nvmlDeviceGetPcieThroughput", lambda: 30 + counter)

    def nvmlDeviceGetProcessUtilization(self, gpu: FakeGpu, seen_us: int) -> list[SimpleNamespace]:
        new = [one for one in gpu.process_samples if one.timeStamp > seen_us]
        if not new:
            raise NVMLError(NOT_FOUND)
        return self._answer(gpu, "nvmlDeviceGetProcessUtilization", lambda: new)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return self._answer(
            gpu,
            "nvmlDeviceGetComputeRunningProcesses",
            lambda: [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes.items()],
        )

    def _answer(self, gpu: FakeGpu, call: str, answer: Callable[[], Any]) -> Any:
        self.asked.append(call)
        code = gpu.fails.get(call) or gpu.fails.get("all")
        if code:
            raise NVMLError(code)
        return answer()

    def _field(self, gpu: FakeGpu, id_: int, scope: int) -> SimpleNamespace:
        links = (self.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, self.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        assert scope == (0xFFFFFFFF if id_ in links else 0)  # the sum over all links
        code = gpu.fails.get(id_, 0 if id_ in gpu.fields else NOT_SUPPORTED)
        value = SimpleNamespace(ullVal=gpu.fields.get(id_, 0))
        return SimpleNamespace(nvmlReturn=code, valueType=3, value=value)
