"""Samples of a rank's CPU and GPU utilization, their summary over a run, and their curves in a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hvpipe.trace.events import Event


@dataclass(frozen=True)
class GpuReading:
    """One reading of a GPU; None where the device, the driver or permissions give no value.

    `share` (0 to 1) is the share of time in which any kernel ran; `memory_share` is the share in which memory
    was read or written. `energy_j` counts from the first reading. `process_*` count this process only.
    """

    share: float | None = None
    memory_share: float | None = None
    memory_bytes: int | None = None
    sm_mhz: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    celsius: int | None = None
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None
    nvlink_sent_bytes_per_s: float | None = None
    nvlink_received_bytes_per_s: float | None = None
    process_share: float | None = None
    process_memory_bytes: int | None = None


@dataclass(frozen=True)
class Sample:
    """One reading of the host, the process and its GPU. Shares are 0 to 1; None if it cannot be measured.

    `communication_cores` is the part of `process_cores` that hvpipe's own thread takes to look for data, move
    it and add it up.
    """

    time_s: float
    process_cores: float | None
    system_share: float | None
    resident_bytes: int | None
    gpu: GpuReading = field(default_factory=GpuReading)
    communication_cores: float | None = None

    def to_row(self) -> dict[str, float | None]:
        """Return all figures by name; the GPU's names begin with gpu_."""
        row = asdict(self)
        gpu = row.pop("gpu")
        return {**row, **{f"gpu_{name}": value for name, value in gpu.items()}}


@dataclass(frozen=True)
class Utilization:
    """Utilization of one rank over a run; None if unknown.

    Figures are means, except for peaks of memory and temperature and the total energy. `process_cores` is the
    number of cores that this rank kept busy; `system_share` is the share of all the host's cores that were
    busy with anything. `gpu` is the UUID of this rank's GPU, which other ranks may use too. `sampler_cores`
    is the cost of the sampling itself.
    """

    process_cores: float | None
    system_share: float | None
    resident_peak_bytes: int | None
    gpu_share: float | None
    gpu_memory_peak_bytes: int | None
    samples: int
    gpu_memory_share: float | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None
    gpu_peak_celsius: int | None = None
    gpu: str | None = None
    sampler_cores: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values by field name."""
        return asdict(self)


def summarise_samples(
    samples: Sequence[Sample], gpu: str | None = None, sampler_cores: float | None = None
) -> Utilization:
    """Summarise samples: means of shares, peaks of memory. `gpu` is the UUID of the sampled GPU."""
    return Utilization(
        process_cores=_mean(s.process_cores for s in samples),
        system_share=_mean(s.system_share for s in samples),
        resident_peak_bytes=_most(s.resident_bytes for s in samples),
        gpu_share=_mean(s.gpu.share for s in samples),
        gpu_memory_peak_bytes=_most(s.gpu.memory_bytes for s in samples),
        samples=len(samples),
        gpu_memory_share=_mean(s.gpu.memory_share for s in samples),
        gpu_power_w=_mean(s.gpu.power_w for s in samples),
        gpu_energy_j=max((s.gpu.energy_j for s in samples if s.gpu.energy_j is not None), default=None),
        gpu_peak_celsius=_most(s.gpu.celsius for s in samples),
        gpu=gpu,
        sampler_cores=sampler_cores,
    )


def sample_events(sample: Sample, rank: int) -> list[Event]:
    """Return a point on the curve of each known figure."""

    def curve(name: str, **values: float | None) -> list[Event]:
        known = {key: round(value, 4) for key, value in values.items() if value is not None}
        at_s = sample.time_s
        return [Event(name, "utilization", rank, "utilization", at_s, at_s, known)] if known else []

    gpu = sample.gpu
    return [
        *curve("cores busy with this rank", cores=sample.process_cores),
        *curve("cores busy with communication", cores=sample.communication_cores),
        *curve("host busy", share=sample.system_share),
        *curve("memory", MB=_mega(sample.resident_bytes)),
        *curve("GPU busy", share=gpu.share),
        *curve("GPU memory busy", share=gpu.memory_share),
        *curve("GPU memory", MB=_mega(gpu.memory_bytes)),
        *curve("GPU clock", MHz=gpu.sm_mhz),
        *curve("GPU power", W=gpu.power_w),
        *curve("GPU energy", J=gpu.energy_j),
        *curve("GPU temperature", celsius=gpu.celsius),
        *curve(
            "PCIe MB/s", sent=_mega(gpu.pcie_sent_bytes_per_s), received=_mega(gpu.pcie_received_bytes_per_s)
        ),
        *curve(
            "NVLink MB/s",
            sent=_mega(gpu.nvlink_sent_bytes_per_s),
            received=_mega(gpu.nvlink_received_bytes_per_s),
        ),
        *curve("GPU busy with this rank", share=gpu.process_share),
        *curve("GPU memory of this rank", MB=_mega(gpu.process_memory_bytes)),
    ]


def _mega(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _most(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
