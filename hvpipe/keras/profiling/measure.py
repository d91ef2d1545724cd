"""A measured profile: every layer call of a model timed by itself, forward and backward, on this rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras

from hvpipe.errors import HvpipeError
from hvpipe.keras.graph.deferred_build import lent_memory, without_memory
from hvpipe.keras.graph.layer_graph import LayerGraph, functional_of, layer_graph
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages, cut_stages
from hvpipe.keras.profiling.footprint import Slots, kept_bytes, tensor_bytes, untrained_bytes, weight_bytes
from hvpipe.keras.profiling.stopwatch import Stopwatch
from hvpipe.keras.profiling.timed_spans import corrected
from hvpipe.keras.profiling.timed_stage import Wires, Work, same_state
from hvpipe.keras.profiling.update_time import UpdateTime
from hvpipe.specs.profile import LayerCost, Profile

Tell = Callable[[int, int, str], None]
"""Called before each layer call is timed: how many are done, of how many, the name of this one."""


def measure(
    model: Any,
    batch: Any,
    *,
    repeats: int = 5,
    optimizer: Any = None,
    progress: bool = True,
) -> Profile:
    """The profile of a model on this rank's device; its layers are named as the calls of its graph.

    `model` is a functional or Sequential Keras model, or a function without arguments that returns one. Of a
    function's model only one layer at a time has memory for its weights, so that a model can be measured
    that does not fit; a model that is given is left as it was. Not collective: ranks that will train at the
    same time should measure at the same time.

    `batch` is one micro-batch, as `fit` takes it: inputs, or a tuple of inputs, targets and sample weights,
    of which the latter are not looked at; several inputs as a list, or a dict by name. All costs are for it.

    Each call is run by itself in training mode, in the same two graphs, forward and backward, that a
    pipeline runs; on what the calls before it made of the batch, and on random gradients. Of `repeats` times
    in seconds, after two to warm up and less the time of an empty function, the medians tell how the calls
    compare. What they take in a step is told by runs of consecutive layers, about eight, timed in turn the
    same way: their means are what the times of their layers add up to. A layer without a gradient (its
    inputs and weights are not floating, or it is the first and has no weights) has no backward. Of Keras's
    own layers that are alike in config and shapes, the first is timed for all of them. The loss is not
    measured. Where there are several samples, each call is timed on a quarter of them as well:
    `fixed_forward_s` and `fixed_backward_s` are what a line through both times leaves for no samples.
    `weight_share` is what the backward for the inputs alone leaves of the whole.
    `update_s` is on a line through the optimizer's updates of a large variable and of small ones.

    Sizes in bytes: `weight_bytes` of trained variables, for each call of a layer that is called again;
    `slot_bytes` of the slots that `optimizer` makes for them (default: the one that the model is compiled
    with, else Adam) and of variables that are not trained; `output_bytes` of what other layers or the loss
    take, masks included; `saved_bytes` of the outputs and of what else the forward keeps for the backward.

    A progress bar is shown where `progress` and the output is a terminal. Raises HvpipeError for a model
    without a graph (see `layer_graph`), and for a batch that does not fit it.
    """
    if repeats < 1:
        raise HvpipeError(f"repeats should be at least 1. Received: repeats={repeats}")
    built = built_model(model)
    tell = _progress_bar() if progress and sys.stdout.isatty() else lambda done, count, name: None
    return measure_built(built, batch, repeats=repeats, optimizer=optimizer, tell=tell)


def built_model(model: Any) -> Any:
    """A model itself; a function's model, without memory for its weights."""
    if isinstance(model, keras.Model):
        return model
    if not callable(model):
        raise HvpipeError(
            "measure wants a Keras model, or a function that returns one. "
            f"Received: {type(model).__name__} {model!r}"
        )
    return without_memory(model)


def measure_built(model: Any, batch: Any, *, repeats: int, optimizer: Any, tell: Tell) -> Profile:
    """`measure` of what `built_model` returned, telling its progress to `tell`."""
    graph = layer_graph(model)
    if not graph.calls:
        raise HvpipeError(f"A model with at least one layer is wanted. Received: model {model.name!r}")
    inputs = _inputs(model, graph, batch)
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None) or "adam"
    stopwatch = Stopwatch(repeats)
    walk = _Walk(graph, inputs, stopwatch, Slots(optimizer))
    costs = []
    for place, call in enumerate(graph.calls):
        tell(place, len(graph.calls), call.name)
        costs.append(walk.cost(place))
    costs = corrected(graph, inputs, costs, stopwatch)
    tell(len(graph.calls), len(graph.calls), "")
    names = [call.name for call in graph.calls]
    edges = [(names[maker], names[user]) for maker, user in graph.edges()]
    return Profile.of(costs, edges, batch_size=int(inputs[0].shape[0]), model=graph.name)


