"""A small named all-reduce through Horovod's API: hvpipe's against Horovod's own.

    .venv-peers/bin/python -m bench.all_reduce.named

The same eager call, `hvd.allreduce(tensor, name=...)`, in jobs that `mpirun` starts in turn. Horovod sends at
the end of a cycle, so it runs with several cycle times; its best one counts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

_WARM_UP, _LIMIT_S = 50, 300.0
_HVPIPE = "hvpipe"


def call(system: str, size_bytes: int, calls: int) -> None:
    """Be one rank: call, and print the median of a call on rank 0, in microseconds."""
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
        raise SystemExit(f"The sum should be {hvd.size()}. Received: {total[0]}")
    if hvd.rank() == 0:
        print("median_us", 1e6 * statistics.median(taken_s[_WARM_UP:]))


def _median_us(system: str, options: argparse.Namespace) -> float:
    """Run one job of a system ("hvpipe", or Horovod's cycle time in milliseconds)."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    launcher = Path(sys.executable).with_name("mpirun")
    if system != _HVPIPE:
        env["HOROVOD_CYCLE_TIME"] = system
    command = [str(launcher), "-np", str(options.ranks), "--allow-run-as-root", "--oversubscribe"]
    command += [sys.executable, "-m", "bench.all_reduce.named", "--worker", system]
    command += ["--bytes", str(options.bytes), "--calls", str(options.calls)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    line = next((text for text in run.stdout.splitlines() if text.startswith("median_us")), None)
    if line is None:
        raise SystemExit(f"{system} printed no time:\n{run.stdout[-2000:]}{run.stderr[-4000:]}")
    return float(line.split()[1])


def measure(options: argparse.Namespace) -> None:
    """Run the rounds, and print the median of each system."""
    systems = [_HVPIPE, *options.cycle_times.split(",")]
    found: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(options.rounds):
        for system in systems:
            found[system].append(_median_us(system, options))
            name = system if system == _HVPIPE else f"Horovod, {system} ms"
            print(f"round {number + 1}: {name:16} {found[system][-1]:7.0f} us a call", flush=True)
    medians = {system: statistics.median(each) for system, each in found.items()}
    best = min(systems[1:], key=medians.__getitem__)
    print(f"hvpipe           {medians[_HVPIPE]:7.0f} us")
    ratio = medians[best] / medians[_HVPIPE]
    print(f"Horovod, {best} ms  {medians[best]:7.0f} us, its best cycle time: {ratio:.2f}x hvpipe's time")


def main() -> None:
    parser = argparse.ArgumentParser(description="Latency of a named all-reduce: hvpipe against Horovod")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=1024, help="size of the tensor (1024)")
    parser.add_argument("--calls", type=int, default=400, help="timed calls of a job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycle-times", default="0.1,0.5,1", help="Horovod's, in milliseconds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        call(options.worker, options.bytes, options.calls)
    else:
        measure(options)


if __name__ == "__main__":
    main()
