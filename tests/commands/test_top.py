"""`hvpipe top`: its output on a terminal, without one and as JSON, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from distributed import environment
from hvpipe import cli
from hvpipe.commands import top
from hvpipe.errors import HvpipeError
from hvpipe.monitor.status_files import RankStatus, RunningJob, StatusFolder

IDLE = RankStatus("a-1", "train.py", 0, 3, "a", at_s=1000.0, began_s=900.0)
BUSY = replace(
    IDLE,
    rank=1,
    host="b",
    steps=120,
    step_s=0.0425,
    images_per_s=188.24,
    process_cores=0.97,
    system_share=0.5,
    resident_bytes=1_234_000_000,
    gpu_share=0.85,
    gpu_memory_bytes=70_500_000_000,
    gpu_power_w=412.3,
    sent_bytes_per_s=93_400_000.0,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVPIPE_LIVE", str(tmp_path))
    return tmp_path


def write(root: Path, *ranks: RankStatus) -> None:
    for one in ranks:
        StatusFolder(str(root), one.job, one.rank).write(one)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVPIPE_LIVE", raising=False)
    monkeypatch.setattr(top, "status_root", lambda folder: tmp_path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(HvpipeError, match=rf"{tmp_path} belongs to .*user {user}\b.*not to .*{user + 1}"):
        top.run(argparse.Namespace(interval=1.0, job=None, json=True), {})


def test_the_table() -> None:
    lines = top.to_text(RunningJob("a-1", (IDLE, BUSY)), now_s=1001.0, colours=False)
    assert lines == [
        "train.py: 2 of 3 ranks heard, 0:01:41, 188.2 images/s, job a-1",
        "rank  host  step  step time  images/s  cores  host CPU   memory  GPU   GPU mem  power       sent",
        "   0     a     0          -         -      -         -        -    -         -      -          -",
        "   1     b   120    42.5 ms     188.2   0.97       50%  1.23 GB  85%  70.50 GB  412 W  93.4 MB/s",
    ]


def test_columns_without_values_are_left_out() -> None:
    lines = top.to_text(RunningJob("a-1", (IDLE, replace(IDLE, rank=1))), now_s=1001.0, colours=False)
    assert lines[1:] == ["rank  host  step", "   0     a     0", "   1     a     0"]


def test_a_silent_rank_is_marked() -> None:
    job = RunningJob("a-1", (replace(IDLE, at_s=988.0), replace(IDLE, rank=1)))
    plain = top.to_text(job, now_s=1000.0, colours=False)
    assert plain[2:] == ["   0     a     0  silent for 12 s", "   1     a     0"]
    coloured = top.to_text(job, now_s=1000.0, colours=True)
    assert coloured[2] == "\033[31m   0     a     0  silent for 12 s\033[0m"


def test_json_is_a_single_snapshot(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, IDLE, BUSY)
    assert cli.main(["top", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["job"] == "a-1"
    assert [rank["step_s"] for rank in document["ranks"]] == [None, 0.0425]
    assert all(rank["heard_s_ago"] < 60 for rank in document["ranks"])


def test_a_job_selected_by_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, IDLE, replace(IDLE, job="b-2", began_s=950.0))
    names = []
    for arguments in ([], ["a-"], ["b-2"]):
        assert cli.main(["top", "--json", *arguments]) == 0
        names.append(json.loads(capsys.readouterr().out)["job"])
    assert names == ["b-2", "a-1", "b-2"]
    assert cli.main(["top", "c"]) == 1
    assert f"job c should be running on this host. Jobs in {root}: b-2, a-1" in capsys.readouterr().err


def test_no_job_is_exit_code_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("hvpipe top: a job (of `hvpipe run`, or with HVPIPE_LIVE=1) should be running")
    assert f"Jobs in {root}: none" in message


@pytest.mark.parametrize("interval", ["0", "nan", "1e+10"])
def test_a_bad_interval(interval: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--interval", interval]) == 1
    assert f"Received: --interval {interval}" in capsys.readouterr().err


@pytest.fixture
def living(root: Path) -> Path:
    """Make a job whose file has a future time, so that only its removal ends the job."""
    write(root, IDLE)
    for file in root.rglob("*.json"):
        os.utime(file, (time.time() + 3600,) * 2)
    return root


COMMAND = [sys.executable, "-m", "hvpipe", "top", "--interval", "0.05"]


def test_without_a_terminal_lines_are_printed_until_the_job_ends(living: Path) -> None:
    process = subprocess.Popen(
        COMMAND, env=environment({"HVPIPE_LIVE": str(living)}), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("train.py: 1 of 3 ranks heard")
    for file in living.rglob("*.json"):
        file.unlink()
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert "Job a-1 has ended" in rest
    assert "\033" not in rest
    process.stdout.close()


def test_ctrl_c_ends_cleanly_on_a_terminal(living: Path) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        COMMAND,
        env=environment({"HVPIPE_LIVE": str(living), "TERM": "xterm"}),
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    deadline_s = time.monotonic() + 60
    while shown.count(b"\033[H") < 2 and time.monotonic() < deadline_s:
        if select.select([master], [], [], 1.0)[0]:
            shown += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    os.close(master)
    assert b"Ctrl-C to quit" in shown
    assert b"Traceback" not in shown


def test_a_reader_may_close_the_pipe(living: Path) -> None:
    process = subprocess.Popen(
        COMMAND,
        env=environment({"HVPIPE_LIVE": str(living)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()
