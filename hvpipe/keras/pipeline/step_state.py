"""Lets several stages that share a layer change its state in a step as if it were one layer.

Each stage has a copy of the layer's moving averages, and moves it by the batches that it sees:

    copy = momentum * copy + (1 - momentum) * statistics of the batch

In Keras one average sees all batches: of each micro-batch in turn, those of each call. Every move is linear,
so a stage can tell what its own moves add to that average after the moves that follow them. The sum over
stages is the average. Nothing waits for it, because a forward in training does not read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.batch_statistics import batch_normalizations
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages
from hvpipe.keras.pipeline.shared_variables import SharedVariables
from hvpipe.keras.variables import native
from hvpipe.session import Session


@dataclass(frozen=True)
class _Moves:
    """The moves of one layer in one stage: `count` for a micro-batch, after `before` of earlier stages."""

    layer: Any
    before: int
    count: int


class StepState:
    """Combines the state that several ranks hold at the end of each step, as one layer would have it.

    This is state that Keras's rules add up (`aggregation="sum"`), and the moving averages of
    BatchNormalization layers that several stages share.
    """

    def __init__(
        self,
        session: Session,
        stages: Stages,
        shared: SharedVariables,
        functions: Mapping[int, StageFunctions],
    ) -> None:
        """Exchange how often each stage moves an average; collective.

        Args:
            session: The session.
            stages: All stages of the model.
            shared: The variables that several ranks hold.
            functions: The functions of this rank's stages; their training graphs are made.
        """
        self._shared = shared
        layers = shared_normalizations(stages)
        self._moves: dict[int, list[_Moves]] = {}
        self._in_microbatch: dict[int, int] = {}
        mine = {
            (number, stage): of_stage.moves[id(layer)]
            for number, layer in enumerate(layers)
            for stage, of_stage in functions.items()
        }
        everyone = session.engine.allgather_object(mine, "statistics of shared layers") if layers else []
        counts = {key: count for of_rank in everyone for key, count in of_rank.items() if count}
        for (number, stage), count in sorted(counts.items()):
            layer = layers[number]
            before = self._in_microbatch.get(id(layer), 0)
            self._moves.setdefault(stage, []).append(_Moves(layer, before, count))
            self._in_microbatch[id(layer)] = before + count
        here = {id(la) for stage in functions for la in batch_normalizations(stages.layers(stage))}
        own = [layer for layer in layers if id(layer) in here and id(layer) in self._in_microbatch]
        self._averages = {id(v): (v, layer) for layer in own for v in _averages(layer)}
        self._starts: dict[int, Any] = {}
        self._added: dict[int, Any] = {}
        self._microbatches = 0

    def begin(self, microbatches: int) -> None:
        """Begin a step of `microbatches` micro-batches."""
        self._microbatches = microbatches
        variables = [*(v for v, _ in self._averages.values()), *self._shared.sums]
        # TensorFlow never changes a tensor, so this copies nothing.
        self._starts = {id(v): native(v).read_value() for v in variables}
        self._added = {}

    @contextlib.contextmanager
    def moved_by(self, stage: int, microbatch: int) -> Iterator[None]:
        """Take note of what a forward of a stage adds to averages."""
        moves = self._moves.get(stage, ())
        before = [native(v).read_value() for one in moves for v in _averages(one.layer)]
        yield
        for one in moves:
            total, momentum = self._in_microbatch[id(one.layer)], float(one.layer.momentum)
            later = (self._microbatches - microbatch) * total - one.before - one.count
            for variable in _averages(one.layer):
                kept = tf.cast(before.pop(0), tf.float64) * momentum**one.count
                part = (tf.cast(native(variable).read_value(), tf.float64) - kept) * momentum**later
                self._added[id(variable)] = self._added.get(id(variable), 0.0) + part

    def finish(self) -> None:
        """Give all copies the state of the one layer; collective among the ranks that hold it."""
        for variable, _ in self._averages.values():
            if id(variable) not in self._shared.holders:  # all its stages are on this rank
                variable.assign(tf.cast(self._part(variable, first=True), variable.dtype))
        self._shared.sum([v for v in self._shared.variables if id(v) in self._averages], self._part)
        self._shared.sum(self._shared.sums, self._change, start=self._starts)

    def _part(self, variable: Any, first: bool) -> Any:
        """Return what this rank adds to an average: its moves, and if it is the first, what was there."""
        part = self._added.get(id(variable), tf.zeros(variable.shape, tf.float64))
        if not first:
            return part
        _, layer = self._averages[id(variable)]
        moves = self._microbatches * self._in_microbatch[id(layer)]
        return part + tf.cast(self._starts[id(variable)], tf.float64) * float(layer.momentum) ** moves

    def _change(self, variable: Any, first: bool) -> Any:
        return tf.cast(native(variable).read_value() - self._starts[id(variable)], tf.float64)


def _averages(layer: Any) -> list[Any]:
    return [layer.moving_mean, layer.moving_variance]


def shared_normalizations(stages: Stages) -> list[Any]:
    """Return the BatchNormalization layers that are in several stages, in one order on all ranks.

    Raises:
        HvpipeError: One of them has statistics that follow another rule.
    """
    in_stages: dict[int, set[int]] = {}
    found: dict[int, Any] = {}
    for stage in range(len(stages.cuts)):
        for layer in batch_normalizations(stages.layers(stage)):
            in_stages.setdefault(id(layer), set()).add(stage)
            found[id(layer)] = layer
    shared = [layer for key, layer in found.items() if len(in_stages[key]) > 1]
    for layer in shared:
        if getattr(layer, "renorm", False) or not compat.moves_as_keras(layer):
            what = (
                "renorm=True" if getattr(layer, "renorm", False) else f"its own call ({type(layer).__name__})"
            )
            raise HvpipeError(
                "Stages can share a BatchNormalization whose moving averages they can move separately. "
                "Call the layer in one stage only, by a plan or by fewer stages, or make one for each call. "
                f"Received: {layer.name!r} with {what}, in stages "
                f"{', '.join(map(str, sorted(in_stages[id(layer)])))}"
            )
    return shared
