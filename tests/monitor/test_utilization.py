"""The sampler on this host, and its summary of samples written by hand."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from fake_nvml import LOST, FakeGpu, FakeNvml
from hvpipe.errors import HvpipeError
from hvpipe.monitor import utilization
from hvpipe.monitor.utilization import Sampler, SamplerOptions
from hvpipe.trace.sample import GpuReading, Sample, Utilization, summarise_samples

IDLE = Sample(1.0, 0.0, 0.25, 1000)
BUSY = Sample(2.0, 2.0, 0.75, 3000)
WITH_GPU = Sample(3.0, None, None, None, GpuReading(share=0.5, memory_bytes=10_000))


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_shares_are_averaged_and_memory_peaks() -> None:
    assert summarise_samples([IDLE, BUSY]) == Utilization(1.0, 0.5, 3000, None, None, 2)
    assert summarise_samples([IDLE, WITH_GPU]) == Utilization(0.0, 0.25, 1000, 0.5, 10_000, 2)
    assert summarise_samples([]) == Utilization(None, None, None, None, None, 0)


def test_the_sampler_runs_until_stopped() -> None:
    started_s = time.monotonic()
    with Sampler(3, SamplerOptions(period_s=0.02)) as sampler:
        until(lambda: sum(range(100_000)) > 0 and len(sampler.samples()) >= 2)  # keeps a core busy
    samples = sampler.samples()
    assert len(samples) >= 2
    assert all(started_s <= sample.time_s <= time.monotonic() for sample in samples)
    assert all(0 <= (sample.system_share or 0) <= 1 for sample in samples)
    summary = sampler.summary()
    assert summary.process_cores is not None
    assert summary.process_cores > 0
    assert summary.resident_peak_bytes is not None
    assert summary.resident_peak_bytes > 1_000_000
    assert not [thread for thread in threading.enumerate() if thread.name == "hvpipe-utilization"]
    assert sampler.samples() == samples


def test_a_short_run_still_has_one_sample() -> None:
    with Sampler(options=SamplerOptions(period_s=60.0)) as sampler:
        pass
    assert len(sampler.samples()) == 1


def test_events_are_curves_of_the_rank() -> None:
    with Sampler(3, SamplerOptions(period_s=60.0)) as sampler:
        pass
    events = sampler.events()
    assert {event.name for event in events} >= {"cores busy with this rank", "host busy", "memory"}
    assert {(event.category, event.rank) for event in events} == {("utilization", 3)}


def test_starting_and_stopping_twice_is_harmless() -> None:
    sampler = Sampler(options=SamplerOptions(period_s=60.0))
    sampler.start()
    sampler.start()
    sampler.stop()
    sampler.stop()
    assert len(sampler.samples()) == 1


def test_without_psutil_and_nvml_there_are_no_numbers_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler(options=SamplerOptions(period_s=60.0)) as sampler:
        pass
    summary = sampler.summary()
    assert replace(summary, sampler_cores=None) == Utilization(None, None, None, None, None, 1)
    assert sampler.events() == ()
    assert sampler.notes() == ["no GPU figures: nvidia-ml-py is not installed (pip install 'hvpipe[gpu]')"]


def test_the_sampler_reads_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    energy_mj = FakeNvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION
    gpus = [FakeGpu(0), FakeGpu(1, fields={FakeNvml.NVML_FI_DEV_POWER_INSTANT: 300_000, energy_mj: 5_000})]
    nvml = FakeNvml(gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    with Sampler(options=SamplerOptions(period_s=0.02, local_rank=1)) as sampler:
        until(lambda: len(sampler.samples()) > 2)
        gpus[1].fields[energy_mj] = 65_000
    summary = sampler.summary()
    assert summary.gpu == "GPU-1aaa"
    assert (summary.gpu_share, summary.gpu_memory_share) == (pytest.approx(0.41), pytest.approx(0.2))
    assert (summary.gpu_memory_peak_bytes, summary.gpu_peak_celsius) == (1000, 61)
    assert (summary.gpu_power_w, summary.gpu_energy_j) == (pytest.approx(300), 60.0)
    assert nvml.opened == 0
    assert {event.name for event in sampler.events()} >= {"GPU busy", "GPU power", "GPU clock", "GPU memory"}


def test_losing_a_gpu_does_not_end_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([gpu]))  # type: ignore[arg-type]
    with Sampler(options=SamplerOptions(period_s=0.02)) as sampler:
        until(lambda: len(sampler.samples()) > 2)
        gpu.fails = {"all": LOST}
        lost_at = len(sampler.samples())
        until(lambda: len(sampler.samples()) > lost_at + 2)
    assert sampler.samples()[0].gpu.share == 0.4
    assert sampler.samples()[-1].gpu.share is None
    assert sampler.samples()[-1].resident_bytes is not None
    assert "Made-up GPU stopped answering: GPU is lost" in sampler.notes()


def test_a_row_has_a_column_for_each_figure() -> None:
    row = WITH_GPU.to_row()
    assert (row["time_s"], row["gpu_share"], row["gpu_memory_bytes"], row["gpu_power_w"]) == (
        *(3.0, 0.5, 10_000),
        None,
    )
    assert "gpu" not in row


def test_slow_readings_are_taken_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling takes at most 1 % of a core, however slow the counters of the host are."""

    def slow(sample: Sample) -> None:
        until_s = time.thread_time() + 0.003
        while time.thread_time() < until_s:
            pass

    with Sampler(options=SamplerOptions(period_s=0.001, on_sample=slow)) as sampler:
        until(lambda: len(sampler.samples()) > 2)
    times_s = [sample.time_s for sample in sampler.samples()]
    assert times_s[1] - times_s[0] >= 0.3
    assert times_s[2] - times_s[1] >= 0.3


def test_every_sample_is_passed_to_the_callback() -> None:
    seen: list[Sample] = []
    with Sampler(options=SamplerOptions(period_s=0.02, on_sample=seen.append)) as sampler:
        until(lambda: len(seen) > 2)
    assert tuple(seen) == sampler.samples()


def test_a_long_run_keeps_evenly_spaced_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "_MOST_SAMPLES", 8)
    monkeypatch.setattr(utilization, "_MOST_OF_A_CORE", 1e9)
    seen: list[Sample] = []
    with Sampler(options=SamplerOptions(period_s=0.001, on_sample=seen.append)) as sampler:
        until(lambda: len(seen) > 40)
    kept = [seen.index(sample) for sample in sampler.samples()]
    assert len(kept) <= 8
    assert kept[:-1] == list(range(0, kept[-2] + 1, kept[1]))  # evenly, except for the last
    assert kept[1] in (8, 16)


def test_a_period_of_zero_is_refused() -> None:
    with pytest.raises(HvpipeError, match="Received: period_s=0"):
        SamplerOptions(period_s=0)
