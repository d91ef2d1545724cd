"""A training step under `horovodrun --gloo`: hvpipe on Horovod's operations against Horovod's own tape.

    .venv-peers/bin/python -m bench.step.gloo --rate 1gbit --rounds 3

Two virtual hosts with one rank each train ResNet-50. Systems take turns; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.cluster.virtual_cluster import VirtualCluster, equal_hosts

SYSTEMS = ("horovod", "hvpipe-none", "hvpipe-step")
_WARM_UP, _LIMIT_S = 3, 900.0
# Stands in for ssh, as horovodrun and mpirun call it: ssh OPTIONS HOST OPTIONS COMMAND. The hosts are
# namespaces.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -x ]] || shift; shift; done
host=$1; shift
while [[ $1 == -* ]]; do [[ $1 == -x ]] || shift; shift; done
exec {agent} "$host" "$*"
"""


def train(system: str, options: argparse.Namespace) -> None:
    """Be one rank: train and, on rank 0, print the seconds of each step."""
    import keras
    import numpy as np
    import tensorflow as tf

    threads = max(1, (os.cpu_count() or 2) // 2)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    shape = (options.pixels, options.pixels, 3)
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=shape)
    x = np.random.default_rng(0).random((options.batch, *shape), dtype=np.float32)
    y = np.zeros(options.batch, np.int64)
    steps = _WARM_UP + options.steps
    if system == "horovod":
        rank, times = _by_horovod(tf, keras, model, (x, y), steps)
    else:
        rank, times = _by_hvpipe(tf, keras, model, (x, y), steps, system.removeprefix("hvpipe-"))
    if rank == 0:
        print("times", *(f"{later - earlier:.4f}" for earlier, later in pairwise(times)))


def _by_horovod(tf: Any, keras: Any, model: Any, batch: Any, steps: int) -> tuple[int, list[float]]:
    import horovod.tensorflow as hvd

    hvd.init()
    optimizer, loss_of = keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy()
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    x, y = (tf.constant(part) for part in batch)

    @tf.function(jit_compile=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return hvd.rank(), _timed(lambda: step().numpy(), steps)


def _by_hvpipe(
    tf: Any, keras: Any, model: Any, batch: Any, steps: int, overlap: str
) -> tuple[int, list[float]]:
    import hvpipe
    import hvpipe.keras as hk

    hvpipe.init()
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", jit_compile=False)
    model = hk.data_parallel(model, overlap=overlap)
    times = [time.perf_counter()]

    class Times(keras.callbacks.Callback):
        reads_weights = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())

    model.fit(tf.data.Dataset.from_tensors(batch).repeat(steps), verbose=0, callbacks=[Times()])
    return hvpipe.rank(), times[1:]


def _timed(step: Callable[[], Any], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        step()
        times.append(time.perf_counter())
    return times


def measure(options: argparse.Namespace) -> None:
    """Run the rounds, and print the median of each system."""
    found: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder, VirtualCluster(equal_hosts(2, options.rate)) as cluster:
        ssh = Path(folder) / "ssh"
        ssh.write_text(SSH.format(agent=cluster.directory / "agent"))
        ssh.chmod(0o755)
        beside = Path(sys.executable).parent
        env = {**os.environ, "PATH": f"{folder}:{beside}:{os.environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"}
        names = [host.name for host in cluster.spec.hosts]
        for number in range(options.rounds):
            for system in SYSTEMS:
                job = ["horovodrun", "--gloo", "-np", "2", "-H", ",".join(f"{name}:1" for name in names)]
                mine = [sys.executable, "-m", "bench.step.gloo", "--worker", system, *_given(options)]
                run = subprocess.run(
                    cluster.host_command(names[0], [*job, *mine]),
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=_LIMIT_S,
                    check=False,
                )
                line = next((text for text in run.stdout.splitlines() if "times " in text), None)
                if line is None:
                    raise SystemExit(f"{system} printed no times:\n{run.stdout[-2000:]}{run.stderr[-4000:]}")
                median_s = statistics.median(map(float, line.split("times ")[1].split()[_WARM_UP - 1 :]))
                found[system].append(median_s)
                print(f"round {number + 1}: {system:12} {1e3 * median_s:7.0f} ms a step", flush=True)
    reference_s = statistics.median(found["horovod"])
    for system, each in found.items():
        median_s = statistics.median(each)
        print(f"{system:12} {1e3 * median_s:7.0f} ms, {reference_s / median_s:.2f}x Horovod's speed")


def _given(options: argparse.Namespace) -> list[str]:
    return ["--pixels", str(options.pixels), "--batch", str(options.batch), "--steps", str(options.steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description="hvpipe on Horovod's operations against Horovod itself")
    parser.add_argument("--rate", default="1gbit", help="rate of each host's link (1gbit)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a round")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="images per rank and step")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
