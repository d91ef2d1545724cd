"""A small named all-reduce through Horovod's API: hvpipe's against Horovod's own.

    .venv-peers/bin/python -m bench.all_reduce.named

The same eager call, `hvd.allreduce(tensor, name=...)`, in jobs that start in turn. Horovod sends at the end
of a cycle, so it runs with several cycle times; its best one counts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time

from bench.command import status_of
from bench.hosts import rank_benchmark
from bench.hosts.hosts import ThisHost

_WARM_UP, _CALLS = 50, 400  # of a job; warm-up calls are not timed
_BYTES = 1024
_ROUNDS = 5
_HVPIPE = "hvpipe"
_CYCLE_TIMES = ("0.1", "0.5", "1")  # Horovod's, in milliseconds


def measure(system: str) -> float:
    """Call on every rank, and return the median seconds of a call."""
    import tensorflow as tf

    hvd = importlib.import_module("hvpipe.horovod.tensorflow" if system == _HVPIPE else "horovod.tensorflow")
    hvd.init()
    tensor = tf.ones(_BYTES // 4, tf.float32)
    taken_s = []
    for _ in range(_WARM_UP + _CALLS):
        begun_s = time.perf_counter()
        total = hvd.allreduce(tensor, op=hvd.Sum, name="tensor").numpy()
        taken_s.append(time.perf_counter() - begun_s)
    if total[0] != hvd.size():
        raise ArithmeticError(f"The sum should be {hvd.size()}. Received: {total[0]}")
    return statistics.median(taken_s[_WARM_UP:])


def _measured_us(system: str) -> float:
    """Run one job of a system ("hvpipe", or Horovod's cycle time in milliseconds)."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if system != _HVPIPE:
        os.environ["HOROVOD_CYCLE_TIME"] = system
    arguments = {"system": system}
    return 1e6 * float(rank_benchmark.run_on_ranks("bench.all_reduce.named", arguments, ThisHost()))


def _measure() -> int:
    """Run the rounds, and print the median of each system."""
    found: dict[str, list[float]] = {system: [] for system in (_HVPIPE, *_CYCLE_TIMES)}
    for _ in range(_ROUNDS):
        for system, measured in found.items():
            measured.append(_measured_us(system))
    medians = {system: statistics.median(each) for system, each in found.items()}
    best = min(_CYCLE_TIMES, key=medians.__getitem__)
    print(f"hvpipe           {medians[_HVPIPE]:7.0f} us")
    ratio = medians[best] / medians[_HVPIPE]
    print(f"Horovod, {best} ms  {medians[best]:7.0f} us, its best cycle time: {ratio:.2f}x hvpipe's time")
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description="Latency of a named all-reduce: hvpipe against Horovod").parse_args()
    sys.exit(status_of("bench.all_reduce.named", _measure))
