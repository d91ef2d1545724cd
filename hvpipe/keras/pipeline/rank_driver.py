"""What drives one rank of a pipeline: its stages' functions, metrics, and what the ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.masking import set_keras_mask

from hvpipe.errors import HvpipeError
from hvpipe.keras.graph.deferred_build import reads_foreign, variables_of
from hvpipe.keras.graph.stage import StageFunctions, Wire
from hvpipe.keras.pipeline.batch_targets import in_words, paths_of
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.pipeline.loss_entries import BatchEntries, masked_losses
from hvpipe.keras.pipeline.shared_variables import Sharing
from hvpipe.keras.pipeline.state_names import agree_on_trainable, together
from hvpipe.keras.pipeline.step import Batch, Outcome, PipelineStep
from hvpipe.keras.pipeline.update import PipelineUpdate
from hvpipe.session import Session


@dataclass(frozen=True)
class Reach:
    """Where gradients come to: not to the wires that stages take, by stage, of `unreached`.

    `trained` are the ids of those trainable variables to which one comes in any stage, on any rank.
    """

    unreached: frozenset[tuple[int, Wire]]
    trained: frozenset[int]


class Machine:
    """Runs steps of this rank's stages for targets of one structure; `owner` is compiled as the user wants.

    `structure` is (y, sample_weight) of a batch and `signature` what they look like flat (tf.TensorSpec);
    None and nothing before any (only `predict` then). `recomputes(stage)` says which run forwards again.
    """

    def __init__(
        self,
        owner: Any,
        session: Session,
        layout: Layout,
        sharing: Sharing,
        structure: Any,
        signature: Sequence[Any],
        *,
        recomputes: Callable[[int], bool],
    ) -> None:
        self._owner = owner
        self._session = session
        self._layout = layout
        self._sharing = sharing
        self._structure = structure
        self.signature = list(signature)
        self._rank = session.world.rank
        self._targets_in_words = in_words(structure, self.signature)
        self._has_y = structure is not None and structure[0] is not None
        with_loss = self._has_y and owner._compile_loss is not None
        self.functions = {
            stage: StageFunctions(
                layout.stages,
                stage,
                self.signature,
                self._loss if with_loss else None,
                recomputes(stage),
                owner._parts.samples,
            )
            for stage in layout.stages_of(self._rank)
        }
        self._entries = self._batch_entries() if with_loss else None
        self._mail = owner._parts.mail
        self._step = PipelineStep(
            layout.stages, self.functions, layout.ranks, self._mail, session.engine.recorded
        )
        self._update: PipelineUpdate | None = None
        self._trained = _Trained()
        session.sample_counters.append(self._trained)
        self._update_metrics = tf.function(self._metrics_in_graph, autograph=False, reduce_retracing=True)

    def common_signature(self, structure: Any, signature: Sequence[Any]) -> list[Any] | None:
        """One that holds for its own batches and for these, axes open that differ; None where none does."""
        if paths_of(structure) != paths_of(self._structure):
            return None
        pairs = list(zip(self.signature, signature, strict=True))
        if any(own.dtype != other.dtype or own.shape.rank != other.shape.rank for own, other in pairs):
            return None
        return [
            tf.TensorSpec(
                [m if m == n else None for m, n in zip(own.shape, other.shape, strict=True)], own.dtype
            )
            for own, other in pairs
        ]

    def train(self, batch: Batch, *, first: bool) -> Outcome:
        """One training step, weights updated; collective.

        `first`: of this model as it is compiled, on any machine. Raises then MismatchError where ranks that
        share a layer do not all train it, HvpipeError where no stage has a loss, or one reads weights of
        another's layers.
        """
        self._begin(batch)
        if first:
            agree_on_trainable(self._session, self._layout)
            together(self._session, f"making the graphs of {self._owner.name}", self._check_weights)
            self._check_loss()
        if self._update is None:
            reach = self._reach()
            self._update = PipelineUpdate(
                self._session,
                self._owner.optimizer,
                self._owner.trainable_variables,
                self.functions,
                self._sharing,
                reach.trained,
            )
        update = self._update
        course = self._layout.course(batch.samples, self._rank, True)
        update.begin(course.stages)
        outcome = self._step.train(course, batch, self._observe, update.stage_done, update.loss_scale)
        with self._session.engine.recorded("update", "weights of this rank"):
            update.apply()
        self._mail.finish()
        self._sharing.note_apart()
        self._trained.samples += outcome.samples
        return outcome

    def evaluate(self, batch: Batch) -> Outcome:
        """Forward and loss of a batch in inference mode; collective."""
        self._begin(batch)
        self._sharing.average_statistics()
        course = self._layout.course(batch.samples, self._rank, False)
        outcome = self._step.evaluate(course, batch, self._observe)
        self._mail.finish()
        return outcome

    def predict(self, batch: Batch) -> list[Any]:
        """The model's outputs for a batch, flat, on all ranks; collective."""
        step = f"prediction step of {self._layout.stages.graph.name} on a batch of {batch.samples}"
        self._session.engine.agree(step)
        self._sharing.average_statistics()
        course = self._layout.course(batch.samples, self._rank, False)
        outcome = self._step.predict(course, batch)
        self._mail.finish()
        mine = {i: [np.asarray(value) for value in values] for i, values in outcome.outputs.items()}
        everyone: dict[int, list[Any]] = {}
        for found in self._session.engine.allgather_object(mine):
            everyone |= found
        in_order = [everyone[i] for i in sorted(everyone)]
        return [np.concatenate(of_output) for of_output in zip(*in_order, strict=True)]

    def _begin(self, batch: Batch) -> None:
        """Of a step with targets: tell its parts what they need of all of the batch; collective.

        Raises HvpipeError for a loss without targets.
        """
        if self._owner._compile_loss is not None and not self._has_y:
            raise HvpipeError(
                f"{self._owner.name} is compiled with a loss, so it wants targets. "
                "Received: a batch without any"
            )
        if self._entries is not None:
            self._entries.tell(batch.inputs, batch.targets)

    def _check_weights(self) -> None:
        """Gradients are those of the weights of a stage's own layers; others would stay as they are."""
        for functions in self.functions.values():
            if functions.foreign:
                raise reads_foreign(functions.foreign[0].path)

    def _reach(self) -> Reach:
        """What gradients reach with targets of this structure, which is the same on all ranks; collective.

        Once for each structure, whatever the sizes of targets.
        """
        known = self._owner._parts.reach
        if self._targets_in_words not in known:
            known[self._targets_in_words] = self._agree_on_gradients()
        reach: Reach = known[self._targets_in_words]
        self._pass_over(reach.unreached)
        return reach

    def _agree_on_gradients(self) -> Reach:
        """What no gradient reaches, whichever stage it is in: Keras leaves such weights alone. Collective.

        From the last stages to the first: what passes a stage's inputs over passes over what they come from.
        """
        variables = variables_of(self._layout.stages.graph.all_layers())
        numbers = {id(v._value): number for number, v in enumerate(variables)}
        unreached: frozenset[tuple[int, Wire]] = frozenset()
        while True:
            mine = {(stage, wire) for stage, of in self.functions.items() for wire in of.unreached}
            trained = {numbers[id(v)] for of in self.functions.values() for v in of.training.variables}
            everyone = self._session.engine.allgather_object((mine, trained))
            found = frozenset().union(*(of_rank for of_rank, _ in everyone))
            if found == unreached:
                every = frozenset().union(*(of_rank for _, of_rank in everyone))
                reached = (v for number, v in enumerate(variables) if number in every)
                return Reach(unreached, frozenset(map(id, reached)))
            unreached = found
            self._pass_over(unreached)

    def _pass_over(self, unreached: Collection[tuple[int, Wire]]) -> None:
        for stage, functions in self.functions.items():
            functions.pass_over(self._layout.stages.without_users(stage, unreached))

    def _check_loss(self) -> None:
        mine = sum(stage.trains_by_a_loss for stage in self.functions.values())
        if not any(self._session.engine.agree("whether any stage has a loss", float(mine))):
            raise HvpipeError(
                f"Training {self._owner.name} takes a loss: pass one to compile(loss=...), or let a layer "
                "have one (add_loss, a regularizer). Received: loss=None, and no layer with a loss"
            )

    def _batch_entries(self) -> BatchEntries | None:
        graph, loss = self._layout.stages.graph, self._owner._compile_loss
        masked = masked_losses(loss, graph, self.signature, self._compare)
        if not masked:
            return None
        return BatchEntries(self._session, self._layout.feeder, graph, masked, self.signature, loss.entries)

    # On the rank with the last stage --------------------------------------------------------------------

    def _loss(self, outputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        return self._compare(self._owner._compile_loss, outputs, targets)

    def _compare(self, loss: Any, outputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        y, sample_weight = self._targets(targets)
        return loss(y, self._owner.pack_outputs(outputs), sample_weight)

    def _targets(self, values: Sequence[Any]) -> Any:
        """The flat targets in the batch's structure, with None where there was none."""
        rest = iter(values)
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(rest), self._structure, none_is_leaf=True
        )

    def _observe(self, targets: Sequence[Any], outputs: Sequence[Any], masks: Mapping[int, Any]) -> None:
        if self._owner._compile_metrics is not None:
            self._update_metrics(list(targets), list(outputs), list(masks), list(masks.values()))

    def _metrics_in_graph(
        self, targets: Sequence[Any], outputs: Sequence[Any], places: Sequence[int], masks: Sequence[Any]
    ) -> None:
        for place, mask in zip(places, masks, strict=True):
            set_keras_mask(outputs[place], mask)
        y, sample_weight = self._targets(targets)
        self._owner._compile_metrics.update_state(y, self._owner.pack_outputs(outputs), sample_weight)


@dataclass
class _Trained:
    """Samples whose loss this rank has computed, for the summary of the run."""

    samples: int = 0

    def total(self) -> float:
        return float(self.samples)
