"""Reports the status of this rank to `hvpipe top`, twice a second."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hvpipe.engine.engine import EngineClient
from hvpipe.environment.settings import Settings
from hvpipe.log import logger
from hvpipe.monitor.status_files import RankStatus, StatusFolder
from hvpipe.trace.sample import Sample, Utilization, summarise_samples

_INTERVAL_S = 0.5
_STATUSES_PER_S = 500  # that rank 0 can read


@dataclass(frozen=True)
class TrainingProgress:
    """Counts of the work that this rank has done so far."""

    steps: int
    last_steps_s: tuple[float, ...]
    samples: float
    bytes_sent: float


@dataclass(frozen=True)
class JobInfo:
    """Rank 0's message to other ranks: the job's name, and the host where it collects what they tell."""

    job: str
    script: str
    host: str


class StatusReporter:
    """Reports the status of one rank.

    The sampler's thread calls `publish`, which never fails. Call `close` after that thread has ended.
    """

    def __init__(
        self,
        engine: EngineClient,
        job: JobInfo,
        folder: str | None,
        progress: Callable[[], TrainingProgress],
    ) -> None:
        self._engine = engine
        self._world = world = engine.world  # of the start: ranks keep these numbers when others are lost
        self._job = job
        self._began_s = time.time()
        self._progress = progress
        self._interval_s = max(_INTERVAL_S, world.size / _STATUSES_PER_S)
        self._due_s = 0.0
        self._samples: list[Sample] = []
        self._before: tuple[float, TrainingProgress] | None = None
        self._others: dict[int, RankStatus] = {}
        self._folder: StatusFolder | None = None
        try:
            self._folder = StatusFolder(folder, job.job, world.rank)
        except PermissionError as error:
            if world.local_rank == 0:
                why = error.strerror or error
                logger.warning(
                    "hvpipe: `hvpipe top` cannot show the ranks of %s. Received: %s", world.host, why
                )
        except OSError:
            pass

    def publish(self, sample: Sample) -> None:
        """If a report is due, write this rank's file, and tell rank 0 if that does not see the file."""
        self._samples.append(sample)
        if sample.time_s < self._due_s:
            return
        self._due_s = sample.time_s + self._interval_s
        # The CPU clock ticks every 10 ms, too coarse for a single sample.
        now = self._now(sample.time_s, summarise_samples(self._samples))
        self._samples.clear()
        if self._job.host != self._world.host:
            self._engine.tell_rank_0(json.dumps(now.to_json()))
        for text in self._engine.take_statuses():
            with contextlib.suppress(ValueError, RecursionError):
                if (one := RankStatus.from_json(json.loads(text))) is not None:
                    # By this clock, as all in this rank's file.
                    self._others[one.rank] = replace(one, at_s=now.at_s, began_s=now.began_s)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.write(now, self._others.values())

    def close(self) -> None:
        """Remove this rank's file."""
        if self._folder is not None:
            self._folder.close()

    def _now(self, at_s: float, recent: Utilization) -> RankStatus:
        from statistics import median

        done = self._progress()
        images_per_s = sent_bytes_per_s = None
        if self._before is not None:
            before_s, before = self._before
            passed_s = at_s - before_s
            images_per_s = (done.samples - before.samples) / passed_s if done.samples else None
            sent_bytes_per_s = (done.bytes_sent - before.bytes_sent) / passed_s
        self._before = (at_s, done)
        return RankStatus(
            job=self._job.job,
            script=self._job.script,
            rank=self._world.rank,
            size=self._world.size,
            host=self._world.host,
            at_s=time.time(),
            began_s=self._began_s,
            steps=done.steps,
            step_s=median(done.last_steps_s) if done.last_steps_s else None,
            images_per_s=images_per_s,
            process_cores=recent.process_cores,
            system_share=recent.system_share,
            resident_bytes=recent.resident_peak_bytes,
            gpu_share=recent.gpu_share,
            gpu_memory_bytes=recent.gpu_memory_peak_bytes,
            gpu_power_w=recent.gpu_power_w,
            sent_bytes_per_s=sent_bytes_per_s,
        )


def open_status_reporter(
    engine: EngineClient, settings: Settings, progress: Callable[[], TrainingProgress]
) -> StatusReporter | None:
    """Return this rank's reporter, or None if rank 0's settings switch reports off. Collective."""
    world = engine.world
    job: JobInfo | None = None
    if world.rank == 0 and settings.live:
        name = f"{world.host}-{os.getpid()}-{os.urandom(2).hex()}"
        job = JobInfo(name, script=Path(sys.argv[0]).name, host=world.host)
    job = engine.broadcast_object(job, "hvpipe.init()")
    return None if job is None else StatusReporter(engine, job, settings.live_folder, progress)
