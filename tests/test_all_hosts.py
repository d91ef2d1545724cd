"""`hvpipe doctor --all-hosts` with ranks: two of them, which HVPIPE_RANKS_PER_HOST makes two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distributed

DOCTOR = [sys.executable, "-m", "hvpipe", "doctor", "--all-hosts"]
TWO_HOSTS = {"HVPIPE_RANKS_PER_HOST": "1"}


def doctor(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = distributed.environment({**TWO_HOSTS, **environ})
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_it_starts_the_ranks_itself() -> None:
    ended = doctor(*DOCTOR, "--json", "-np", "2")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ok"]
    assert [(facts["host"][-2:], facts["ranks"]) for facts in found["hosts"]] == [("/0", 1), ("/1", 1)]
    assert found["hosts"][1]["clock_s"] == pytest.approx(0, abs=0.5)  # two ranks of one clock


def test_what_matters_is_exit_code_1_and_nothing_of_the_launcher() -> None:
    ended = doctor("bash", "-c", 'ulimit -n 250; exec "$@"', "bash", *DOCTOR, "-np", "2")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout.endswith("Matters: 1.\n")


def test_ranks_that_a_launcher_has_started_compare_themselves() -> None:
    mpirun, _, _, *flags = distributed.mpirun_command(2)
    few_files = ["bash", "-c", 'ulimit -n 200; exec "$@"', "bash", *DOCTOR]
    ended = doctor(mpirun, *flags, "-np", "1", *DOCTOR, ":", "-np", "1", *few_files)
    assert ended.returncode == 1, ended.stderr
    assert "!!  open files" in ended.stdout
    assert ended.stdout.endswith("Matters: 1.\n")


def test_hosts_that_cannot_be_reached_are_exit_code_2() -> None:
    ended = doctor(*DOCTOR, "--hosts", "no-such-host.invalid:1", "--rsh-agent", "/bin/false")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "A daemon failed to report back" in ended.stderr
    assert "The ranks have not compared the hosts. The launcher's exit code: 1\n" in ended.stderr


# An mpirun that says something of its own on stdout, and then does as it is told.
TALKS = 'mpirun=$1; shift; case "$*" in *doctor_ranks*) echo "a lost daemon";; esac; {}'


@pytest.mark.parametrize(
    ("then", "code", "told"),
    [
        ('exec "$mpirun" "$@"', 0, "a lost daemon\n"),
        ('case "$*" in *doctor_ranks*) exit 0;; esac; exec "$mpirun" "$@"', 2, "have not compared the hosts"),
        ('"$mpirun" "$@" || exit; case "$*" in *doctor_ranks*) exit 7;; esac', 2, "but then failed"),
    ],
)
def test_only_a_report_counts(then: str, code: int, told: str, tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f'#!/bin/bash\nset -- {distributed.mpirun_command(1)[0]} "$@"\n{TALKS.format(then)}\n')
    program.chmod(0o755)
    ended = doctor(*DOCTOR, "--json", "-np", "2", "--mpirun", str(program))
    assert ended.returncode == code, ended.stderr
    assert "a lost daemon\n" in ended.stderr
    assert told in ended.stderr
    assert json.loads(ended.stdout)["ok"] if "exit 0" not in then else ended.stdout == ""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 cores")
def test_cores_of_ranks_that_are_bound() -> None:
    mpirun, _, _, *flags = distributed.mpirun_command(2)
    first, second, *_ = (str(core) for core in sorted(os.sched_getaffinity(0)))
    one, other = (["taskset", "-c", core, *DOCTOR, "--json"] for core in (first, second))
    ended = doctor(mpirun, *flags, "-np", "1", *one, ":", "-np", "1", *other, HVPIPE_RANKS_PER_HOST="2")
    (host,) = json.loads(ended.stdout)["hosts"]
    assert (host["ranks"], host["cores"]) == (2, 2)
