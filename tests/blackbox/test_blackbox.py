"""What `hvpipe blackbox` says about recorders, also about damaged ones."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import subprocess
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from hvpipe import cli
from hvpipe.blackbox.files import Flight, FlightEvent, read_flight
from hvpipe.blackbox.story import Records, first_to_end, read_records, to_text, verdict
from hvpipe.errors import HvpipeError

BUCKET = "bucket 3 of model"


def flight(rank: int, ended_s: float | None, why: str = "", **changes: object) -> Flight:
    """A rank of 3 that began at 0 s and waits for a bucket since 5 s, unless `events` says otherwise."""
    events = (FlightEvent(4.0, "ready", "step 7", 10), FlightEvent(4.5, "done", "step 7", 10))
    waits = (*events, FlightEvent(5.0, "ready", BUCKET, 11))
    usual = Flight(rank, 3, 100 + rank, "h0", 0.0, ended_s or 5.1, ended_s, None, why, 0, 8, 99, waits)
    return replace(usual, **changes)  # type: ignore[arg-type]


COMPUTES = {"events": (FlightEvent(4.5, "done", "step 7", 10),)}
TOLD = {"signal": 15}


@pytest.mark.parametrize(
    ("flights", "first", "says"),
    [
        pytest.param(
            [flight(0, 5.3, **TOLD), flight(1, None, heard_s=5.0), flight(2, 5.3, **TOLD)],
            1,
            "Rank 1 on h0 (pid 101) ended first, having begun 8 steps, without a word",
            id="killed",
        ),
        pytest.param(
            [
                flight(0, 9.0, "DeadlineError: Waited 4 s"),
                flight(1, None, heard_s=5.0),
                flight(2, 9.0, **TOLD),
            ],
            1,
            "Ranks 0, 2 waited, up to 4.0 s, in bucket 3 of model.",
            id="killed, and nobody noticed but by the deadline",
        ),
        pytest.param(
            [
                flight(0, 6.0, **TOLD),
                flight(1, 5.9, "ValueError: a bug\nin line 2"),
                flight(2, None, heard_s=6.1),
            ],
            1,
            "by ValueError: a bug. Ranks 0, 2 waited",
            id="an error; the launcher killed the others",
        ),
        pytest.param(
            [
                flight(0, 6.0, "PeerError: lost", **TOLD),
                flight(1, 5.5, "OSError: full", **TOLD),
                flight(2, 6.0, "PeerError: lost", **TOLD),
            ],
            1,
            "by OSError: full",
            id="all ranks have handled SIGTERM, then one fails",
        ),
        pytest.param(
            [flight(0, 6.0, **TOLD), flight(1, 5.5, signal=11), flight(2, 6.0, **TOLD)],
            1,
            "by a crash: SIGSEGV",
            id="a crash",
        ),
        pytest.param(
            [flight(0, 6.0, **TOLD), flight(1, 5.5, **TOLD, **COMPUTES), flight(2, 6.0, **TOLD)],
            1,
            "by SIGTERM, which came to this rank first. Ranks 0, 2 waited",
            id="somebody sends SIGTERM to one rank",
        ),
        pytest.param(
            [
                flight(0, 9.1, "DeadlineError: x"),
                flight(1, 9.2, **TOLD, frozen=(5.0, 9.2)),
                flight(2, 9.1, **TOLD),
            ],
            None,
            "Rank 1 on h0 (pid 101) did not run from",
            id="stopped, and woken up by the launcher",
        ),
        pytest.param(
            [
                flight(0, 9.1, "DeadlineError: x"),
                flight(1, None, heard_s=9.2, frozen=(5.0, 9.2)),
                flight(2, None, heard_s=8.9),
            ],
            None,
            "Rank 1 on h0 (pid 101) did not run from",
            id="stopped, woken up, and killed with another one",
        ),
        pytest.param(
            [flight(0, 9.1, "DeadlineError: x"), flight(1, 9.2, **TOLD, **COMPUTES), flight(2, 9.1, **TOLD)],
            None,
            "Rank 1 lived, but did not come to what the others waited for",
            id="slow",
        ),
        pytest.param(
            [flight(0, 9.1, "DeadlineError: x"), flight(1, 9.1, "DeadlineError: y"), flight(2, 9.1, **TOLD)],
            None,
            "All ranks waited, and none ended before the others",
            id="a link",
        ),
        pytest.param(
            [flight(0, None, heard_s=5.1), flight(1, None, heard_s=5.1), flight(2, None, heard_s=5.2)],
            None,
            "its message names the first. Pids: rank 0 on h0 is 100, rank 1 on h0 is 101,",
            id="killed, and the launcher killed the others at once",
        ),
    ],
)
def test_who_ended_first(flights: list[Flight], first: int | None, says: str) -> None:
    found = first_to_end(flights)
    assert (None if found is None else found.rank) == first
    assert says in verdict(flights)


def recorded(rank: int = 0, size: int = 2) -> bytes:
    """The bytes of a recorder with three events, as csrc/base/flight_recorder.h lays them out."""
    head = struct.pack(
        "<8s3I3i6dQQQiI64s2048s",
        *(b"HVPFLGHT", 1, 1000, 128, rank, size, 4242),
        *(1.7e9, 10.0, 12.0, 12.5, 0.0, 0.0, 3, 8, 99, 0, 1, b"h0", b"ValueError: a bug"),
    )
    events = [
        struct.pack("<QdQI100s", number, 10.0 + number, 7, kind, b"bucket 3")
        for number, kind in ((1, 1), (2, 2), (3, 3))
    ]
    return head.ljust(4096, b"\0") + b"".join(events).ljust(1000 * 128, b"\0")


@pytest.mark.parametrize(
    ("code", "says"),
    [(3, "it exited with code 3"), (137, "it was killed (SIGKILL"), (None, "it was killed (SIGKILL")],
)
def test_a_rank_that_leaves_by_an_exit_of_its_own(code: int | None, says: str) -> None:
    """Regression: `os._exit(3)` was reported as SIGKILL, although the launcher knew the code."""
    flights = [flight(0, 5.3, **TOLD), flight(1, None, heard_s=5.0)]
    assert says in verdict(flights, code)


def test_who_got_sigterm_first_is_said_alike(tmp_path: Path) -> None:
    flights = (flight(0, 6.0, **TOLD), flight(1, 5.5, **TOLD, **COMPUTES))
    assert to_text(Records(tmp_path, flights, ())).count("which came to this rank first") == 2
    on_two_clocks = [flights[0], replace(flights[1], host="h1")]
    assert first_to_end(on_two_clocks) is None


def test_a_recorder_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.flight"
    path.write_bytes(recorded())
    found = read_flight(path)
    assert (found.rank, found.size, found.pid, found.host, found.steps) == (0, 2, 4242, "h0", 8)
    assert (found.why, found.ended_s) == ("ValueError: a bug", 1.7e9 + 12.5)
    assert [(event.kind, event.what) for event in found.events] == [
        (kind, "bucket 3") for kind in ("ready", "begun", "done")
    ]


@examples(30)
@given(data=st.data())
def test_damaged_recorders(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the bytes: an error in words, or a story."""
    raw = bytearray(recorded())
    for _ in range(data.draw(st.integers(0, 8))):
        raw[data.draw(st.integers(0, 4096 + 400))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, 5000)))
    folder = tmp_path_factory.mktemp("flight")
    (folder / "rank-0.flight").write_bytes(bytes(raw[:cut]))
    (folder / "rank-1.flight").write_bytes(recorded(1))
    for options in ([], ["--json"]):
        out = io.StringIO()
        with redirect_stdout(out):
            assert cli.main(["blackbox", str(folder), *options]) == 0
        assert "ValueError: a bug" in out.getvalue()
    assert json.loads(out.getvalue())["ranks"]


