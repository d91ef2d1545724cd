"""Plain TCP around a ring of hosts: what a step's bytes cost the hosts' cores, whoever sends them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from bench.hosts.stream import Stream, open_stream
from bench.metrics import ring_factor
from bench.rounds.job import RankJob


@contextmanager
def ring_stream(job: RankJob, gradient_bytes: int) -> Iterator[tuple[Stream, int] | None]:
    """Connect the hosts of all ranks in a ring, which stands in for an all-reduce of so many bytes.

    All ranks call this together. The first rank of each host gets a stream, and the bytes that it sends in a
    step; the others get None. The CPU time of a stream's process counts as its rank's.
    """
    if job.local_rank_and_size[0] > 0:
        job.meet("streams")
        yield None
        return
    with open_stream() as stream:
        (job.directory / f"stream-{job.rank}").write_text(f"{socket.gethostname()} {stream.port}")
        job.meet("streams")
        firsts = sorted(job.directory.glob("stream-*"), key=lambda path: int(path.name.split("-")[1]))
        here = firsts.index(job.directory / f"stream-{job.rank}")
        host, port = firsts[(here + 1) % len(firsts)].read_text().split()
        stream.send_to(host, int(port))
        job.watch.helper = stream.process.pid
        yield stream, round(ring_factor(len(firsts)) * gradient_bytes)
