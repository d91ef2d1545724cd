"""How busy this machine is while it trains: psutil for the processor, NVML for GPUs where there are any."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType, TracebackType
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.trace import Event


@dataclass(frozen=True)
class Sample:
    """One look at the machine. Shares are 0 to 1; None where it cannot be measured."""

    time_s: float
    process_cores: float | None
    system_share: float | None
    resident_bytes: int | None
    gpu_share: float | None
    gpu_memory_bytes: int | None


@dataclass(frozen=True)
class Utilization:
    """Means over a run (memory: peaks) on one rank; None where it could not be measured.

    `process_cores` is the number of cores that this rank kept busy, `system_share` the share of all the
    host's cores that was busy with anything, `gpu_share` the mean over the GPUs that NVML shows.
    """

    process_cores: float | None
    system_share: float | None
    resident_peak_bytes: int | None
    gpu_share: float | None
    gpu_memory_peak_bytes: int | None
    samples: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Utilization:
        return Utilization(**document)


class Sampler:
    """A thread that looks every `period_s`; use it as a context manager, or `start` and `stop`.

    Sampling never fails a run: what cannot be measured is None. Event times are `time.monotonic()`.
    """

    def __init__(self, period_s: float = 0.5, rank: int = 0) -> None:
        if not period_s > 0:
            raise HvpipeError(
                f"period_s should be a positive number of seconds. Received: period_s={period_s}"
            )
        self._period_s = period_s
        self._rank = rank
        self._samples: list[Sample] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample; calling it again while it samples does nothing."""
        if self._thread is not None:
            return
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="hvpipe-utilization", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after a last sample; calling it again does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def samples(self) -> tuple[Sample, ...]:
        return tuple(self._samples)

    def events(self) -> tuple[Event, ...]:
        """The samples as trace events, a curve for the processor and one for the GPUs."""
        return tuple(event for sample in self.samples() for event in _events(sample, self._rank))

    def summary(self) -> Utilization:
        return summarise_samples(self.samples())

    def _run(self) -> None:
        processor = _Processor()
        gpus = _Gpus()
        try:
            while not self._stopping.wait(self._period_s):
                self._samples.append(_look(processor, gpus))
            self._samples.append(_look(processor, gpus))
        finally:
            gpus.close()


def summarise_samples(samples: Sequence[Sample]) -> Utilization:
    """Means of the shares, peaks of the memory."""
    return Utilization(
        process_cores=_mean([s.process_cores for s in samples]),
        system_share=_mean([s.system_share for s in samples]),
        resident_peak_bytes=max(
            (s.resident_bytes for s in samples if s.resident_bytes is not None), default=None
        ),
        gpu_share=_mean([s.gpu_share for s in samples]),
        gpu_memory_peak_bytes=max(
            (s.gpu_memory_bytes for s in samples if s.gpu_memory_bytes is not None), default=None
        ),
        samples=len(samples),
    )


def gpu_names() -> list[str]:
    """Names of the GPUs that NVML shows; empty without a GPU, a driver or nvidia-ml-py."""
    gpus = _Gpus()
    try:
        return gpus.names()
    finally:
        gpus.close()


def gpu_memory_bytes() -> list[int]:
    """Memory of each of the GPUs that NVML shows; empty where it shows none, or does not say."""
    gpus = _Gpus()
    try:
        return gpus.memory_bytes()
    finally:
        gpus.close()


class _Processor:
    """psutil's counters since the last look; everything is None where psutil is missing."""

    def __init__(self) -> None:
        self._psutil: ModuleType | None
        try:
            import psutil
        except ImportError:
            self._psutil = None
            return
        self._psutil = psutil
        self._process = psutil.Process()
        self._process.cpu_percent(None)  # the first call only starts the clock
        psutil.cpu_percent(None)

    def look(self) -> tuple[float | None, float | None, int | None]:
        """Cores busy with this process, share of all cores busy, resident bytes."""
        if self._psutil is None:
            return None, None, None
        try:
            return (
                self._process.cpu_percent(None) / 100,
                self._psutil.cpu_percent(None) / 100,
                self._process.memory_info().rss,
            )
        except (self._psutil.Error, OSError):
            return None, None, None


class _Gpus:
    """NVML's view of the GPUs; none where it cannot be loaded."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # no package, no driver, no permission: a run without these numbers is still a run
            self.close()

    def names(self) -> list[str]:
        try:
            names = [self._nvml.nvmlDeviceGetName(handle) for handle in self._handles]
        except Exception:
            return []
        return [name.decode() if isinstance(name, bytes) else str(name) for name in names]

    def memory_bytes(self) -> list[int]:
        try:
            return [int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in self._handles]
        except Exception:
            return []

    def look(self) -> tuple[float | None, int | None]:
        """Mean share of time in which a kernel ran, and bytes in use on all GPUs."""
        if not self._handles:
            return None, None
        try:
            shares = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
            used_bytes = sum(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        except Exception:  # a GPU fell off the bus, or forbids the question (MIG): never the run's problem
            return None, None
        return sum(shares) / len(shares), used_bytes

    def close(self) -> None:
        self._handles = []
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return


def _look(processor: _Processor, gpus: _Gpus) -> Sample:
    process_cores, system_share, resident_bytes = processor.look()
    gpu_share, gpu_memory_bytes = gpus.look()
    return Sample(time.monotonic(), process_cores, system_share, resident_bytes, gpu_share, gpu_memory_bytes)


def _events(sample: Sample, rank: int) -> list[Event]:
    def event(name: str, values: dict[str, float | None]) -> list[Event]:
        known = {key: round(value, 4) for key, value in values.items() if value is not None}
        at_s = sample.time_s
        return [Event(name, "utilization", rank, "utilization", at_s, at_s, known)] if known else []

    resident = sample.resident_bytes
    memory_mb = resident / 1e6 if resident is not None else None
    return [
        *event("cores busy with this rank", {"cores": sample.process_cores}),
        *event("host busy", {"share": sample.system_share}),
        *event("memory", {"MB": memory_mb}),
        *event("GPU busy", {"share": sample.gpu_share}),
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