class _Walk:
    """Goes through the calls in order."""

    def __init__(self, graph: LayerGraph, inputs: Sequence[Any], stopwatch: Stopwatch, slots: Slots) -> None:
        self._stopwatch = stopwatch
        self._slots = slots
        layers = graph.all_layers()
        self._updates = UpdateTime(slots, sum(map(weight_bytes, layers)), stopwatch)
        self._samples = int(inputs[0].shape[0])
        self._known: dict[str | None, LayerCost] = {}
        # Every call is a stage; an empty one at the end takes the model's outputs.
        self._stages: Stages = cut_stages(graph, [*([place] for place in range(len(graph.calls))), []])
        self._wires = Wires(self._stages, inputs)

    def cost(self, place: int) -> LayerCost:
        """Run the next call, and time it unless one like it was timed before."""
        call, layers = self._stages.graph.calls[place], self._stages.layers(place)
        functions = StageFunctions(self._stages, place, targets=(), loss=None)
        given = self._wires.take(place)
        kind = self._kind(place, given)
        with lent_memory(layers), same_state(layers):
            if kind in self._known:
                cost, outputs = self._known[kind], functions.run_eagerly(given)
            else:
                cost, outputs = self._time(place, functions, given)
        if kind is not None:
            self._known[kind] = cost
        self._wires.put(place, outputs)
        return replace(cost, name=call.name)

    def _time(
        self, place: int, functions: StageFunctions, given: Sequence[Any]
    ) -> tuple[LayerCost, list[Any]]:
        call, cut = self._stages.graph.calls[place], self._stages.cuts[place]
        slot_bytes = self._slots.bytes_for(call.operation) + untrained_bytes(call.operation)
        work = Work(self._stages, place, functions, given)
        outputs = list(dict(zip(cut.outputs, work.outputs, strict=False)).values())
        saved_bytes = kept_bytes(outputs, work.saved, given)
        times_s = self._times_s(work)
        fixed_s = (0.0, 0.0)
        part = max(1, self._samples // 4)
        if part < self._samples and all(x.shape.rank and x.shape[0] == self._samples for x in given):
            part_s = self._times_s(Work(self._stages, place, functions, [x[:part] for x in given]))
            share = part / self._samples
            fixed_s = _fixed(times_s[0], part_s[0], share), _fixed(times_s[1], part_s[1], share)
        cost = LayerCost(
            name=call.name,
            forward_s=times_s[0],
            backward_s=times_s[1],
            weight_bytes=weight_bytes(call.operation),
            slot_bytes=slot_bytes,
            output_bytes=sum(tensor_bytes(x) for x in outputs),
            saved_bytes=saved_bytes,
            fixed_forward_s=fixed_s[0],
            fixed_backward_s=fixed_s[1],
            update_s=self._updates.of(call.operation),
            weight_share=self._weight_share(work, times_s[1]),
        )
        return cost, work.outputs

    def _times_s(self, work: Work) -> tuple[float, float]:
        """Of a forward and of a backward."""
        backward = work.backward
        forward_s = self._stopwatch.time_s(work.forward)
        return forward_s, 0.0 if backward is None else self._stopwatch.time_s(backward)

    def _weight_share(self, work: Work, backward_s: float) -> float | None:
        """What of the backward is for the weights; None where it is too short to tell."""
        inputs_part = work.inputs_part
        if inputs_part is None:
            return float(work.trains)
        if backward_s == 0:
            return None
        return max(0.0, 1.0 - self._stopwatch.time_s(inputs_part) / backward_s)

    def _kind(self, place: int, given: Sequence[Any]) -> str | None:
        """Equal for calls that cost the same; None where that cannot be told: a layer of the user's own."""
        call, cut = self._stages.graph.calls[place], self._stages.cuts[place]
        operation = call.operation
        if not type(operation).__module__.startswith("keras."):
            return None
        try:
            config = {name: value for name, value in operation.get_config().items() if name != "name"}
        except NotImplementedError:
            return None
        order = {key: i for i, (_, key) in enumerate(call.reads)}
        arguments = keras.tree.map_structure(
            lambda x: order.get(id(x), x), (call.arguments.args, call.arguments.kwargs)
        )
        variables = operation.variables if isinstance(operation, keras.Layer) else []
        weights = [(tuple(v.shape), v.trainable) for v in variables]
        shapes = [(x.dtype.name, tuple(x.shape)) for x in given]
        ends = (len(cut.inputs), [wire.mask for wire in cut.outputs], len(call.writes))
        return repr((type(operation), sorted(config.items()), arguments, weights, shapes, ends))


def _fixed(whole_s: float, part_s: float, share: float) -> float:
    """The time of no samples, on the line through those of all and of a share of them; within 0 and all."""
    return min(whole_s, max(0.0, (part_s - share * whole_s) / (1.0 - share)))


def _inputs(model: Any, graph: LayerGraph, batch: Any) -> list[Any]:
    """The batch's inputs as tensors in the order of the graph's, checked."""
    x = keras.utils.unpack_x_y_sample_weight(batch)[0] if isinstance(batch, tuple) else batch
    specs = [graph.tensors[number] for number in graph.inputs]
    listed = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in specs)
    want = f"batch should be inputs for the model {model.name!r}, {listed}, or a tuple that begins with them"
    if not isinstance(x, dict) and len(keras.tree.flatten(x)) != len(specs):
        raise HvpipeError(f"{want}. Received: {_described(x)}")
    try:
        found = list(functional_of(model)._standardize_inputs(x))
        shapes = [tuple(tensor.shape) for tensor in found]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise HvpipeError(f"{want}. Received: {_described(x)}: {why}") from error
    if not all(_fits(shape, spec.shape) for shape, spec in zip(shapes, specs, strict=True)):
        raise HvpipeError(f"{want}. Received: {_described(x)}")
    if len({shape[0] for shape in shapes}) > 1 or shapes[0][0] < 1:
        raise HvpipeError(f"{want}, all of the same number of samples, at least 1. Received: {_described(x)}")
    return found


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    same_rank = len(shape) == len(wanted) > 0
    return same_rank and all(want in (None, axis) for axis, want in zip(shape, wanted, strict=True))


def _described(x: Any) -> str:
    shapes = [tuple(leaf.shape) if hasattr(leaf, "shape") else leaf for leaf in keras.tree.flatten(x)]
    return f"{type(x).__name__} of shapes {shapes}" if len(shapes) < 10 else f"{len(shapes)} values"


def _progress_bar() -> Tell:
    bar: Any = None

    def tell(done: int, count: int, name: str) -> None:
        nonlocal bar
        bar = bar or keras.utils.Progbar(count, unit_name="layer")
        bar.update(done, finalize=done == count)

    return tell
