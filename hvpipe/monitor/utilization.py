"""Samples CPU and GPU utilization of this rank while it trains, in a separate thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from hvpipe.environment.this_host import CpuMeter
from hvpipe.errors import HvpipeError
from hvpipe.monitor.gpu_meter import GpuMeter
from hvpipe.monitor.nvml import NvmlMissing
from hvpipe.proc import ThreadMeter
from hvpipe.trace.events import Event
from hvpipe.trace.sample import GpuReading, Sample, Utilization, sample_events, summarise_samples

PERIOD_S = 0.1
_MOST_OF_A_CORE = 0.008  # the last look comes on top, and docs/gpu.md promises less than 0.01 in all
# Its name in csrc/progress. Not "hvpipe MPI sums": a thread that waits in MPI keeps its core as busy as one
# that moves data.
_COMMUNICATION_THREAD = "hvpipe progress"
_MOST_SAMPLES = 18_000  # half an hour at 10 Hz; some 20 MB


@dataclass(frozen=True)
class SamplerOptions:
    """The sampling period and the GPU. The sampler's thread calls `on_sample` with each sample."""

    period_s: float = PERIOD_S
    local_rank: int = 0
    visible_gpus: str | None = None
    on_sample: Callable[[Sample], None] | None = None

    def __post_init__(self) -> None:
        if not self.period_s > 0:
            raise HvpipeError(
                f"period_s should be a positive number of seconds. Received: period_s={self.period_s}"
            )


class Sampler:
    """A thread that samples every `period_s`. Use it as a context manager, or `start` and `stop` it.

    Sampling never fails a run: what cannot be measured is None. If a sample takes more than 1 % of the period
    on a core, the period grows until it does not. If a long run has too many samples, every second one is
    dropped, and from then on only every second one is kept. Times are `time.monotonic()`.
    """

    def __init__(self, rank: int = 0, options: SamplerOptions | None = None) -> None:
        self._rank = rank
        self._options = options or SamplerOptions()
        self._samples: list[Sample] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []
        self._gpu: str | None = None
        self._took_s = 0.0
        self._looked_s = 0.0

    def start(self) -> None:
        """Start to sample. Another call while it samples does nothing."""
        if self._thread is not None:
            return
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="hvpipe-utilization", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after a last sample. Another call does nothing."""
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
        """Return the samples so far."""
        return tuple(self._samples)

    def events(self) -> tuple[Event, ...]:
        """Return the samples as trace events, one curve for each figure."""
        return tuple(event for sample in self.samples() for event in sample_events(sample, self._rank))

    def summary(self) -> Utilization:
        """Return the summary of all samples. Call it after `stop`."""
        cores = self._took_s / self._looked_s if self._looked_s > 0 else None
        return summarise_samples(self.samples(), self._gpu, cores)

    def notes(self) -> list[str]:
        """Return sentences that say which figures could not be measured and why. Call it after `stop`."""
        return list(self._notes)

    def _run(self) -> None:
        meters = CpuMeter(), ThreadMeter(_COMMUNICATION_THREAD)
        with self._open_gpu() as gpu:
            self._look_until_stopped(meters, gpu)

    @contextlib.contextmanager
    def _open_gpu(self) -> Iterator[GpuMeter | None]:
        try:
            meter = GpuMeter(self._options.visible_gpus, self._options.local_rank)
        except NvmlMissing as missing:
            self._notes.append(f"no GPU figures: {missing}")
            yield None
            return
        self._gpu = meter.uuid
        try:
            yield meter
        finally:
            self._notes.extend(meter.notes())
            meter.close()

    def _look_until_stopped(self, meters: tuple[CpuMeter, ThreadMeter], gpu: GpuMeter | None) -> None:
        period_s = self._options.period_s
        keep_every, looks = 1, 0
        began_s = due_s = time.monotonic()
        began_cpu_s = time.thread_time()
        stopping = False
        while not stopping:
            due_s = max(due_s + period_s, time.monotonic())
            stopping = self._stopping.wait(due_s - time.monotonic())
            before_s = time.thread_time()
            sample = _look(*meters, gpu)
            if looks % keep_every == 0 or stopping:
                self._samples.append(sample)
            looks += 1
            if len(self._samples) >= _MOST_SAMPLES:
                del self._samples[1::2]
                keep_every *= 2
            if self._options.on_sample is not None:
                self._options.on_sample(sample)
            took_s = time.thread_time() - before_s
            period_s = max(self._options.period_s, took_s / _MOST_OF_A_CORE)
        self._took_s = time.thread_time() - began_cpu_s
        self._looked_s = time.monotonic() - began_s


def _look(processor: CpuMeter, communication: ThreadMeter, gpu: GpuMeter | None) -> Sample:
    now_s = time.monotonic()
    reading = gpu.look(now_s) if gpu is not None else GpuReading()
    return Sample(now_s, *processor.look(), reading, communication.look())
