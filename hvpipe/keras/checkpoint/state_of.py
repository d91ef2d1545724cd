"""Finds the state of a model, whichever way it is trained."""

from __future__ import annotations

from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.data_parallel_state import DataParallelState
from hvpipe.keras.checkpoint.pipeline_state import PipelineState
from hvpipe.keras.checkpoint.training_state import TrainingState
from hvpipe.keras.data_parallel.model_methods import DataParallel
from hvpipe.keras.pipeline.model import PipelineParallel


def training_state(model: Any) -> TrainingState:
    """Return the state of a model of `data_parallel` or `pipeline_parallel`.

    Raises:
        HvpipeError: It is neither.
    """
    data_parallel = DataParallel.of(model)
    if data_parallel is not None:
        return DataParallelState(data_parallel)
    if isinstance(model, PipelineParallel):
        return PipelineState(model)
    raise HvpipeError(
        "Checkpoint needs a model of hvpipe.keras.data_parallel or pipeline_parallel, also on one rank. "
        f"Received: a {type(model).__name__}"
    )
