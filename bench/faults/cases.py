"""The faults: what breaks, what must follow, and one trial of each."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import ROOT
from bench.cluster import network
from bench.cluster.virtual_cluster import VirtualCluster, equal_hosts
from bench.faults.jobs import Ended, Trial, run_to_end
from bench.launch.processes import end_left_behind

PHASES = ("pack", "reduce", "update", "flush", "checkpoint")
_BEFORE_THE_END = ("pack", "reduce", "update", "checkpoint")  # at the end all ranks may exit
_RANKS = 4
DEADLINE_S = 4.0
LIMIT_S = 90.0  # longer is a hang
PROMISED_S = 10.0  # after the deadline, or after the fault if that needs no deadline
_MEMORY = Path("/sys/fs/cgroup/memory")
_STATE = re.compile(r"^STATE (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A fault: the title of its row, what must follow in words, and one trial (phase, random numbers)."""

    title: str
    promise: str
    run: Callable[[str, random.Random], Trial]
    phases: Sequence[str] = PHASES  # where it may strike; of `lost`, the overlap modes
    missing: str = ""  # why it cannot be tried here
    often: int = 1  # it gets so many times the trials of other faults


def cases() -> dict[str, Fault]:
    ends = "the job ends; the message names the rank and the cause"
    goes_on = "the job goes on, with the weights of a job without a fault"
    root = "" if os.geteuid() == 0 else "needs root"
    group = root or ("" if (_MEMORY / "memory.limit_in_bytes").exists() else "needs the memory cgroup (v1)")
    no_cc = "" if shutil.which("cc") else "needs a C compiler"
    later = PHASES[:3]  # nobody waits for a rank that is late in the last phases
    return {
        "kill": Fault("SIGKILL of a rank", ends, partial(_ends, "kill", "killed", 0.0)),
        "stop": Fault("SIGSTOP of a rank", ends, partial(_ends, "stop", "stopped", DEADLINE_S)),
        "raise": Fault("an exception on a rank", ends, partial(_ends, "raise", "ValueError: injected", 0.0)),
        "exit": Fault(
            "sys.exit(3) on a rank",
            f"{ends}; its code is 3",
            partial(_ends, "exit", "sys.exit(3) in worker.py", 0.0, code=3),
            _BEFORE_THE_END,
        ),
        "crash": Fault("SIGSEGV of a rank", ends, partial(_ends, "crash", "SIGSEGV", 0.0)),
        "memory": Fault("out of memory (cgroup)", ends, _out_of_memory, missing=group),
        "slow": Fault("a rank that is late by 2 s", goes_on, partial(_goes_on, "slow"), later),
        "clock": Fault("the clock jumps by an hour, forward or back", goes_on, _clock_jump, missing=no_cc),
        "disk": Fault("full disk (tmpfs) under the checkpoints", goes_on, _full_disk, ("checkpoint",), root),
        "part": Fault(
            "the checkpoint's disk full on one rank",
            f"{goes_on}; the next checkpoint is complete",
            _full_for_one_rank,
            ("checkpoint",),
        ),
        "blip": Fault("a link down for 2 s", goes_on, partial(_link, 2.0), later, root),
        "silent": Fault("40 silent connections of strangers at the start", goes_on, _silent, ("start",)),
        "link": Fault("a link down for good", ends, partial(_link, None), PHASES[:4], root),
        "stranger": Fault(
            "another user makes the job folder first, full of links",
            f"{goes_on}; it names folder and owner, and writes nothing there",
            _stranger,
            missing=root,
        ),
        "job": Fault(
            "kill -9 of the whole job while it writes checkpoints",
            "started again, it ends with the same weights, bit for bit",
            _whole_job,
            ("checkpoint",),
            often=5,
        ),
        "lost": Fault(
            "SIGKILL of a rank under --elastic",
            "the others go on, and no step is lost or applied twice",
            _lost,
            ("none", "backward", "step"),
            often=5,
        ),
    }


def _hvpipe_run(ranks: int, folder: Path, *options: object) -> list[str]:
    limits = ["--timeout", "60", "--stall-abort", f"{DEADLINE_S:g}", "--no-summary"]
    return [
        *(sys.executable, "-m", "hvpipe", "run", "-np", str(ranks), *limits),
        *("--flight-recorder", str(folder / "flight"), "-m", "bench.faults.worker", str(folder)),
        *map(str, options),
    ]


