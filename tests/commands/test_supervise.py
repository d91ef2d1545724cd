"""Exit codes and signals, with small programs in place of mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from hvpipe.commands.supervise import supervise, supervise_job
from hvpipe.errors import LaunchError

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


def supervised(program: str, tmp_path: Path, grace_s: float = 30.0, setup: str = "") -> subprocess.Popen[str]:
    """Start `supervise` in a new process. Return once its Python program has created the file `ready`."""
    script = f"{setup}\nimport os, sys\nfrom hvpipe.commands.supervise import supervise\n"
    script += f"sys.exit(supervise([sys.executable, '-c', {program!r}], os.environ, grace_s={grace_s}))"
    return started(script, tmp_path)


def started(script: str, tmp_path: Path) -> subprocess.Popen[str]:
    """Start a script in a new process. Return once it, or its child, has created the file `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True
    )
    deadline_s = time.monotonic() + LIMIT_S
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return process


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def has_ended(pid: int) -> bool:
    """Wait for a process that was killed: it may end a moment later, but well before it would by itself."""
    deadline_s = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.mark.parametrize("code", [0, 1, 77])
def test_the_exit_code_is_returned(code: int) -> None:
    assert supervise([sys.executable, "-c", f"raise SystemExit({code})"], os.environ) == code


def test_ended_by_a_signal() -> None:
    assert supervise([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], os.environ) == 137


def test_the_environment_is_passed_on() -> None:
    program = "import os, sys; sys.exit(int(os.environ['CODE']))"
    assert supervise([sys.executable, "-c", program], {**os.environ, "CODE": "5"}) == 5


def test_every_job_has_its_own_folder_for_mpirun() -> None:
    """Regression: mpirun did not start if a killed mpirun with the same PID had left its folder."""
    program = """
import os, sys
folder = os.environ["PRTE_MCA_prte_local_tmpdir_base"]
assert os.listdir(folder) == []
open(sys.argv[1], "a").write(folder + " ")
"""
    with tempfile.NamedTemporaryFile("r") as said:
        for _ in range(2):
            assert supervise([sys.executable, "-c", program, said.name], os.environ) == 0
        first, second = said.read().split()
    assert first != second
    assert not Path(first).exists()
    assert not Path(second).exists()


def test_a_folder_named_by_the_user_is_used() -> None:
    """mpirun refuses two folders."""
    program = "import os, sys; sys.exit('PRTE_MCA_prte_local_tmpdir_base' in os.environ)"
    named = {**os.environ, "PRTE_MCA_prte_tmpdir_base": "/scratch"}
    assert supervise([sys.executable, "-c", program], named) == 0
    assert supervise([sys.executable, "-c", program, "--prtemca", "prte_tmpdir_base"], os.environ) == 0


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    supervise([sys.executable, "-c", ""], os.environ)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_missing_launcher() -> None:
    with pytest.raises(LaunchError, match=r"does not start: .*/nowhere/mpirun"):
        supervise(["/nowhere/mpirun"], os.environ)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_the_launcher_once(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
import signal, time
seen = []
signal.signal({int(number)}, lambda *_: seen.append(1))
open("ready", "w").close()
while not seen: time.sleep(0.01)
time.sleep(0.2)
open("seen", "w").write(str(len(seen)))
"""
    process = supervised(program, tmp_path)
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 128 + number
    assert (tmp_path / "seen").read_text() == "1"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_signal_is_passed_on_without_ending_the_job(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
import signal, sys, time
signal.signal({int(number)}, lambda *_: sys.exit(7))
open("ready", "w").close()
time.sleep(60)
"""
    process = supervised(program, tmp_path)
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 7


STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgrp(); time.sleep(60)"])
open("pid", "w").write(str(child.pid))
open("ready", "w").close()
time.sleep(60)
"""


def test_processes_that_ignore_the_signal_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    process = supervised(STUBBORN, tmp_path, grace_s=0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    process = supervised(STUBBORN, tmp_path, grace_s=600.0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_sigterm_that_comes_twice_at_once_counts_as_one(tmp_path: Path) -> None:
    """Regression: Slurm sends it to all processes, a script passes it on, and no checkpoint was written."""
    process = supervised(
        LISTENING.format(stubborn=False).replace("time.sleep(0.01)", "time.sleep(1)"), tmp_path
    )
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 75


def test_a_later_sigterm_kills_at_once(tmp_path: Path) -> None:
    setup = "import hvpipe.commands.supervise as s; s._SAME_SIGTERM_S = 0.1"
    process = supervised(STUBBORN, tmp_path, grace_s=600.0, setup=setup)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143


LISTENING = """
import os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["HVPIPE_JOB_FOLDER"])
(folder / "listening-0").write_text(str(os.getpid()))
open("ready", "w").close()
while not (folder / "stop").exists(): time.sleep(0.01)
if {stubborn}: time.sleep(60)
sys.exit(75)
"""


def test_a_rank_that_listens_is_asked_for_a_checkpoint(tmp_path: Path) -> None:
    process = supervised(LISTENING.format(stubborn=False), tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 75


def test_ranks_are_asked_although_somebody_has_removed_the_folder(tmp_path: Path) -> None:
    """Regression: the exit code was 143, although the ranks had written a checkpoint."""
    program = LISTENING.format(stubborn=False).replace(
        'open("ready"', 'import shutil; shutil.rmtree(folder); open("ready"'
    )
    process = supervised(program, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 75


def test_sigterm_is_forwarded_if_ranks_cannot_be_asked(tmp_path: Path) -> None:
    """Regression: `hvpipe run` ended with 2, and the ranks were killed."""
    setup = "import hvpipe.commands.supervise as s\n"
    setup += "def fails(folder): raise OSError('full')\ns.ask_to_stop = fails"
    process = supervised(LISTENING.format(stubborn=True), tmp_path, setup=setup)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143


def test_sigterm_is_forwarded_after_the_grace_for_a_checkpoint(tmp_path: Path) -> None:
    setup = "import hvpipe.commands.supervise as s; s.Grace.__init__.__defaults__ = (5.0, 0.2)"
    process = supervised(LISTENING.format(stubborn=True), tmp_path, setup=setup)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143


@pytest.mark.parametrize(("listen", "code"), [(True, 75), (False, 143)])
def test_ranks_of_other_hosts_are_asked_if_none_is_here(listen: bool, code: int, tmp_path: Path) -> None:
    """Regression: mpirun killed ranks on other hosts a second after SIGTERM, without a checkpoint."""
    program = LISTENING.format(stubborn=False).replace("listening-0", "other")
    script = f"""
import os, sys
from pathlib import Path
from hvpipe.commands.supervise import supervise_job
folder = Path("job"); folder.mkdir(mode=0o700)
folder = folder.absolute()
def ask():
    if {listen}: (folder / "stop").touch()
    return {listen}
sys.exit(supervise_job([sys.executable, "-c", {program!r}], os.environ, folder, ask_elsewhere=ask).code)
"""
    process = started(script, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == code


def test_another_signal_waits_for_no_checkpoint(tmp_path: Path) -> None:
    process = supervised(LISTENING.format(stubborn=True), tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130


def test_processes_left_by_a_killed_launcher_are_killed(tmp_path: Path) -> None:
    process = supervised(STUBBORN, tmp_path, grace_s=600.0)
    child = int((tmp_path / "pid").read_text())
    launcher = psutil.Process(child).parent()
    assert launcher is not None
    launcher.kill()
    assert process.wait(LIMIT_S) == 137
    assert has_ended(child)


def test_a_signal_that_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    program = "import time; open('ready', 'w').close(); time.sleep(0.5)"
    process = supervised(
        program, tmp_path, setup="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    )
    process.send_signal(signal.SIGHUP)
    assert process.wait(LIMIT_S) == 0


def test_the_launcher_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Nothing else would end the job of a killed `hvpipe run`."""
    program = "import os, time; open('pid', 'w').write(str(os.getpid())); open('ready', 'w'); time.sleep(60)"
    process = supervised(program, tmp_path)
    launcher = int((tmp_path / "pid").read_text())
    assert is_running(launcher)
    process.kill()
    process.wait(LIMIT_S)
    assert has_ended(launcher)


def test_a_signal_after_the_end_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: while the folder was removed, SIGTERM was lost, and --restarts went on."""
    monkeypatch.setattr(
        "hvpipe.commands.supervise.shutil.rmtree",
        lambda *_, **options: os.kill(os.getpid(), signal.SIGTERM),
    )
    outcome = supervise_job([sys.executable, "-c", "raise SystemExit(3)"], os.environ, tmp_path)
    assert (outcome.code, outcome.asked) == (3, True)
