"""Plain TCP around a ring of hosts: what a step's bytes cost the hosts' cores, whoever sends them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from bench.hosts.stream import Stream, open_stream
from bench.metrics import ring_factor
from bench.rounds.job import RankJob


class RingStream:
    """The TCP stream of this rank's host. The first rank of each host has one; the others do nothing."""

    def __init__(self, stream: Stream | None, bytes_each_way: int) -> None:
        self.stream, self.bytes_each_way = stream, bytes_each_way

    def begin(self) -> None:
        """Send one step's bytes both ways."""
        if self.stream is not None:
            self.stream.begin(self.bytes_each_way)

    def wait(self) -> None:
        """Wait until the bytes of the last `begin` are sent and as many have arrived."""
        if self.stream is not None:
            self.stream.wait()


@contextmanager
def ring_stream(job: RankJob, gradient_bytes: int) -> Iterator[RingStream]:
    """Connect the hosts of all ranks in a ring, which stands in for an all-reduce of so many bytes.

    All ranks call this together. The CPU time of a stream's process counts as its rank's.
    """
    if job.local_rank_and_size[0] > 0:
        job.meet("streams")
        yield RingStream(None, 0)
        return
    with open_stream() as stream:
        (job.directory / f"stream-{job.rank}").write_text(f"{socket.gethostname()} {stream.port}")
        job.meet("streams")
        firsts = sorted(job.directory.glob("stream-*"), key=lambda path: int(path.name.split("-")[1]))
        here = firsts.index(job.directory / f"stream-{job.rank}")
        host, port = firsts[(here + 1) % len(firsts)].read_text().split()
        stream.send_to(host, int(port))
        job.watch.helper = stream.process.pid
        yield RingStream(stream, round(ring_factor(len(firsts)) * gradient_bytes))