def test_missing_ranks_and_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest start is read; a rank without a record and a strange file are named."""
    for start, rank in (("20260101-000000-aaaa", 0), ("20260102-000000-bbbb", 1)):
        (tmp_path / start).mkdir()
        (tmp_path / start / f"rank-{rank}.flight").write_bytes(recorded(rank, 3))
    (tmp_path / "20260102-000000-bbbb" / "rank-2.flight").write_bytes(b"something else")
    assert cli.main(["blackbox", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "1 of 3 ranks left a record" in told
    assert "There is no record of ranks 0, 2" in told
    assert "rank-2.flight should be a flight recorder's file. Received: 14 other bytes" in told


def _recorded_here(began_s: float, pid: int | None = None, rank: int = 0) -> bytes:
    """The bytes of a recorder of this host, by default of this process, that has not ended."""
    head = struct.pack(
        "<8s3I3i6dQQQiI64s2048s",
        *(b"HVPFLGHT", 1, 1000, 128, rank, 2, os.getpid() if pid is None else pid),
        *(began_s, 0.0, 0.2, 0.0, 0.0, 0.0, 3, 8, 99, 0, 1, socket.gethostname().encode(), b""),
    )
    return head.ljust(4096 + 1000 * 128, b"\0")


def test_a_running_job_has_not_been_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: "All ranks were killed within a second", as no rank had said that it ended."""
    for start in ("20260101-000000-aaaa", "20260102-000000-bbbb", "20260103-000000-cccc"):
        (tmp_path / start).mkdir()
        for rank in range(2):
            (tmp_path / start / f"rank-{rank}.flight").write_bytes(_recorded_here(time.time(), rank=rank))
    (tmp_path / "20260101-000000-aaaa" / "rank-0.flight").write_bytes(recorded())
    (tmp_path / "20260101-000000-aaaa" / "rank-1.flight").write_bytes(recorded(1))
    assert cli.main(["blackbox", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "What happened: nothing yet: ranks 0, 1 still run." in told
    assert f"The newest start that has ended: hvpipe blackbox {tmp_path}/20260101-000000-aaaa\n" in told
    assert "8 steps begun; still runs, its last sign of life at" in told
    assert cli.main(["blackbox", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "nothing yet: ranks 0, 1 still run."
    assert found["ended_start"] == f"{tmp_path}/20260101-000000-aaaa"
    assert [rank["running"] for rank in found["ranks"]] == [True, True]


def test_one_rank_of_a_running_job_has_ended(tmp_path: Path) -> None:
    (tmp_path / "rank-0.flight").write_bytes(_recorded_here(time.time()))
    (tmp_path / "rank-1.flight").write_bytes(recorded(1))
    told = to_text(read_records(tmp_path))
    assert "Rank 1 on h0 (pid 4242) ended first, having begun 8 steps" in told
    assert "by ValueError: a bug. Rank 0 still runs." in told


def test_the_process_of_a_rank_is_gone(tmp_path: Path) -> None:
    """Also if another process has its number now."""
    for recorder in (_recorded_here(1.7e9), _recorded_here(time.time(), 2**30)):
        (tmp_path / "rank-0.flight").write_bytes(recorder)
        assert read_records(tmp_path).running == frozenset()


def test_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    """Regression: OSError."""
    with pytest.raises(HvpipeError, match="There is no folder"):
        read_records(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("name", "says"), [("", "has no files of flight recorders"), ("nothing", "There is no folder")]
)
def test_no_recorders(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(HvpipeError, match=says):
        read_records(tmp_path / name)


def test_one_rank_of_a_running_job_was_killed(tmp_path: Path) -> None:
    """Regression: "All ranks were killed", as the one that was killed is all that has ended."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "rank-0.flight").write_bytes(_recorded_here(time.time()))
    (tmp_path / "rank-1.flight").write_bytes(_recorded_here(time.time(), gone.pid, 1))
    told = to_text(read_records(tmp_path))
    assert f"(pid {gone.pid}) ended first, having begun 8 steps, without a word" in told
    assert "Rank 0 still runs." in told
