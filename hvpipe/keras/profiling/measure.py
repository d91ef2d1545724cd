"""`measure`: profiles a model on this rank, with each layer call's forward and backward timed separately."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvpipe.environment.this_host import CpuMeter
from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.deferred_build import without_memory
from hvpipe.keras.graph.layer_graph import LayerGraph, functional_of, layer_graph
from hvpipe.keras.profiling.footprint import OptimizerSlots
from hvpipe.keras.profiling.layer_timer import LayerTimer
from hvpipe.keras.profiling.noise import RankNoise, noise_of
from hvpipe.keras.profiling.stopwatch import Stopwatch
from hvpipe.keras.profiling.timed_spans import corrected
from hvpipe.log import logger
from hvpipe.specs.profile import Profile

Report = Callable[[int, int, str], None]
"""Called before each layer call is timed, with the number of calls done, the total, and this call's name."""


def measure(
    model: Any,
    batch: Any,
    *,
    repeats: int = 5,
    optimizer: Any = None,
    progress: bool = True,
) -> Profile:
    """Measure the time and memory of each layer of a model on this rank's device.

    Not collective. Ranks that will train at the same time should measure at the same time.

    Each layer call runs separately in training mode, in the forward and backward graphs that a pipeline runs.
    Its inputs are the outputs of earlier calls on the batch; its gradients are random. The numbers are
    measured as follows:

    - `forward_s` and `backward_s`: the median of `repeats` calls, after two to warm up, minus the time of an
      empty function. These medians show how layers compare. To find their times in a step, about eight spans
      of consecutive layers are timed in turn in the same way. The times of each span's layers are scaled to
      add up to the span's mean.
    - A layer without a gradient has no backward: its inputs and weights are not floating, or it is the first
      and has no weights.
    - Of Keras's own layers with equal config and shapes, only the first is timed.
    - `fixed_forward_s`, `fixed_backward_s`: each call is also timed on a quarter of the samples. A line
      through both times gives the time for zero samples.
    - `weight_share`: the weight gradients' share of the backward.
    - `update_s`: from a line through the optimizer's updates of one large variable and of small ones.
    - `weight_bytes`: trained variables, counted for each call of a layer that is called again.
    - `slot_bytes`: the optimizer's slots, and variables that are not trained.
    - `output_bytes`: the outputs that other layers or the loss read, with masks.
    - `gradient_bytes`: the floating ones of these outputs, if others exist.
    - `tensors`: the outputs, if their users differ.
    - `saved_bytes`: outputs, and other tensors that the forward keeps for the backward.

    The loss is not measured.

    Args:
        model: A functional or Sequential Keras model, which stays as it was; or a function without arguments
            that returns one. With a function, only one layer at a time has memory for its weights, so the
            model may be larger than the memory.
        batch: One micro-batch as `fit` takes it: inputs, or a tuple of inputs, targets and sample weights,
            of which only the inputs are used. Several inputs are a list, or a dict by name. All costs are
            for a micro-batch of this size.
        repeats: The number of timed calls.
        optimizer: A Keras optimizer or its name. Default: the one that the model is compiled with, or Adam.
        progress: Show a progress bar if the output is a terminal.

    Returns:
        The profile. Its layers have the names of the model's calls.

    Raises:
        HvpipeError: The model has no graph, the batch does not fit it, or another argument is wrong.

    Example:

    ```python
    profile = hvpipe.keras.measure(build_model, x[:32])
    profile.write("profile.json")
    ```
    """
    if repeats < 1:
        raise HvpipeError(f"repeats should be at least 1. Received: repeats={repeats}")
    built = built_model(model)
    report = _progress_bar() if progress and sys.stdout.isatty() else lambda done, count, name: None
    stopwatch, meter = Stopwatch(repeats), CpuMeter()
    profile = measure_built(built, batch, stopwatch=stopwatch, optimizer=optimizer, report=report)
    warning = noise_of([RankNoise.since(meter, "this host", stopwatch.spread)]).warning()
    if warning is not None:
        logger.warning("%s", warning)
    return profile


def built_model(model: Any) -> Any:
    """Return the given model, or the model that a given function returns, without memory for its weights."""
    if isinstance(model, keras.Model):
        return model
    if not callable(model):
        raise HvpipeError(
            "measure needs a Keras model, or a function that returns one. "
            f"Received: {type(model).__name__} {model!r}"
        )
    return without_memory(model)


def measure_built(model: Any, batch: Any, *, stopwatch: Stopwatch, optimizer: Any, report: Report) -> Profile:
    """Measure a model that `built_model` returned; arguments as for `measure`."""
    graph = layer_graph(model)
    if not graph.calls:
        raise HvpipeError(f"The model should have at least one layer. Received: model {model.name!r}")
    inputs = _inputs(model, graph, batch)
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None) or "adam"
    timer = LayerTimer(graph, inputs, stopwatch, OptimizerSlots(optimizer))
    costs = []
    for index, call in enumerate(graph.calls):
        report(index, len(graph.calls), call.name)
        costs.append(timer.cost(index))
    costs = corrected(graph, inputs, costs, stopwatch)
    report(len(graph.calls), len(graph.calls), "")
    names = [call.name for call in graph.calls]
    edges = [(names[maker], names[user]) for maker, user in graph.edges()]
    return Profile.of(costs, edges, batch_size=int(inputs[0].shape[0]), model=graph.name)


def _inputs(model: Any, graph: LayerGraph, batch: Any) -> list[Any]:
    """Return the batch's inputs as tensors in the order of the graph's; HvpipeError if they do not fit."""
    x = keras.utils.unpack_x_y_sample_weight(batch)[0] if isinstance(batch, tuple) else batch
    specs = [graph.tensors[number] for number in graph.inputs]
    listed = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in specs)
    want = f"batch should be inputs for the model {model.name!r}, {listed}, or a tuple that begins with them"
    if not isinstance(x, dict) and len(keras.tree.flatten(x)) != len(specs):
        raise HvpipeError(f"{want}. Received: {_described(x)}")
    try:
        found = list(compat.standardize_inputs(functional_of(model), x))
        shapes = [tuple(tensor.shape) for tensor in found]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise HvpipeError(f"{want}. Received: {_described(x)}: {why}") from error
    if not all(_fits(shape, spec.shape) for shape, spec in zip(shapes, specs, strict=True)):
        raise HvpipeError(f"{want}. Received: {_described(x)}")
    if len({shape[0] for shape in shapes}) > 1 or shapes[0][0] < 1:
        raise HvpipeError(f"{want}, with equal numbers of samples, at least 1. Received: {_described(x)}")
    return found


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    same_rank = len(shape) == len(wanted) > 0
    return same_rank and all(want in (None, axis) for axis, want in zip(shape, wanted, strict=True))


def _described(x: Any) -> str:
    shapes = [tuple(leaf.shape) if hasattr(leaf, "shape") else leaf for leaf in keras.tree.flatten(x)]
    return f"{type(x).__name__} of shapes {shapes}" if len(shapes) < 10 else f"{len(shapes)} values"


def _progress_bar() -> Report:
    bar: Any = None

    def report(done: int, count: int, name: str) -> None:
        nonlocal bar
        bar = bar or keras.utils.Progbar(count, unit_name="layer")
        bar.update(done, finalize=done == count)

    return report
