"""Tells `hvpipe top` what this rank does: its newest sample and its last steps, twice a second."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hvpipe.comm.discover import Settings
from hvpipe.comm.world import World
from hvpipe.monitor.status_datagrams import Mailbox, Receiver, Sender
from hvpipe.monitor.status_files import LiveFolder, RankNow
from hvpipe.trace.sample import Sample, Utilization, summarise_samples

_INTERVAL_S = 0.5
_DATAGRAMS_PER_S = 500  # that rank 0 takes in


@dataclass(frozen=True)
class Progress:
    """What this rank has done so far."""

    steps: int
    last_steps_s: tuple[float, ...]
    samples: float
    bytes_sent: float


@dataclass(frozen=True)
class Invitation:
    """What rank 0 tells the others: the job's name, and where to send word from other hosts."""

    job: str
    script: str
    host: str
    began_s: float
    mailbox: Mailbox | None


class LiveReport:
    """One rank's report; `publish` runs in the sampler's thread and never fails; `close` after that ended."""

    def __init__(
        self,
        world: World,
        invitation: Invitation,
        receiver: Receiver | None,
        folder: str | None,
        progress: Callable[[], Progress],
    ) -> None:
        self._world = world
        self._invitation = invitation
        self._receiver = receiver
        self._progress = progress
        self._interval_s = max(_INTERVAL_S, world.size / _DATAGRAMS_PER_S)
        self._due_s = 0.0
        self._samples: list[Sample] = []
        self._before: tuple[float, Progress] | None = None
        self._folder: LiveFolder | None = None
        self._sender: Sender | None = None
        with contextlib.suppress(OSError):
            self._folder = LiveFolder(folder, invitation.job, world.rank)
        if invitation.mailbox is not None and invitation.host != world.host:
            with contextlib.suppress(OSError):
                self._sender = Sender(invitation.mailbox)

    def publish(self, sample: Sample) -> None:
        """Write this rank's file, and send it where rank 0 does not see the file, if it is time to."""
        self._samples.append(sample)
        if sample.time_s < self._due_s:
            return
        self._due_s = sample.time_s + self._interval_s
        # Over a single look the processor's clock, of 10 ms, is too coarse.
        now = self._now(sample.time_s, summarise_samples(self._samples))
        self._samples.clear()
        if self._sender is not None:
            self._sender.send(now)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.write(now)
                if self._receiver is not None:
                    self._folder.write_others(self._receiver.collect())

    def close(self) -> None:
        for end in (self._sender, self._receiver):
            if end is not None:
                end.close()
        if self._folder is not None:
            self._folder.close(with_others=self._receiver is not None)

    def _now(self, at_s: float, recent: Utilization) -> RankNow:
        done = self._progress()
        images_per_s = sent_bytes_per_s = None
        if self._before is not None:
            before_s, before = self._before
            passed_s = at_s - before_s
            images_per_s = (done.samples - before.samples) / passed_s if done.samples else None
            sent_bytes_per_s = (done.bytes_sent - before.bytes_sent) / passed_s
        self._before = (at_s, done)
        return RankNow(
            job=self._invitation.job,
            script=self._invitation.script,
            rank=self._world.rank,
            size=self._world.size,
            host=self._world.host,
            at_s=time.time(),
            began_s=self._invitation.began_s,
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


def open_live_report(world: World, settings: Settings, progress: Callable[[], Progress]) -> LiveReport | None:
    """This rank's report, where rank 0's settings ask for one; collective."""
    receiver: Receiver | None = None
    invitation: Invitation | None = None
    if world.rank == 0 and settings.live:
        if world.size > world.local_size:
            with contextlib.suppress(OSError):
                receiver = Receiver()
        invitation = Invitation(
            job=f"{world.host}-{os.getpid()}-{secrets.token_hex(2)}",
            script=Path(sys.argv[0]).name,
            host=world.host,
            began_s=time.time(),
            mailbox=receiver.mailbox if receiver is not None else None,
        )
    invitation = world.broadcast_object(invitation)
    if invitation is None:
        return None
    return LiveReport(world, invitation, receiver, settings.live_folder, progress)
