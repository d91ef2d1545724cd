"""One long job of 4 ranks under random faults: does its memory grow, and are its final weights right?"""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench import ROOT
from bench.launch.processes import started
from hvpipe.checkpoints.folder import complete
from hvpipe.checkpoints.manifest import read_manifest
from hvpipe.environment.job_folder import STOPPED

RANKS = 4
_HANG_S = 240.0  # without the end of an epoch
_WARM_S = 20.0  # after which the memory of a rank should not grow
_FLAT = 1.05  # the last quarter against the first
_STOPS, _KILLS, _ENDS = "SIGSTOP of a rank for 0.1 to 3 s", "SIGKILL of a rank", "SIGKILL of mpirun"
_OFTEN = {_STOPS: 60, _KILLS: 4, _ENDS: 1}
_JOINS = "hvpipe join -np 4, with two ranks left"


@dataclass
class _Soak:
    """A running job, and what has been seen of it."""

    folder: Path
    process: subprocess.Popen[bytes]
    chance: random.Random
    ranks: int = RANKS
    complete_s: float = field(default_factory=time.monotonic)  # when so many were last seen
    faults: Counter[str] = field(default_factory=Counter)
    rss: dict[str, list[int]] = field(default_factory=dict)  # of the launcher, and of ranks

    def training(self) -> list[psutil.Process]:
        """Return the ranks that train."""
        found = []
        for path in (self.folder / "ranks").iterdir():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(path.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def mpirun(self) -> psutil.Process | None:
        return next((p for p in _children(self.process.pid) if p.name() in ("mpirun", "prterun")), None)

    def look(self) -> None:
        """Note the memory of all processes that have run for a while."""
        ranks = self.training()
        if len(ranks) == self.ranks:
            self.complete_s = time.monotonic()
        seen = {"hvpipe run": [psutil.Process(self.process.pid)], "a rank": ranks}
        for name, processes in seen.items():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if time.time() - process.create_time() > _WARM_S:
                        self.rss.setdefault(name, []).append(process.memory_info().rss)

    def is_hung(self) -> bool:
        """Tell whether no rank has ended an epoch for long, or some did not come back."""
        signs = [self.folder, *(self.folder / "ranks").iterdir()]
        still_s = time.time() - max(path.stat().st_mtime for path in signs)
        return max(still_s, time.monotonic() - self.complete_s) > _HANG_S

    def break_something(self) -> None:
        """Do one thing to the job, if all its ranks train."""
        ranks, what = self.training(), self.chance.choices([*_OFTEN], [*_OFTEN.values()])[0]
        if len(ranks) != self.ranks:
            return
        victim = self.chance.choice(ranks)
        if what == _KILLS and self.ranks == 2:
            what = _JOINS
            words = [*_HVPIPE, "join", "-np", str(RANKS), "--job", str(self.process.pid)]
            if subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode != 0:
                return  # no rank is in a `fit` at this moment
            self.ranks = RANKS
        elif what == _KILLS:
            victim.kill()
            self.ranks -= 1
        elif what == _ENDS:
            launcher = self.mpirun()
            if launcher is None:
                return
            launcher.kill()
            self.ranks = RANKS
        else:
            victim.suspend()
            time.sleep(self.chance.uniform(0.1, 3.0))
            victim.resume()
        self.faults[what] += 1


_Started = contextlib.AbstractContextManager[subprocess.Popen[bytes]]
_TRAINS = str(Path(__file__).with_name("soak_job.py"))
_HVPIPE = [sys.executable, "-m", "hvpipe"]


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def run(minutes: float, seed: int) -> int:
    """Run the soak and print what was seen; return 1 if the job did not go on as promised."""
    with tempfile.TemporaryDirectory(prefix="hvpipe-soak-") as name:
        folder = Path(name)
        (folder / "ranks").mkdir()
        with (folder / "output").open("w+") as output:
            try:
                with _job(folder, output.fileno(), 10**9, "--elastic", "--restarts", "100000") as process:
                    soak = _Soak(folder, process, random.Random(seed))
                    problem = _break(soak, minutes)
                problem = problem or _finish(folder, output.fileno(), soak)
            finally:
                output.seek(0)
                said = output.read()
        text, grows = _report(soak)
        print(text)
        if problem:
            told = "\n".join(line for line in said.splitlines() if line.startswith("hvpipe"))
            print(f"{problem}\n{told}\n...\n{said[-6000:]}")
        return 1 if problem or grows else 0


def _job(folder: Path, output: int, epochs: int, *options: str) -> _Started:
    command = [*_HVPIPE, "run", "-np", str(RANKS), "--no-summary", "--stall-warn", "2"]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    line = [*command, "--grace", str(_HANG_S), *options, _TRAINS, str(folder), str(epochs)]
    return started(line, environ, stdout=output, stderr=output)


def _break(soak: _Soak, minutes: float) -> str:
    """Break the job for so many minutes, then ask it to stop. Return what is wrong, or ""."""
    while not soak.training() and not soak.is_hung():
        time.sleep(0.1)
    next_s = time.monotonic()
    end_s = next_s + 60 * minutes
    while time.monotonic() < end_s:
        if soak.process.poll() is not None:
            return f"the job ended with {soak.process.returncode}"
        if soak.is_hung():
            return f"no epoch ended for {_HANG_S:g} s, or {soak.ranks} ranks did not train for so long"
        soak.look()
        if time.monotonic() > next_s:
            soak.break_something()
            next_s = time.monotonic() + soak.chance.uniform(2.0, 10.0)
        time.sleep(1.0)
    while not soak.training() and not soak.is_hung():
        time.sleep(0.1)
    soak.process.send_signal(signal.SIGTERM)
    code = soak.process.wait(_HANG_S)
    return "" if code == STOPPED else f"after SIGTERM the job ended with {code}"


def _finish(folder: Path, output: int, soak: _Soak) -> str:
    """Train the rest of the epoch without a fault, and check the weights. Return what is wrong, or ""."""
    epochs = read_manifest(complete(folder / "checkpoints")[0]).position.epoch + 1
    with _job(folder, output, epochs) as process:
        if (code := process.wait(_HANG_S)) != 0:
            return f"without a fault the job ended with {code}"
    left = 0
    for rank in range(RANKS):
        counts = np.load(folder / f"weights-{rank}.npy")
        left = int(np.rint(epochs - counts[:, -RANKS + 1 :].min()))
        wrong = np.abs(counts[:, : -RANKS + 1] - epochs).max()
        changes = sum(soak.faults[what] for what in (_KILLS, _JOINS, _ENDS))
        if wrong > 0.1 or counts.max() > epochs + 0.1 or left > changes:
            return f"batches should count {epochs} times. Received on rank {rank}: {counts[0, :, 0]}"
    print(
        f"{epochs} epochs: every batch was trained on once in each. The last {RANKS - 1} of an epoch were "
        f"left out up to {left} times, because after a change there were too few for all ranks."
    )
    return ""


def _report(soak: _Soak) -> tuple[str, bool]:
    """Return what was seen in words, and whether memory grows."""
    lines = [f"{sum(soak.faults.values())} faults:"]
    lines += [f"  {count:4} x {what}" for what, count in soak.faults.most_common()]
    lines.append("RSS in MB, median of the first and of the last quarter:")
    grows = False
    for name, seen in soak.rss.items():
        quarter = -(-len(seen) // 4)
        first, last = (statistics.median(part) / 1e6 for part in (seen[:quarter], seen[-quarter:]))
        grows = grows or last > _FLAT * first
        lines.append(f"  {name:12} {first:8.1f} {last:8.1f}  {100 * (last / first - 1):+.1f} %")
    return "\n".join(lines), grows
