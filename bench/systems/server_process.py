"""A TensorFlow worker or parameter server: ``python -m bench.systems.server_process DIRECTORY JOB INDEX``.

It serves until it is ended. When the coordinator asks, at the begin and at the end of the timed part, it
writes what it has used to DIRECTORY/JOB-INDEX.begin and .end.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from bench.rounds import meter
from bench.rounds.job import wait_for
from hvpipe.atomic_file import atomic_file

_ANSWER_S = 30.0  # the longest wait for a reading


def ask_for_readings(directory: Path, moment: str) -> None:
    """Ask all servers of a round for what they have used so far."""
    (directory / f"readings-{moment}").touch()


def wait_for_reading(directory: Path, job: str, index: int, moment: str) -> meter.Reading:
    """Return what a server had used when it was asked."""
    name = f"{job}-{index}.{moment}"
    wait_for(directory, {name}, _ANSWER_S)
    return meter.Reading(**json.loads((directory / name).read_text()))


def serve(directory: Path, job: str, index: int) -> None:
    """Start the server that TF_CONFIG describes, and write what it uses."""
    what = json.loads((directory / "job.json").read_text())
    os.environ.update(what["environment"])
    if job == "ps":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # variables stay in memory; GPUs are for the workers
    import tensorflow as tf

    from bench.training.prepare import own_gpu

    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=what["task"]["threads"])
    # TensorFlow's tutorial on parameter servers: with fewer cores than this, workers wait for ever.
    if (os.cpu_count() or 1) < what["size"] + 1:
        config.inter_op_parallelism_threads = what["size"] + 1
    gpu = own_gpu(*what["local_ranks_and_sizes"][index]) if job == "worker" else None
    if gpu is not None:
        config.gpu_options.visible_device_list = str(gpu)
        config.gpu_options.allow_growth = True
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=job, task_index=index, protocol="grpc", config=config
    )
    for moment in ("begin", "end"):
        wait_for(directory, {f"readings-{moment}"})
        with atomic_file(directory / f"{job}-{index}.{moment}") as file:
            file.write(json.dumps(asdict(meter.read())).encode())
    server.join()  # until it is ended


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
