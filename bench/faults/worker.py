"""One rank of a job that is broken: steps of a small model through the engine's buckets, with checkpoints.

It has no TensorFlow, so that hundreds of jobs can be broken in minutes. The phases of a step are the
engine's: pack, reduce, update, and at the end flush. `checkpoint` is while the checkpoint's thread writes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvpipe
from hvpipe.checkpoints.arrays import read_arrays
from hvpipe.checkpoints.manifest import Manifest, Position
from hvpipe.checkpoints.usable import newest_usable
from hvpipe.checkpoints.writer import Snapshot, Writer, WriterOptions
from hvpipe.environment.discover import discover
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current
from hvpipe.world import tcp_setup

SHAPES = ((300, 200), (200,), (400, 150), (150,))
EVERY = 2  # steps between two checkpoints
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}


class Breaker:
    """Breaks this rank once, if it is the one, at a step and in a phase."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._limited_until: int | None = None

    def reach(self, phase: str, step: int) -> None:
        wanted = self._options
        if self._limited_until is not None and step >= self._limited_until:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        if hvpipe.rank() != wanted.victim or phase != wanted.phase or step < wanted.at or not wanted.fault:
            return
        fault, wanted.fault = wanted.fault, ""
        (wanted.folder / "broken").write_text(repr(time.time()))
        if fault in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault])  # a stopped rank may go on
        elif fault == "raise":
            raise ValueError("injected")
        elif fault == "exit":
            sys.exit(3)
        elif fault == "part":
            self._limited_until = step + 2 * EVERY
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif fault == "slow":
            time.sleep(2.0)
        elif fault == "memory":
            (wanted.group / "cgroup.procs").write_text(str(os.getpid()))
            (wanted.group / "memory.limit_in_bytes").write_text(str(256 << 20))
            hoard = [np.ones(8 << 20, np.uint8) for _ in range(200)]
            raise AssertionError(f"{len(hoard)} arrays fit")
        elif fault == "clock":
            with wanted.clock.open("r+b") as clock:
                clock.write(struct.pack("q", wanted.jump))
            off_s = time.time() - float((wanted.folder / "broken").read_text())
            assert abs(off_s - wanted.jump) < 60, "the clock did not jump"
            time.sleep(0.3)  # while the others wait
        # Of "mark" the harness sees the file `broken`.


class Job:
    """The weights, and how they are trained, saved and read again."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._breaker = Breaker(options)
        self._engine = current().engine
        self._weights = [np.full(shape, 0.01, np.float32) for shape in SHAPES]
        gradients = [Gradient(f"g{i}", shape, "float32") for i, shape in enumerate(SHAPES)]
        self._plan = plan_buckets(gradients, 200_000)
        self._number = self._engine.add_plan("model", self._plan)
        folder = options.folder / "checkpoints" if options.checkpoints is None else options.checkpoints
        self._folder = folder
        self._writer = Writer(WriterOptions(folder, hvpipe.rank(), hvpipe.size(), keep=2, timeout_s=20))

    def run(self) -> None:
        """Train from the newest checkpoint to the end, and print what the weights are."""
        begin = self._resume()
        run = str(self._engine.broadcast_object(f"{os.getpid() % 2**24:06x}", "run"))
        for step in range(begin, self._options.steps):
            self._train(step)
            if (step + 1) % EVERY == 0:
                self._save(step + 1, run)
            time.sleep(self._options.pause)
        self._wait_for_parts()
        self._writer.wait()
        self._breaker.reach("flush", self._options.steps)
        hvpipe.shutdown()
        state = hashlib.sha256(b"".join(one.tobytes() for one in self._weights)).hexdigest()
        print(f"STATE {state[:16]}", flush=True)

    def _train(self, step: int) -> None:
        core, rank = self._engine.native, hvpipe.rank()
        scale, _ = core.begin_step(self._number, step, 1.0, True)
        made = [np.random.default_rng([step, rank, i]).random(s, np.float32) for i, s in enumerate(SHAPES)]
        for number, bucket in enumerate(self._plan.buckets):
            self._breaker.reach("pack", step)
            core.submit(self._number, number, [made[i] for i in bucket.members], scale)
        self._breaker.reach("reduce", step)
        for number, bucket in enumerate(self._plan.buckets):
            sums: list[Any] = [np.empty(SHAPES[i], np.float32) for i in bucket.members]
            core.collect(self._number, number, sums)
            for i, total in zip(bucket.members, sums, strict=True):
                self._weights[i] -= 0.1 * total * (1 + self._weights[i])
            self._breaker.reach("update", step)

    def _save(self, step: int, run: str) -> None:
        values = {f"weights/{i}": one.copy() for i, one in enumerate(self._weights)}
        manifest = Manifest(run, "data_parallel", Position(step, 0, step), {}, ())
        self._wait_for_parts()
        self._writer.start(Snapshot(values if hvpipe.rank() == 0 else {}, manifest))
        self._breaker.reach("checkpoint", step)

    def _wait_for_parts(self) -> None:
        self._writer.wait_for_part()
        self._writer.share_failure(lambda failure: self._engine.allgather_object(failure, "parts"))

    def _resume(self) -> int:
        found = newest_usable(self._folder, _Ranks(self._engine))
        if found is None:
            return 0
        place, manifest = found
        part = manifest.parts[0]
        self._weights = list(read_arrays(place / part.file.name, part.names).values())
        return manifest.position.step


class _Ranks:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.rank, self.size = hvpipe.rank(), hvpipe.size()

    def broadcast(self, value: str | None) -> str | None:
        return self._engine.broadcast_object(value, "resume")  # type: ignore[no-any-return]

    def gather(self, value: str | None) -> list[str | None]:
        return self._engine.allgather_object(value, "resume")  # type: ignore[no-any-return]


def _be_late() -> None:
    """Listen for a second before this process calls the others."""
    run = tcp_setup.Setup.run

    def late(setup: tcp_setup.Setup, limit_s: float) -> tuple[list[int], list[bytes]]:
        time.sleep(1.0)
        return run(setup, limit_s)

    tcp_setup.Setup.run = late  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="")
    parser.add_argument("--phase", default="reduce")
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--clock", type=Path)
    parser.add_argument("--jump", type=int, default=0)
    parser.add_argument("--group", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--job-folder", help="what a rank of another host would see as that of `hvpipe run`")
    parser.add_argument("--late", type=int, help="the rank that joins the others by TCP a second later")
    options = parser.parse_args()
    if options.job_folder is not None:
        os.environ["HVPIPE_JOB_FOLDER"] = options.job_folder
    if options.late is not None and discover().rank == options.late:
        _be_late()
    hvpipe.init()
    Job(options).run()


if __name__ == "__main__":
    sys.exit(main())
