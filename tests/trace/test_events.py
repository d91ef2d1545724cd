"""Traces: Chrome JSON, merging, conversion to another clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.trace.events import Clock, Event, Trace

STEP = Event("step 0", "step", 0, "compute", 10.0, 10.5)
REDUCE = Event("bucket 3", "reduce", 1, "engine", 10.25, 10.5, {"bytes": 4096})
BUSY = Event("host busy", "utilization", 1, "utilization", 10.3, 10.3, {"share": 0.75})
TRACE = Trace((STEP, REDUCE, BUSY), {"images": 64, "counters": [{"bytes_sent": 4096}]})


def same(left: Trace, right: Trace) -> bool:
    """Return whether two traces are equal, with times to the nanosecond."""
    return left.metadata == right.metadata and [
        (e.name, e.category, e.rank, e.lane, round(e.start_s, 9), round(e.end_s, 9), e.args)
        for e in left.events
    ] == [
        (e.name, e.category, e.rank, e.lane, round(e.start_s, 9), round(e.end_s, 9), e.args)
        for e in right.events
    ]


def test_chrome_json_by_hand() -> None:
    assert TRACE.to_chrome_json() == {
        "displayTimeUnit": "ms",
        "otherData": {"images": 64, "counters": [{"bytes_sent": 4096}]},
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
            {"ph": "M", "name": "process_sort_index", "pid": 0, "tid": 0, "args": {"sort_index": 0}},
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1"}},
            {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 1}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 0, "args": {"sort_index": 0}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "engine"}},
            {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "utilization"}},
            {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 2, "args": {"sort_index": 2}},
            {"ph": "X", "name": "step 0", "cat": "step", "pid": 0, "tid": 0, "ts": 1e7, "dur": 5e5},
            {
                "ph": "X",
                "name": "bucket 3",
                "cat": "reduce",
                "pid": 1,
                "tid": 1,
                "ts": 10_250_000.0,
                "dur": 250_000.0,
                "args": {"bytes": 4096},
            },
            {
                "ph": "C",
                "name": "host busy",
                "cat": "utilization",
                "pid": 1,
                "tid": 2,
                "ts": 10_300_000.0,
                "args": {"share": 0.75},
            },
        ],
    }


@pytest.mark.parametrize("trace", [TRACE, Trace()])
def test_json_round_trip(trace: Trace) -> None:
    assert same(Trace.from_chrome_json(json.loads(json.dumps(trace.to_chrome_json()))), trace)


def test_times_keep_their_nanoseconds_after_a_month_of_uptime() -> None:
    event = Event("e", "pack", 0, "engine", 2_600_000.123456789, 2_600_000.123456999)
    (back,) = Trace.from_chrome_json(Trace((event,)).to_chrome_json()).events
    assert back.start_s == pytest.approx(event.start_s, abs=2e-9)
    assert back.duration_s == pytest.approx(event.duration_s, abs=2e-9)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("trace", [TRACE, Trace()])
def test_file_round_trip(trace: Trace, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    trace.write(path)
    assert same(Trace.read(path), trace)
    assert [file.name for file in tmp_path.iterdir()] == [name]  # no half-written file stays


def test_the_file_holds_the_json_of_to_chrome_json(tmp_path: Path) -> None:
    TRACE.write(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == TRACE.to_chrome_json()
    TRACE.write(tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == TRACE.to_chrome_json()


def test_merge_orders_by_time_and_keeps_the_first_metadata() -> None:
    merged = Trace.merge([Trace((REDUCE,), {"a": 1, "b": 1}), Trace((STEP,), {"b": 2, "c": 2})])
    assert merged == Trace((STEP, REDUCE), {"a": 1, "b": 1, "c": 2})


def test_retime_moves_both_ends() -> None:
    (moved,) = Trace((REDUCE,)).retime(lambda time_s: time_s - 10.0).events
    assert (moved.start_s, moved.end_s, moved.args) == (0.25, 0.5, {"bytes": 4096})


def test_clocks_that_drift() -> None:
    # At 100 s rank 0's clock was 5 s ahead, at 200 s 6 s.
    clock = Clock((100.0, 5.0), (200.0, 6.0))
    assert [clock.of_rank_0(time_s) for time_s in (100.0, 150.0, 200.0)] == [105.0, 155.5, 206.0]
    assert Clock((100.0, 5.0), (100.0, 5.0)).of_rank_0(150.0) == 155.0


def test_of_and_ranks() -> None:
    assert TRACE.ranks() == [0, 1]
    assert TRACE.of("reduce") == [REDUCE]
    assert TRACE.of("reduce", rank=0) == []


@pytest.mark.parametrize(("start_s", "end_s"), [(1.0, 0.5), (float("nan"), 1.0), (0.0, float("inf"))])
def test_an_event_that_ends_before_it_starts(start_s: float, end_s: float) -> None:
    with pytest.raises(HvpipeError, match=f"'e' should end.*Received: start_s={start_s}, end_s={end_s}"):
        Event("e", "pack", 0, "engine", start_s, end_s)


def test_events_of_other_tools_are_skipped() -> None:
    rows = [{"ph": "B", "name": "begin", "pid": 0, "tid": 0, "ts": 1}, {"ph": "i", "name": "instant"}]
    assert Trace.from_chrome_json({"traceEvents": rows}) == Trace()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Chrome JSON file"),
        ("[]", "JSON object. Received: .*list"),
        ("{}", "traceEvents=NoneType"),
        ('{"traceEvents": [{"ph": "X", "name": "e"}]}', "name, pid, tid and ts. Received"),
        ('{"traceEvents": [7]}', "name, pid, tid and ts. Received: 7"),
        ('{"traceEvents": [], "otherData": 5}', "`otherData` should be an object. Received: 5"),
        (
            '{"traceEvents": [{"ph": "M", "name": "thread_name", "args": null}]}',
            "`args` with a name. Received",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "e", "pid": [], "tid": 0, "ts": 0}]}',
            "name, pid, tid and ts",
        ),
        ('{"traceEvents": [{"ph": "X", "name": "e", "pid": 1e999, "tid": 0, "ts": 0}]}', "name, pid, tid"),
        pytest.param("[" * 100_000, "Chrome JSON file", id="deep"),
    ],
)
def test_reading_a_file_that_is_not_a_trace(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(HvpipeError, match=says):
        Trace.read(tmp_path / "t.json")


@pytest.mark.parametrize("damage", [slice(0, -9), slice(0, 5)], ids=["end", "head"])
def test_reading_a_damaged_archive(damage: slice, tmp_path: Path) -> None:
    TRACE.write(tmp_path / "t.json.gz")
    (tmp_path / "t.json.gz").write_bytes((tmp_path / "t.json.gz").read_bytes()[damage])
    with pytest.raises(HvpipeError, match="Chrome JSON file"):
        Trace.read(tmp_path / "t.json.gz")


def test_reading_an_archive_with_a_damaged_middle(tmp_path: Path) -> None:
    whole = gzip.compress(b"{}")
    (tmp_path / "t.json.gz").write_bytes(whole[:10] + b"\xff" * 20)
    with pytest.raises(HvpipeError, match="Chrome JSON file"):
        Trace.read(tmp_path / "t.json.gz")


def test_reading_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(HvpipeError, match="Chrome JSON file"):
        Trace.read(tmp_path / "absent.json")


def test_writing_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(HvpipeError, match="can be written"):
        TRACE.write(tmp_path / "absent" / "t.json")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("old")
    with pytest.raises(TypeError):
        Trace((STEP,), {"bad": object()}).write(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
