"""Plain Keras in one process. Several ranks are as many processes that compute at once and share nothing.

With the option `beside_tcp`, a process beside the first rank of each host exchanges as many bytes with its
neighbours during each step as an all-reduce of the gradients would.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.hosts.stream import Stream, open_stream
from bench.metrics import ring_factor
from bench.rounds.job import RankJob
from bench.systems.loop import fit
from bench.training.prepare import claim_gpu, gradient_bytes, prepare_tensorflow
from bench.training.workloads import compiled_model, train_whole_steps


def train(job: RankJob) -> None:
    keras = prepare_tensorflow(job.task.threads)
    claim_gpu(*job.local_rank_and_size)
    train_whole_steps(job)
    model = compiled_model(keras, job.task)
    job.gradient_bytes = gradient_bytes(model, job.samples)
    # All should compute at once, and nothing else keeps them in step.
    job.watch.at_window = lambda: job.meet("window")
    job.meet("built")
    if "beside_tcp" in job.options:
        with ring_stream(job, job.gradient_bytes) as sends:
            fit(keras, model, job, [_moves_bytes(keras, *sends)] if sends else [])
        return
    fit(keras, model, job)


def _moves_bytes(keras: Any, stream: Stream, size_bytes: int) -> Any:
    """Return a callback that starts a step's bytes at its begin, and ends the step only when they arrived."""

    class MovesBytes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            stream.begin(size_bytes)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            stream.wait()

    return MovesBytes()


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
