"""Runs a model's calls one by one, and times each forward and backward separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras

from hvpipe.keras.graph.deferred_build import lent_memory
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages, cut_stages
from hvpipe.keras.profiling.footprint import (
    OptimizerSlots,
    kept_bytes,
    tensor_bytes,
    untrained_bytes,
    weight_bytes,
)
from hvpipe.keras.profiling.stopwatch import Stopwatch
from hvpipe.keras.profiling.timed_stage import Activations, TimedStage, same_state
from hvpipe.keras.profiling.update_time import UpdateTime
from hvpipe.specs.layer_cost import LayerCost, OutputTensor


class LayerTimer:
    """Measures the calls of a graph in order; each call takes the outputs of earlier calls."""

    def __init__(
        self, graph: LayerGraph, inputs: Sequence[Any], stopwatch: Stopwatch, slots: OptimizerSlots
    ) -> None:
        self._stopwatch = stopwatch
        self._slots = slots
        layers = graph.all_layers()
        self._updates = UpdateTime(slots, sum(map(weight_bytes, layers)), stopwatch)
        self._samples = int(inputs[0].shape[0])
        self._known: dict[str | None, LayerCost] = {}
        # Every call is a stage. An empty stage at the end receives the model's outputs.
        self._stages: Stages = cut_stages(graph, [*([index] for index in range(len(graph.calls))), []])
        self._activations = Activations(self._stages, inputs)

    def cost(self, index: int) -> LayerCost:
        """Run the next call, and time it unless an equal one was timed before; return its cost."""
        call, layers = self._stages.graph.calls[index], self._stages.layers(index)
        functions = StageFunctions(self._stages, index, targets=(), loss=None)
        inputs = self._activations.take(index)
        kind = self._kind(index, inputs)
        with lent_memory(layers), same_state(layers):
            if kind in self._known:
                cost, outputs = self._known[kind], functions.run_eagerly(inputs)
            else:
                cost, outputs = self._time(index, functions, inputs)
        if kind is not None:
            self._known[kind] = cost
        self._activations.put(index, outputs)
        return replace(
            cost,
            name=call.name,
            weights_of=self._owner(index) if cost.weight_bytes or cost.slot_bytes else None,
            **self._sent(index, outputs),
        )

    def _sent(self, index: int, outputs: Sequence[Any]) -> dict[str, Any]:
        """Return the bytes of the gradients, and the tensors if their users differ, for LayerCost."""
        cut, calls = self._stages.cuts[index], self._stages.graph.calls
        floating = set(self._stages.floating(cut.outputs))
        sizes: dict[tuple[str, ...], list[int]] = {}
        for wire, output in dict(zip(cut.outputs, outputs, strict=False)).items():
            stages = [stage for stage, sent in sorted(cut.sends.items()) if wire in sent]
            users = tuple(calls[stage].name for stage in stages if stage < len(calls))
            of_users = sizes.setdefault(users, [0, 0])
            of_users[0] += tensor_bytes(output)
            of_users[1] += tensor_bytes(output) if wire in floating else 0
        tensors = [
            OutputTensor(size_bytes, users, None if back_bytes == size_bytes else back_bytes)
            for users, (size_bytes, back_bytes) in sizes.items()
            if users
        ]
        if len(sizes) > 1:
            return {"tensors": tuple(tensors)}
        return {"gradient_bytes": tensors[0].gradient_bytes} if tensors else {}

    def _owner(self, index: int) -> str | None:
        """Return the name of the first call of the same layer, or None if this is it."""
        calls = self._stages.graph.calls
        first = next(call for call in calls if call.operation is calls[index].operation)
        return None if first is calls[index] else first.name

    def _time(
        self, index: int, functions: StageFunctions, inputs: Sequence[Any]
    ) -> tuple[LayerCost, list[Any]]:
        """Return the cost of a call, and its outputs."""
        call, cut = self._stages.graph.calls[index], self._stages.cuts[index]
        slot_bytes = self._slots.bytes_for(call.operation) + untrained_bytes(call.operation)
        timed = TimedStage(self._stages, index, functions, inputs)
        outputs = list(dict(zip(cut.outputs, timed.outputs, strict=False)).values())
        saved_bytes = kept_bytes(outputs, timed.saved, inputs)
        times_s = self._times_s(timed)
        fixed_s = (0.0, 0.0)
        part = max(1, self._samples // 4)
        if part < self._samples and all(x.shape.rank and x.shape[0] == self._samples for x in inputs):
            part_s = self._times_s(TimedStage(self._stages, index, functions, [x[:part] for x in inputs]))
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
            weight_share=self._weight_share(timed, times_s[1]),
        )
        return cost, timed.outputs

    def _times_s(self, timed: TimedStage) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward."""
        backward = timed.backward
        forward_s = self._stopwatch.time_s(timed.forward)
        return forward_s, 0.0 if backward is None else self._stopwatch.time_s(backward)

    def _weight_share(self, timed: TimedStage, backward_s: float) -> float | None:
        """Return the weights' share of the backward's time; None if the backward is too short to tell."""
        backward_inputs = timed.backward_inputs
        if backward_inputs is None:
            return float(timed.trains)
        if backward_s == 0:
            return None
        return max(0.0, 1.0 - self._stopwatch.time_s(backward_inputs) / backward_s)

    def _kind(self, index: int, inputs: Sequence[Any]) -> str | None:
        """Return a text that is equal for calls of equal cost; None for custom layers."""
        call, cut = self._stages.graph.calls[index], self._stages.cuts[index]
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
        shapes = [(x.dtype.name, tuple(x.shape)) for x in inputs]
        ends = (len(cut.inputs), [wire.mask for wire in cut.outputs], len(call.writes))
        return repr((type(operation), sorted(config.items()), arguments, weights, shapes, ends))


def _fixed(whole_s: float, part_s: float, share: float) -> float:
    """Return the time for zero samples, on the line through the times of all samples and a share of them.

    The result is between 0 and the time of all samples.
    """
    return min(whole_s, max(0.0, (part_s - share * whole_s) / (1.0 - share)))
