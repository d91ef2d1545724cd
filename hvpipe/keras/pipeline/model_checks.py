"""Refuses models that a pipeline would train wrongly, before anything is built."""

from __future__ import annotations

from typing import Any

import keras

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.graph.stage_cuts import Stages
from hvpipe.keras.pipeline.layout import Layout


def check_no_own_steps(model: Any) -> None:
    """Raise HvpipeError for a model that defines its own steps: the pipeline would not call them."""
    own = [
        name
        for name in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
        if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if own:
        raise HvpipeError(
            "A pipeline does not run a model's own steps: move their work into layers (add_loss), losses "
            f"and metrics. Received: {type(model).__name__} {model.name!r}, which defines {', '.join(own)}"
        )


def check_open_batch_size(graph: LayerGraph) -> None:
    """Raise HvpipeError for a fixed batch size: micro-batches are smaller, and differ in size.

    Layers that keep a state for each sample of the batch need a fixed one.
    """
    for layer in graph.all_layers():
        for inner in compat.layers_in(layer):
            if getattr(inner, "stateful", False) and isinstance(
                inner, (keras.layers.RNN, keras.layers.Bidirectional)
            ):
                raise HvpipeError(
                    "A pipeline cuts batches, and a stateful layer keeps a state for each sample of a whole "
                    "batch: use stateful=False and keras.Input(shape=...), or train data parallel. "
                    f"Received: {type(inner).__name__} {inner.name!r} with stateful=True"
                )
    fixed = [
        graph.tensors[number].shape for number in graph.inputs if None not in graph.tensors[number].shape[:1]
    ]
    if fixed:
        raise HvpipeError(
            "A pipeline cuts batches, so the model's inputs should leave the batch size open: "
            f"keras.Input(shape=...), without batch_shape. Received: an input of shape {fixed[0]}"
        )


def check_time_distributed(graph: LayerGraph) -> None:
    """Raise HvpipeError if a TimeDistributed layer reads tensors whose number of time steps is open.

    Keras 3.15 runs it once per sample then, not once per time step.
    """
    for call in graph.calls:
        shapes = [graph.tensors[number].shape for number, _ in call.reads]
        is_open = any(shape[1:2] == (None,) for shape in shapes)
        if is_open and isinstance(call.operation, keras.layers.TimeDistributed):
            raise HvpipeError(
                "In a pipeline a TimeDistributed layer needs a fixed number of time steps: give it to "
                "keras.Input, or call the inner layer itself if it works on the last axes, as Dense does. "
                f"Received: {call.name} on a tensor of shape {shapes[0]}"
            )


def check_dense_inputs(model: Any) -> None:
    """Raise HvpipeError for inputs that may be missing, or sparse: micro-batches are slices of tensors."""
    for layer in model.layers:
        odd = next((what for what in ("optional", "sparse", "ragged") if getattr(layer, what, False)), None)
        if isinstance(layer, keras.layers.InputLayer) and odd is not None:
            raise HvpipeError(
                "A pipeline cuts batches, so each of the model's inputs should be a dense tensor. "
                f"Received: input {layer.name!r} with {odd}=True"
            )


def check_text_inputs(layout: Layout) -> None:
    """Raise HvpipeError if text would travel from the rank that has the data: messages are numbers."""
    graph = layout.stages.graph
    for stage, cut in enumerate(layout.stages.cuts):
        texts = [number for number in cut.inputs if graph.tensors[number].dtype == "string"]
        ranks = layout.ranks_of(stage)
        if texts and ranks != (layout.data_rank,):
            raise HvpipeError(
                "Layers that read text should be in the first stage, and that on one rank: turn text into "
                "numbers in the dataset, or choose other stages. Received: an input of text for stage "
                f"{stage} on ranks {', '.join(map(str, ranks))}"
            )


def check_real_wires(stages: Stages) -> None:
    """Raise HvpipeError for complex numbers between stages: they have no gradients to send back."""
    graph = stages.graph
    for wire in (wire for cut in stages.cuts for wire in cut.outputs):
        if stages.spec(wire).dtype.is_complex:
            raise HvpipeError(
                "Stages cannot send complex tensors to each other: put the layers that make them and the "
                "layers that read them into one custom layer, or choose other stages by a plan. "
                f"Received: {graph.tensors[wire.number].dtype} from "
                f"{graph.calls[graph.makers()[wire.number]].name}"
            )
