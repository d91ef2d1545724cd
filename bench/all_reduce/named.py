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

from bench.errors import BenchError
from bench.hosts import rank_benchmark
from bench.hosts.hosts import ThisHost

_WARM_UP = 50
_HVPIPE = "hvpipe"


def measure(system: str, size_bytes: int, calls: int) -> float:
    """Call on every rank, and return the median seconds of a call."""
    import tensorflow as tf

    hvd = importlib.import_module("hvpipe.horovod.tensorflow" if system == _HVPIPE else "horovod.tensorflow")
    hvd.init()
    tensor = tf.ones(max(1, size_bytes // 4), tf.float32)
    taken_s = []
    for _ in range(_WARM_UP + calls):
        begun_s = time.perf_counter()
        total = hvd.allreduce(tensor, op=hvd.Sum, name="tensor").numpy()
        taken_s.append(time.perf_counter() - begun_s)
    if total[0] != hvd.size():
        raise ArithmeticError(f"The sum should be {hvd.size()}. Received: {total[0]}")
    return statistics.median(taken_s[_WARM_UP:])


def _measured_us(system: str, options: argparse.Namespace) -> float:
    """Run one job of a system ("hvpipe", or Horovod's cycle time in milliseconds)."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if system != _HVPIPE:
        os.environ["HOROVOD_CYCLE_TIME"] = system
    arguments = {"system": system, "size_bytes": options.bytes, "calls": options.calls}
    return 1e6 * float(rank_benchmark.run_on_ranks("bench.all_reduce.named", arguments, ThisHost(), options))


def main() -> int:
    """Run the rounds, and print the median of each system."""
    parser = argparse.ArgumentParser(description="Latency of a named all-reduce: hvpipe against Horovod")
    rank_benchmark.add_rank_arguments(parser)
    parser.add_argument("--bytes", type=int, default=1024, help="size of the tensor (1024)")
    parser.add_argument("--calls", type=int, default=400, help="timed calls of a job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycle-times", default="0.1,0.5,1", help="Horovod's, in milliseconds")
    options = parser.parse_args()
    cycle_times = options.cycle_times.split(",")
    found: dict[str, list[float]] = {system: [] for system in (_HVPIPE, *cycle_times)}
    try:
        for _ in range(options.rounds):
            for system, measured in found.items():
                measured.append(_measured_us(system, options))
    except BenchError as error:
        print(f"bench.all_reduce.named: {error}", file=sys.stderr)
        return 1
    medians = {system: statistics.median(each) for system, each in found.items()}
    best = min(cycle_times, key=medians.__getitem__)
    print(f"hvpipe           {medians[_HVPIPE]:7.0f} us")
    ratio = medians[best] / medians[_HVPIPE]
    print(f"Horovod, {best} ms  {medians[best]:7.0f} us, its best cycle time: {ratio:.2f}x hvpipe's time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
