"""The report of a stall, under a real `hvpipe run`, of ranks that do not come."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributed import Run, run

SCRIPT = """
import ctypes, os, signal, sys, time
import numpy as np
import hvpipe
hvpipe.init()
data = np.ones(10_000, np.float32)
hvpipe.allreduce(data)
def a_late_function():
    if sys.argv[1] == "gil":
        ctypes.PyDLL(None).sleep(4)  # in C, with the interpreter's lock
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
if hvpipe.rank() == int(sys.argv[2]):
    a_late_function()
hvpipe.allreduce(data)
print("DONE", flush=True)
"""

# Ranks come one after the other, so each reaches --stall-warn at another time.
ONE_BY_ONE = """
import sys, time
import numpy as np
import hvpipe
hvpipe.init()
data = np.ones(10_000, np.float32)
hvpipe.allreduce(data)
time.sleep((0.0, 0.8, 4.0)[hvpipe.rank()])
hvpipe.allreduce(data)
print("DONE", flush=True)
"""

# Rank 0 waits for a message of rank 1, and rank 1 for one of rank 2 if that is the late one.
MESSAGES = """
import sys, time
import numpy as np
import hvpipe
from hvpipe.session import current
hvpipe.init()
data = np.ones(10_000, np.float32)
hvpipe.allreduce(data)
engine, rank, late = current().engine, hvpipe.rank(), int(sys.argv[1])
def a_late_function():
    time.sleep(3.5)
if rank == late:
    a_late_function()
elif rank == 2:
    time.sleep(3.5)  # nobody waits for it
if rank < late:
    engine.receive(data.nbytes, rank + 1, 5, "a message").wait()
if 0 < rank <= late:
    engine.send(data, rank - 1, 5, "a message").wait()
hvpipe.allreduce(data)
print("DONE", flush=True)
"""

# Ranks call by name; those of a process set do not wait for the others.
BY_NAME = """
import time
import tensorflow as tf
import hvpipe.horovod.tensorflow as hvd
pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[pair])
def a_late_function():
    time.sleep(3)  # several times --stall-warn
for late in (1, 0):
    if hvd.rank() == late:
        a_late_function()
    hvd.allreduce(tf.ones(3), name="the.gradient")
if hvd.rank() == 1:
    a_late_function()
if pair.included():
    hvd.allgather(tf.ones(3), name="of.a.pair", process_set=pair)
else:
    time.sleep(3)  # busy elsewhere while the pair waits: no report may name it
print("DONE", flush=True)
"""


def stalled(tmp_path: Path, what: str, rank: int, *options: str, text: str = SCRIPT) -> Run:
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "hvpipe", "run", "-np", "3", "--no-summary", *options, str(script)]
    return run([*command, what, str(rank)], limit_s=90.0)


def test_a_rank_that_holds_the_interpreter_is_named_with_its_stack(tmp_path: Path) -> None:
    """Rank 0, which usually collects, is the late one."""
    options = ("--stall-warn", "1", "--flight-recorder", str(tmp_path / "flight"))
    result = stalled(tmp_path, "gil", 0, *options)
    assert result.returncode == 0, result.describe()
    assert result.output.count("hvpipe: stall: 2 of 3 ranks wait for the others.") == 1, result.describe()
    assert "MISSING: rank 0 on " in result.output, result.describe()
    assert "in a_late_function" in result.output, result.describe()
    assert result.output.count("DONE") == 3
    assert not list((tmp_path / "flight").iterdir())  # all ranks ended properly


def test_the_end_of_a_stall_brings_the_report(tmp_path: Path) -> None:
    """Rank 0, which usually collects, is the one that is stopped."""
    result = stalled(tmp_path, "stop", 0, "--stall-abort", "6")
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert "is stopped (by SIGSTOP or a debugger)" in result.output, result.describe()
    assert "DeadlineError: Waited 6 s in allreduce" in result.output, result.describe()
    assert "hvpipe run: Rank 0 on " in result.output, result.describe()


def test_collectives_by_name(tmp_path: Path) -> None:
    """Each report says the name, who has not called it, and what that rank does."""
    result = stalled(tmp_path, "-", 1, "--stall-warn", "1", text=BY_NAME)
    assert result.returncode == 0, result.describe()
    reports = result.output.split("hvpipe: stall: ")[1:]
    expected = (
        (1, "allreduce (average) of float32[3] named allreduce.the.gradient for rank 1 to call it."),
        (0, "allreduce (average) of float32[3] named allreduce.the.gradient for the others to call it."),
        (1, "allgather of float32[3] named allgather.of.a.pair for rank 1 to call it."),
    )
    assert len(reports) == len(expected), result.describe()
    for report, (late, waits) in zip(reports, expected, strict=True):
        assert waits in report, result.describe()
        assert report.count("MISSING: ") == 1, result.describe()
        assert f"MISSING: rank {late} on " in report, result.describe()
        assert "in a_late_function" in report, result.describe()
    assert result.output.count("DONE") == 3


def test_one_standstill_has_one_report(tmp_path: Path) -> None:
    """Regression: rank 1, which the first report had named, caused a second one."""
    result = stalled(tmp_path, "-", 2, "--stall-warn", "1", text=ONE_BY_ONE)
    assert result.returncode == 0, result.describe()
    assert result.output.count("hvpipe: stall: 2 of 3 ranks wait for the others.") == 1, result.describe()
    assert result.output.count("hvpipe: stall: ") == 1, result.describe()


@pytest.mark.parametrize("late", [1, 2])
def test_who_is_late_with_a_message(late: int, tmp_path: Path) -> None:
    """Regression: every rank that computed was "MISSING"."""
    result = stalled(tmp_path, str(late), late, "--stall-warn", "1", text=MESSAGES)
    assert result.returncode == 0, result.describe()
    assert result.output.count("MISSING: ") == 1, result.describe()
    assert f"MISSING: rank {late} on " in result.output, result.describe()
    assert "in a_late_function" in result.output, result.describe()