def _run(
    command: Sequence[str],
    during: Callable[[subprocess.Popen[Any]], None] = lambda process: None,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    deadlines = dict.fromkeys(("HVPIPE_TIMEOUT", "HVPIPE_SHUTDOWN_TIMEOUT"), f"{DEADLINE_S:g}")
    environ = {**extra, "PYTHONPATH": str(ROOT), **deadlines}
    return run_to_end(command, environ, LIMIT_S, during)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hvpipe-fault-") as name:
        yield Path(name)


def _broken_s(folder: Path) -> float:
    path = folder / "broken"
    return float(path.read_text() or 0) if path.exists() else 0.0


def _state(output: str) -> str | None:
    found = set(_STATE.findall(output))
    return found.pop() if len(found) == 1 else None


@cache
def _reference(ranks: int, *options: object) -> str | None:
    """Return the weights of a job without a fault."""
    with _folder() as folder:
        return _state(_run(_hvpipe_run(ranks, folder, *options)).output)


def _problem(*problems: tuple[bool, str]) -> str:
    """Return the first problem that is there, or ""."""
    return next((text for there, text in problems if there), "")


def _judge_end(
    ended: Ended, folder: Path, deadline_s: float, says: Sequence[str], code: int | None = None
) -> Trial:
    """The job must end in time, not with 0 but with this code if one is given, and say these words."""
    after_s = ended.at_s - _broken_s(folder) - deadline_s
    problem = _problem(
        (ended.code is None, "it hung"),
        (not _broken_s(folder), "nothing was broken"),
        (ended.code == 0, "it ended with 0"),
        *((words not in ended.output, f"it does not say {words!r}") for words in says),
        (after_s > PROMISED_S, f"it took {after_s:.1f} s"),
        (code is not None and ended.code != code, f"its code is {ended.code}"),
    )
    return Trial(problem, max(0.0, after_s) if _broken_s(folder) else 0.0, ended.output)


def _judge_going_on(
    ended: Ended, folder: Path, ranks: int, says: str = "", options: Sequence[object] = ()
) -> Trial:
    """The job must end as one with these options and without a fault."""
    state = _state(ended.output)
    problem = _problem(
        (ended.code is None, "it hung"),
        (ended.code != 0, f"it ended with {ended.code}"),
        (not _broken_s(folder), "nothing was broken"),
        (state is None or state != _reference(ranks, *options), "other weights"),
        (says not in ended.output, f"it does not say {says!r}"),
    )
    return Trial(problem, output=ended.output)


def _break(
    fault: str,
    judge: Callable[[Ended, Path, int], Trial],
    phase: str,
    chance: random.Random,
    *options: object,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> Trial:
    """Break a random one of four ranks at a random step. `judge` gets its number and the job's folder."""
    victim = chance.randrange(_RANKS)
    place = ("--phase", phase, "--victim", victim, "--at", chance.randrange(1, 10))
    with _folder() as folder:
        ended = _run(_hvpipe_run(_RANKS, folder, "--fault", fault, *place, *options), extra=extra)
        return judge(ended, folder, victim)


def _ends(
    fault: str,
    says: str,
    deadline_s: float,
    phase: str,
    chance: random.Random,
    *options: object,
    code: int | None = None,
) -> Trial:
    def judge(ended: Ended, folder: Path, victim: int) -> Trial:
        return _judge_end(ended, folder, deadline_s, (f"Rank {victim} ", says), code)

    return _break(fault, judge, phase, chance, *options)


def _goes_on(fault: str, phase: str, chance: random.Random, *options: object, **more: Any) -> Trial:
    def judge(ended: Ended, folder: Path, victim: int) -> Trial:
        return _judge_going_on(ended, folder, _RANKS)

    return _break(fault, judge, phase, chance, *options, **more)


def _full_for_one_rank(phase: str, chance: random.Random) -> Trial:
    """One rank may write nothing for two checkpoints (RLIMIT_FSIZE). Rank 0 must not wait for its part."""
    with _folder() as folder:
        place = ("--phase", phase, "--victim", chance.randrange(2), "--at", chance.randrange(1, 7))
        ended = _run(_hvpipe_run(2, folder, "--fault", "part", *place))
        trial = _judge_going_on(ended, folder, 2, "File too large")
        last = list((folder / "checkpoints").glob("0000000012-*/manifest.json"))
        more = _problem(
            ("HVPIPE_TIMEOUT" in ended.output, "rank 0 waited for the part"),
            (not last, "the last checkpoint is not complete"),
        )
        return replace(trial, problem=trial.problem or more)


def _out_of_memory(phase: str, chance: random.Random) -> Trial:
    group = _MEMORY / f"hvpipe-fault-{os.getpid()}"
    group.mkdir()
    try:
        return _ends("memory", "memory was used up", 0.0, phase, chance, "--group", group)
    finally:
        for _ in range(50):  # the kernel may still be removing its ended processes
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _clock_jump(phase: str, chance: random.Random) -> Trial:
    """All processes of the job see another time from then on, but not the machine."""
    with _folder() as folder:
        clock, library = folder / "clock", folder / "clock.so"
        clock.write_bytes(bytes(8))
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
        jump = ("--clock", clock, "--jump", chance.choice((3600, -3600)))
        extra = {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(clock)}
        return _goes_on("clock", phase, chance, *jump, extra=extra)


def _full_disk(phase: str, chance: random.Random) -> Trial:
    with _folder() as folder, _small_disk(folder / "disk") as disk:
        options = ("--checkpoints", disk, "--fault", "mark", "--phase", "checkpoint", "--at", 2)
        ended = _run(_hvpipe_run(2, folder, *options))
        return _judge_going_on(ended, folder, 2, "No space left on device")


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _link(down_s: float | None, phase: str, chance: random.Random) -> Trial:
    """Two virtual hosts; the port of the second one on the switch goes down."""
    with VirtualCluster(equal_hosts(2, "1gbit")) as cluster, _folder() as folder:
        switch = network.namespace(cluster.name, "switch")

        def set_link(state: str) -> None:
            subprocess.run(["ip", "-n", switch, "link", "set", "p1", state], check=True)

        def during(process: subprocess.Popen[Any]) -> None:
            while not _broken_s(folder) and process.poll() is None:
                time.sleep(0.005)
            set_link("down")
            if down_s is not None:
                time.sleep(down_s)
                set_link("up")

        at = chance.randrange(1, 10)
        steps = ("--steps", 40)
        options = ("--fault", "mark", "--phase", phase, "--at", at, "--pause", 0.02, *steps)
        agent = ("--rsh-agent", str(cluster.ssh), "--net", network.INTERFACE)
        started = _hvpipe_run(2, folder, *options)
        started[4:6] = ["--hosts", "h0:1,h1:1", *agent]
        command = cluster.host_command("h0", started)
        ended = _run(command, during)
        if down_s is None:
            says = "HVPIPE_SHUTDOWN_TIMEOUT" if phase == "flush" else "DeadlineError"
            return _judge_end(ended, folder, DEADLINE_S, (says, "rank "))
        return _judge_going_on(ended, folder, 2, options=steps)


def _stranger(phase: str, chance: random.Random) -> Trial:
    """As on the other hosts of a job, where anybody can make the folder that HVPIPE_JOB_FOLDER names."""
    nobody = 65534
    with _folder() as folder:
        victim, job = folder / "victim", folder / "hvpipe-run-of-a-stranger"
        victim.write_text("precious")
        names = ["stop", "aborting", "joined", *(f"flight/rank-{rank}.flight" for rank in range(_RANKS))]
        for path in (job / name for name in names):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(victim)
        laid = sorted(job.rglob("*"))
        for path in (job, *laid):
            os.lchown(path, nobody, nobody)
        place = ("--phase", phase, "--victim", chance.randrange(_RANKS), "--at", chance.randrange(1, 10))
        command = _hvpipe_run(_RANKS, folder, "--fault", "mark", *place, "--job-folder", job)
        flight = command.index("--flight-recorder")
        del command[flight : flight + 2]  # it would be used instead of the job folder
        trial = _judge_going_on(_run(command), folder, _RANKS, f"{job} belongs to nobody (user {nobody})")
        other = _problem(
            (victim.read_text() != "precious", "the victim's file was written"),
            (sorted(job.rglob("*")) != laid, "the stranger's folder was written"),
        )
        return replace(trial, problem=trial.problem or other)


def _silent(phase: str, chance: random.Random) -> Trial:
    """Strangers connect to the ranks of a job over TCP before these have met, and say nothing."""
    first = chance.randrange(20_000, 32_000, 16)
    with _folder() as folder, contextlib.ExitStack() as held:

        def during(process: subprocess.Popen[Any]) -> None:
            count = 0
            while count < 40 and process.poll() is None:
                for port in range(first, first + 16):
                    with contextlib.suppress(OSError):
                        held.enter_context(socket.create_connection(("127.0.0.1", port), 0.1))
                        count += 1
                time.sleep(0.005)
            if count >= 40:
                (folder / "broken").write_text(repr(time.time()))

        over_tcp = {"HVPIPE_BACKEND": "tcp", "HVPIPE_PORTS": f"{first}-{first + 15}"}
        ended = _run(_hvpipe_run(_RANKS, folder, "--late", chance.randrange(_RANKS)), during, over_tcp)
        return _judge_going_on(ended, folder, _RANKS)


def _whole_job(phase: str, chance: random.Random) -> Trial:
    """Kill everything at a random moment after the first checkpoint has begun, then start again."""
    with _folder() as folder:

        def during(process: subprocess.Popen[Any]) -> None:
            while not (folder / "broken").exists() and process.poll() is None:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.15))
            end_left_behind(str(folder))  # launcher and ranks at once

        marks = ("--fault", "mark", "--phase", "checkpoint", "--pause", 0.02)
        killed = _run(_hvpipe_run(2, folder, *marks), during)
        if killed.code == 0:
            return Trial("nothing was killed", output=killed.output)
        again = _run(_hvpipe_run(2, folder))
        unreadable = list((folder / "checkpoints").glob("*.damaged"))
        if unreadable:
            return Trial(f"{len(unreadable)} checkpoints cannot be read", output=again.output)
        return _judge_going_on(again, folder, 2)


def _lost(overlap: str, chance: random.Random) -> Trial:
    from bench.faults import elastic  # imports TensorFlow

    return elastic.run_trial(_RANKS, overlap, chance)
