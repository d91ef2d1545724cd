"""Estimates a model's profile from its shapes, for planning without a measurement."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from hvpipe.keras.graph.layer_graph import Call, LayerGraph
from hvpipe.keras.profiling.footprint import untrained_bytes, weight_bytes
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

# Operations and bytes per second of a device of speed 1. Only their ratio matters for a cut.
_FLOPS_PER_S = 2e10
_BYTES_PER_S = 5e9


def estimate(graph: LayerGraph, samples: int, slots: int = 2) -> Profile:
    """Estimate the costs of one micro-batch.

    A layer with weights multiplies each of them once for every position of its output: every sample, pixel
    or token. All layers read and write their tensors once. The backward takes twice as long; as long in a
    frozen layer, and no time where only frozen layers come before. This is good enough to balance layers
    against each other, but does not predict seconds; `hvpipe.keras.measure` does.

    Args:
        graph: The model.
        samples: The samples of a micro-batch.
        slots: The optimizer's slots for each weight.
    """
    # Whether a call, or one that it depends on, has weights to train.
    trains = [bool(weight_bytes(call.operation)) for call in graph.calls]
    for maker, user in graph.edges():
        trains[user] |= trains[maker]
    layers = [
        _cost(graph, call, samples, slots, needs_backward)
        for call, needs_backward in zip(graph.calls, trains, strict=True)
    ]
    names = [call.name for call in graph.calls]
    edges = [(names[maker], names[user]) for maker, user in graph.edges()]
    return Profile.of(layers, edges, batch_size=samples, model=graph.name)


def _cost(graph: LayerGraph, call: Call, samples: int, slots: int, needs_backward: bool) -> LayerCost:
    outputs = [graph.tensors[number] for number, _ in call.writes]
    output_bytes = sum(tensor.nbytes(samples) for tensor in outputs)
    gradient_bytes = sum(x.nbytes(samples) for x in outputs if tf.as_dtype(x.dtype).is_floating)
    input_bytes = sum(graph.tensors[number].nbytes(samples) for number, _ in call.reads)
    weights = call.operation.weights if isinstance(call.operation, keras.Layer) else ()
    count = sum(math.prod(v.shape) for v in weights if len(v.shape) > 1)
    flops = 0.0
    if count and outputs and not isinstance(call.operation, keras.layers.Embedding):
        shape = [samples if axis is None else axis for axis in outputs[0].shape]
        flops = 2.0 * count * math.prod(shape[:-1])
    forward_s = flops / _FLOPS_PER_S + (input_bytes + output_bytes) / _BYTES_PER_S
    trained_bytes = weight_bytes(call.operation)
    frozen = bool(weights) and not trained_bytes
    return LayerCost(
        name=call.name,
        forward_s=forward_s,
        backward_s=(1 if frozen else 2) * forward_s if needs_backward else 0.0,
        weight_bytes=trained_bytes,
        slot_bytes=slots * trained_bytes + untrained_bytes(call.operation),
        output_bytes=output_bytes,
        saved_bytes=output_bytes,
        gradient_bytes=None if gradient_bytes == output_bytes else gradient_bytes,
    )
