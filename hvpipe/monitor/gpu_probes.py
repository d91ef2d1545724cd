"""The queries to a GPU's driver for every reading. A query that the driver cannot answer is dropped."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]
"""Readings by the names of GpuReading's fields."""

_ALL_LINKS = 0xFFFFFFFF  # scope of a field: the sum over NVLinks
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by NVML_VALUE_TYPE

# Codes of an NVMLError that would come again next time: invalid argument, not supported, no permission,
# function not found, argument version mismatch, deprecated.
_NEVER = {2, 3, 4, 13, 25, 26}
_MEMORY = "memory, second version"
# NVML was shut down; the GPU is lost, needs a reset, or was not found.
_LOST = {1, 15, 16, 28}


@dataclass(frozen=True)
class _Field:
    """One of NVML's field values. `scale` converts to SI units; "rate" and "since start" are counters."""

    constant: str
    name: str
    label: str
    scale: float
    kind: str = "rate"
    scope: int = 0


_FIELDS = (
    _Field("NVML_FI_DEV_POWER_INSTANT", "power_w", "power", 1e-3, "value"),
    _Field("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "energy_j", "energy", 1e-3, "since start"),
    _Field("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "pcie_sent_bytes_per_s", "PCIe sending", 1.0),
    _Field("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", "pcie_received_bytes_per_s", "PCIe receiving", 1.0),
    _Field(
        *("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "nvlink_sent_bytes_per_s", "NVLink sending"),
        *(1024.0, "rate", _ALL_LINKS),
    ),
    _Field(
        *("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", "nvlink_received_bytes_per_s", "NVLink receiving"),
        *(1024.0, "rate", _ALL_LINKS),
    ),
)


class GpuProbes:
    """Queries `device`, which is the GPU `whole` or, in MIG mode, a part of it.

    `missing` lists the labels of missing readings by reason. `lost` is the reason why the GPU stopped
    answering, or None.
    """

    def __init__(self, library: Any, device: Any, whole: Any) -> None:
        self.missing: dict[str, list[str]] = {}
        self.lost: str | None = None
        self._library = library
        self._device = device
        self._whole = whole
        self._fields = [field for field in _FIELDS if hasattr(library, field.constant)]
        self._before: dict[str, tuple[float, float]] = {}  # time and value of a counter's last reading
        self._first: dict[str, float] = {}
        self._seen_us = 0  # time of the newest sample of process utilization
        self._probes: dict[str, Callable[[float], Values]] = {
            "utilization": lambda _: self._utilization(),
            _MEMORY: lambda _: {  # without what the driver keeps for itself, as nvidia-smi
                "memory_bytes": library.nvmlDeviceGetMemoryInfo(device, library.nvmlMemory_v2).used
            },
            "SM clock": lambda _: {"sm_mhz": library.nvmlDeviceGetClockInfo(whole, library.NVML_CLOCK_SM)},
            "temperature": lambda _: {
                "celsius": library.nvmlDeviceGetTemperature(whole, library.NVML_TEMPERATURE_GPU)
            },
            "fields": self._field_values,
            "process utilization": lambda _: self._process_share(),
            "process memory": lambda _: self._process_memory(),
        }
        for field in set(_FIELDS) - set(self._fields):
            self._use_older_call(field, "unknown to this nvidia-ml-py")

    def leave_out(self, label: str, why: str) -> None:
        """Drop the query with this label."""
        if self._probes.pop(label, None) is not None:
            self.missing.setdefault(why, []).append(label)

    def look(self, now_s: float) -> Values:
        """Return all available readings at this `time.monotonic()`."""
        values: Values = {}
        for label, probe in list(self._probes.items()):
            try:
                values.update(probe(now_s))
            except self._library.NVMLError as error:
                if error.value in _LOST:
                    self._probes.clear()
                    self.lost = str(error)
                    break
                if error.value in _NEVER:
                    self._give_up(label, str(error))
        return values

    def _give_up(self, label: str, why: str) -> None:
        if label == "fields":
            del self._probes[label]
            for field in self._fields:
                self._use_older_call(field, why)
        elif label == _MEMORY:  # drivers before 510
            del self._probes[label]
            self._probes["memory"] = lambda _: {
                "memory_bytes": self._library.nvmlDeviceGetMemoryInfo(self._device).used
            }
        else:
            self.leave_out(label, why)

    def _use_older_call(self, field: _Field, why: str) -> None:
        """Replace a field that the driver lacks with an older call for the same reading, if one exists."""
        nvml, whole, name = self._library, self._whole, field.name
        calls: dict[str, Callable[[], float]] = {
            "power_w": lambda: 1e-3 * nvml.nvmlDeviceGetPowerUsage(whole),
            "energy_j": lambda: self._since_start(
                name, 1e-3 * nvml.nvmlDeviceGetTotalEnergyConsumption(whole)
            ),
            # These two calls count for 20 ms, and return KB/s.
            "pcie_sent_bytes_per_s": lambda: (
                1e3 * nvml.nvmlDeviceGetPcieThroughput(whole, nvml.NVML_PCIE_UTIL_TX_BYTES)
            ),
            "pcie_received_bytes_per_s": lambda: (
                1e3 * nvml.nvmlDeviceGetPcieThroughput(whole, nvml.NVML_PCIE_UTIL_RX_BYTES)
            ),
        }
        if name in calls:
            call = calls[name]
            self._probes[field.label] = lambda _: {name: call()}
        else:
            self.missing.setdefault(why, []).append(field.label)

    def _utilization(self) -> Values:
        rates = self._library.nvmlDeviceGetUtilizationRates(self._device)
        return {"share": rates.gpu / 100, "memory_share": rates.memory / 100}

    def _field_values(self, now_s: float) -> Values:
        nvml = self._library
        asked = [(getattr(nvml, field.constant), field.scope) for field in self._fields]
        answers = nvml.nvmlDeviceGetFieldValues(self._whole, asked) if asked else []
        values: Values = {}
        for field, answer in zip(tuple(self._fields), answers, strict=True):
            if answer.nvmlReturn in _LOST:
                raise nvml.NVMLError(answer.nvmlReturn)
            if answer.nvmlReturn in _NEVER:
                self._fields.remove(field)
                self._use_older_call(field, str(nvml.NVMLError(answer.nvmlReturn)))
            elif answer.nvmlReturn == 0:
                read = field.scale * getattr(answer.value, _VALUE_MEMBERS[answer.valueType])
                value = self._rate(field.name, read, now_s) if field.kind == "rate" else read
                if value is not None:
                    since_start = field.kind == "since start"
                    values[field.name] = self._since_start(field.name, value) if since_start else value
        return values

    def _since_start(self, name: str, value: float) -> float:
        return value - self._first.setdefault(name, value)

    def _rate(self, name: str, value: float, now_s: float) -> float | None:
        """Return a counter's rate since its last reading; None at the first reading or after a reset."""
        before = self._before.get(name)
        self._before[name] = (now_s, value)
        if before is None or now_s <= before[0] or value < before[1]:
            return None
        return (value - before[1]) / (now_s - before[0])

    def _process_share(self) -> Values:
        samples = self._library.nvmlDeviceGetProcessUtilization(self._device, self._seen_us)
        if not samples:
            return {}
        self._seen_us = max(one.timeStamp for one in samples)
        mine = [one for one in samples if one.pid == os.getpid()]
        newest = max(mine, key=lambda one: one.timeStamp, default=None)
        return {"process_share": newest.smUtil / 100 if newest is not None else 0.0}

    def _process_memory(self) -> Values:
        for process in self._library.nvmlDeviceGetComputeRunningProcesses(self._device):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return {"process_memory_bytes": process.usedGpuMemory}
        return {}
