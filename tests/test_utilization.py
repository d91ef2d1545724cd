"""The sampler on this machine, and what it makes of samples written by hand."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from hvpipe import utilization
from hvpipe.errors import HvpipeError
from hvpipe.utilization import Sample, Sampler, Utilization, summarise_samples

IDLE = Sample(1.0, 0.0, 0.25, 1000, None, None)
BUSY = Sample(2.0, 2.0, 0.75, 3000, None, None)
WITH_GPU = Sample(3.0, None, None, None, 0.5, 10_000)


def test_shares_are_averaged_and_memory_peaks() -> None:
    assert summarise_samples([IDLE, BUSY]) == Utilization(1.0, 0.5, 3000, None, None, 2)
    assert summarise_samples([IDLE, WITH_GPU]) == Utilization(0.0, 0.25, 1000, 0.5, 10_000, 2)
    assert summarise_samples([]) == Utilization(None, None, None, None, None, 0)


def test_json_out_and_in() -> None:
    summary = summarise_samples([IDLE, BUSY])
    assert Utilization.from_json(summary.to_json()) == summary


def test_it_samples_until_stopped() -> None:
    started_s = time.monotonic()
    with Sampler(period_s=0.02, rank=3) as sampler:
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s:  # keep a core busy
            pass
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
    with Sampler(period_s=60.0) as sampler:
        pass
    assert len(sampler.samples()) == 1


def test_events_are_curves_of_this_rank() -> None:
    with Sampler(period_s=60.0, rank=3) as sampler:
        pass
    events = sampler.events()
    assert {event.name for event in events} >= {"cores busy with this rank", "host busy", "memory"}
    assert {(event.category, event.rank) for event in events} == {("utilization", 3)}


def test_start_and_stop_twice() -> None:
    sampler = Sampler(period_s=60.0)
    sampler.start()
    sampler.start()
    sampler.stop()
    sampler.stop()
    assert len(sampler.samples()) == 1


def test_without_psutil_and_nvml_there_are_no_numbers_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler(period_s=60.0) as sampler:
        pass
    assert sampler.summary() == Utilization(None, None, None, None, None, 1)
    assert sampler.events() == ()
    assert utilization.gpu_names() == []


class FakeNvml:
    """Two GPUs, of which the second stops answering when told to."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"GPU %d" % handle

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        if self.fails and handle == 1:
            raise self.NVMLError
        return type("Rates", (), {"gpu": 40 + 20 * handle})

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return type("Memory", (), {"used": 1000})


@pytest.mark.parametrize(("fails", "share", "used_bytes"), [(False, 0.5, 2000), (True, None, None)])
def test_gpus(
    fails: bool, share: float | None, used_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(fails)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    assert utilization.gpu_names() == ["GPU 0", "GPU 1"]
    with Sampler(period_s=60.0) as sampler:
        pass
    assert sampler.summary().gpu_share == share
    assert sampler.summary().gpu_memory_peak_bytes == used_bytes
    assert nvml.opened == 0


def test_a_period_that_is_none() -> None:
    with pytest.raises(HvpipeError, match="Received: period_s=0"):
        Sampler(period_s=0)
