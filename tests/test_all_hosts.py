"""`hvpipe doctor --all-hosts` with ranks: two of them, which HVPIPE_RANKS_PER_HOST makes two hosts."""

from __future__ import annotations

import json
import subprocess
import sys

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
    assert ended.returncode == 2
    assert "hosts and their ranks" not in ended.stdout
    assert ended.stdout + ended.stderr
