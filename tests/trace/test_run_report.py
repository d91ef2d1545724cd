"""Summaries of runs, from traces written by hand."""

from __future__ import annotations

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.trace.events import Event, Trace
from hvpipe.trace.run_report import Summary, hidden_share, summarise, summarise_trace


def event(category: str, start_s: float, end_s: float, rank: int = 0) -> Event:
    return Event(category, category, rank, category, start_s, end_s)


# compute | 0####4  6######12       hidden: 2..4 and 9..12, that is 5 s
# reduce  |   2####6   9###12       of 2..6 and 9..12, that is 7 s
OVERLAPPED = (
    event("forward", 0, 3),
    event("backward", 2, 4),
    event("backward", 6, 11),
    event("update", 11, 12),
    event("reduce", 2, 5),
    event("reduce", 3, 6),
    event("reduce", 9, 12),
)


def test_hidden_share_of_one_rank() -> None:
    assert hidden_share(Trace(OVERLAPPED)) == pytest.approx(5 / 7)


def test_computing_on_another_rank_hides_nothing() -> None:
    trace = Trace(
        (event("reduce", 0, 1, rank=0), event("backward", 0, 1, rank=1), event("reduce", 1, 2, rank=1))
    )
    assert hidden_share(trace) == 0.0


@pytest.mark.parametrize("category", ["reduce", "forward"])
def test_without_reduces_or_computing_there_is_no_hidden_share(category: str) -> None:
    assert hidden_share(Trace((event(category, 0, 1),))) is None
    assert hidden_share(Trace()) is None


def test_summary_by_hand() -> None:
    utilization = [
        {"process_cores": 1.5, "system_share": 0.5, "gpu_share": None},
        {"process_cores": 0.5, "system_share": 1.0, "gpu_share": None},
    ]
    counters = [{"bytes_sent": 1000.0, "exposed_wait_s": 0.5}, {"bytes_sent": 500.0, "exposed_wait_s": 1.5}]
    # Each rank's first step, 9 and 8 s, includes compilation. 4 steps of 6 images, median 0.3 s.
    durations_s = [[9.0, 0.2, 0.3, 0.3], [8.0, 0.2, 0.4, 0.3]]
    summary = summarise(Trace(OVERLAPPED), counters, durations_s, 24, utilization)
    assert summary == Summary(
        ranks=2,
        steps=4,
        step_s=pytest.approx(0.3),
        images_per_s=pytest.approx(20.0),
        hidden_share=pytest.approx(5 / 7),
        exposed_wait_s=1.0,
        system_share=0.75,
        process_cores=2.0,
        gpu_share=None,
        bytes_sent=1500,
    )


def test_ranks_that_share_a_gpu_share_its_power() -> None:
    mine = {"gpu": "GPU-a", "gpu_memory_peak_bytes": 5, "gpu_power_w": 200.0, "gpu_energy_j": 7200.0}
    other = {"gpu": "GPU-b", "gpu_memory_peak_bytes": 7, "gpu_power_w": 100.0, "gpu_energy_j": 3600.0}
    without = {"gpu": None, "gpu_memory_peak_bytes": None, "gpu_power_w": None, "gpu_energy_j": None}
    summary = summarise(None, [], [], 0, [mine, mine, other, without])
    assert (summary.gpu_memory_peak_bytes, summary.gpu_power_w, summary.gpu_energy_j) == (7, 300.0, 10800.0)
    assert summary.to_line().endswith("GPU memory 7 B, GPU power 300 W, GPU energy 3 Wh")


def test_an_empty_run_has_an_empty_summary() -> None:
    summary = summarise(None, [], [], 0)
    assert summary == Summary(0, 0, None, None, None, None, None, None, None, None)
    assert summary.to_line() == "hvpipe: 0 ranks, 0 steps"


def test_a_single_step_is_not_skipped_as_the_first() -> None:
    assert summarise(None, [{}], [[2.0]], 8).step_s == 2.0
    assert summarise(None, [{}], [[2.0]], 8).images_per_s == 4.0


def test_a_summary_from_a_trace_file_alone() -> None:
    curve = Event("host busy", "utilization", 0, "utilization", 0.5, 0.5, {"share": 0.5})
    steps = (event("step", 0, 5), event("step", 5, 6), event("step", 6, 8))
    summary = summarise_trace(Trace((*OVERLAPPED, *steps, curve)))
    assert (summary.ranks, summary.steps, summary.step_s) == (1, 3, 1.5)
    assert (summary.system_share, summary.bytes_sent) == (0.5, None)


def test_a_summary_in_the_trace_is_used() -> None:
    written = summarise(None, [{"bytes_sent": 1.0}], [[1.0, 2.0]], 4)
    trace = Trace(OVERLAPPED, {"summary": written.to_json(), "counters": [{"bytes_sent": 7.0}]})
    assert summarise_trace(trace) == written


@pytest.mark.parametrize("summary", [5, [], {"speed": 1.0}], ids=str)
def test_a_summary_that_is_not_hvpipes(summary: object) -> None:
    with pytest.raises(HvpipeError, match=r"summary should hold \['bytes_sent', .*\]\. Received: "):
        summarise_trace(Trace(OVERLAPPED, {"summary": summary}))


def test_a_curve_without_numbers() -> None:
    curve = Event("host busy", "utilization", 0, "utilization", 0.5, 0.5, {"share": "half"})
    with pytest.raises(HvpipeError, match=r"the utilization should be numbers\. Received: "):
        summarise_trace(Trace((curve,)))


def test_a_written_summary_without_numbers() -> None:
    written = summarise(None, [], [[1.0, 2.0]], 4).to_json()
    with pytest.raises(HvpipeError, match=r"summary should hold numbers. Received"):
        summarise_trace(Trace(OVERLAPPED, {"summary": {**written, "step_s": "long"}}))


def test_the_texts() -> None:
    summary = Summary(2, 120, 0.0425, 1882.44, 0.934, 0.25, 0.87, 1.93, None, 2_345_000_000)
    assert summary.to_line() == (
        "hvpipe: 2 ranks, 120 steps, step 42.5 ms, images/s 1,882.4, communication hidden 93%, "
        "waited 250 ms, CPU 87%, cores 1.9, sent 2.345 GB"
    )
    assert summary.to_text().splitlines() == [
        "ranks                 2",
        "steps                 120",
        "step                  42.5 ms",
        "images/s              1,882.4",
        "communication hidden  93%",
        "waited                250 ms",
        "CPU                   87%",
        "cores                 1.9",
        "sent                  2.345 GB",
    ]
    assert Summary(1, 1, 1.5, None, None, None, None, None, 0.5, 999).to_line() == (
        "hvpipe: 1 rank, 1 step, step 1.5 s, GPU 50%, sent 999 B"
    )


def test_json_round_trip() -> None:
    summary = summarise(Trace(OVERLAPPED), [{"bytes_sent": 1.0}], [[1.0, 2.0]], 3)
    assert Summary.from_json(summary.to_json()) == summary


def test_a_negative_number_of_images() -> None:
    with pytest.raises(HvpipeError, match="Received: images=-1"):
        summarise(None, [], [], -1)
