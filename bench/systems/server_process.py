"""A TensorFlow worker or parameter server: ``python -m bench.systems.server_process DIRECTORY JOB INDEX``.

It serves until it is ended, and writes readings of what it uses to DIRECTORY/JOB-INDEX.readings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench.rounds import meter

PERIOD_S = 0.2


def readings_file(directory: Path, job: str, index: int) -> Path:
    return directory / f"{job}-{index}.readings"


def read_file(path: Path) -> list[meter.Reading]:
    lines = path.read_text().split("\n")[:-1]  # the last line may be incomplete
    return [meter.Reading(**json.loads(line)) for line in lines]


def serve(directory: Path, job: str, index: int) -> None:
    """Start the server that TF_CONFIG describes, and write readings until the end."""
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
    with readings_file(directory, job, index).open("w") as file:
        while server is not None:
            file.write(json.dumps(asdict(meter.read())) + "\n")
            file.flush()
            time.sleep(PERIOD_S)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
