"""Keras on PyTorch: DistributedDataParallel in a loop by hand, over Gloo on CPUs.

With the option `alone`, each process trains without the others.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

from bench.rounds.job import RankJob
from bench.systems import loop
from bench.training.workloads import make_model, make_optimizer, same_batch


def train(job: RankJob) -> None:
    """Do a rank's part of a round. TF_CONFIG names the others."""
    import keras
    import torch

    torch.set_num_threads(job.task.threads)
    job.versions["PyTorch"] = torch.__version__
    model, optimizer = make_model(keras, job.task), make_optimizer(keras, job.task)
    optimizer.build(model.trainable_variables)
    called = model
    if "alone" not in job.options:
        first = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0]
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{first}", rank=job.rank, world_size=job.size
        )
        called = torch.nn.parallel.DistributedDataParallel(model)
    step = step_of(model, called, optimizer, keras.losses.SparseCategoricalCrossentropy())
    job.watch.at_window = lambda: job.meet("window")
    job.meet("built")
    batch = tuple(torch.from_numpy(each) for each in same_batch(job))
    loop.run(keras, model, job, itertools.repeat(batch), step)
    if called is not model:
        torch.distributed.destroy_process_group()


def step_of(
    model: Any, called: Any, optimizer: Any, loss_of: Callable[[Any, Any], Any]
) -> Callable[[Any], Any]:
    """Return the step on a batch of tensors; `called` is the model, or DistributedDataParallel of it."""
    import torch

    def step(batch: Any) -> Any:
        x, y = batch
        model.zero_grad()
        loss = loss_of(y, called(x, training=True))
        loss.backward()
        gradients = [variable.value.grad for variable in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
        return loss.detach()

    return step
