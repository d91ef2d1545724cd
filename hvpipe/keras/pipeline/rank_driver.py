"""What a rank of a pipeline keeps from step to step: graphs of its stages, metrics; step.py runs one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.deferred_build import foreign_weight_error
from hvpipe.keras.graph.layer_graph import functional_of
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.pipeline.batch_targets import describe_targets
from hvpipe.keras.pipeline.context import PipelineContext
from hvpipe.keras.pipeline.gradient_coverage import GradientCoverage, apply_coverage, find_coverage
from hvpipe.keras.pipeline.loss_entries import EntryCounter, masked_losses
from hvpipe.keras.pipeline.microbatches import Batch
from hvpipe.keras.pipeline.on_all_ranks import ending_all, on_all_ranks
from hvpipe.keras.pipeline.state_names import agree_on_trainable
from hvpipe.keras.pipeline.step import PipelineStep, StepResult
from hvpipe.keras.pipeline.step_state import StepState
from hvpipe.keras.pipeline.update import PipelineUpdate

Coverages = dict[str, GradientCoverage]
"""The gradient coverage, by the description of the targets. Their sizes make no difference."""


class RankDriver:
    """Runs the steps of this rank for targets of one structure."""

    def __init__(
        self,
        pipeline: Any,
        context: PipelineContext,
        structure: Any,
        signature: Sequence[Any],
        coverages: Coverages,
    ) -> None:
        """Make the functions of this rank's stages; collective.

        Args:
            pipeline: The Keras model that the user compiled.
            context: The objects that the parts of the pipeline share.
            structure: (y, sample_weight) of a batch; None before any batch, for `predict` only.
            signature: A tf.TensorSpec for each flat target.
            coverages: The gradient coverages found so far; all drivers of the pipeline share them.
        """
        self.structure = structure
        self.signature = list(signature)
        self._pipeline = pipeline
        self._context = context
        self._coverages = coverages
        self._targets_described = describe_targets(structure, self.signature)
        self._has_y = structure is not None and structure[0] is not None
        with_loss = self._has_y and compat.compiled_loss(pipeline) is not None
        layout = context.layout
        self.functions = {
            stage: StageFunctions(
                layout.stages,
                stage,
                self.signature,
                self._loss if with_loss else None,
                context.plan.pipelining.recomputes(stage),
                context.samples,
            )
            for stage in layout.stages_of(context.rank)
        }
        self._entries = self._entry_counter() if with_loss else None
        self._update: PipelineUpdate | None = None
        self._state: StepState | None = None
        self._trained = _TrainedSamples()
        context.session.sample_counters.append(self._trained)
        self._update_metrics = tf.function(self._metrics_in_graph, autograph=False, reduce_retracing=True)
        self._build_metrics()

    def train(self, batch: Batch, *, first: bool) -> StepResult:
        """Run one training step and update this rank's weights; collective.

        Args:
            batch: The batch.
            first: Whether this is the first step since `compile`, with any driver. Only then are trainable
                flags, weights of other stages and losses checked.

        Returns:
            Loss and samples of this rank.

        Raises:
            MismatchError: A layer is trainable on only some of the ranks that share it.
            HvpipeError: No stage has a loss, or a stage reads weights of another stage's layers.
        """
        context, engine = self._context, self._context.session.engine
        self._begin(batch)
        if first:
            agree_on_trainable(context.session, context.layout)
            what = f"making the graphs of {self._pipeline.name}"
            on_all_ranks(context.session, what, self._check_weights)
            self._check_loss()
        if self._update is None:
            self._update = PipelineUpdate(
                context.session,
                self._pipeline.optimizer,
                self._pipeline.trainable_variables,
                self.functions,
                context.shared,
                self._coverage().variables,
                context.checks,
                context.channel,
                together=context.undo is not None,
            )
        if self._state is None:
            self._state = StepState(context.session, context.layout.stages, context.shared, self.functions)
        update, state = self._update, self._state
        program = context.layout.program(batch.samples, context.rank, True)
        if context.undo is not None:
            context.undo.begin()
        with ending_all(context.session):
            update.begin(program.stages)
            state.begin(program.microbatches)
            result = PipelineStep(
                *(context, self.functions, program, batch, "train", self._observe),
                stage_done=update.stage_done,
                loss_scale=update.loss_scale,
                moved_by=state.moved_by,
            ).run()
            state.finish()
        with engine.recorded("update", "weights of this rank"), ending_all(context.session, but=HvpipeError):
            update.apply()
        if context.undo is not None:
            context.undo.updated()
        context.channel.finish()
        context.shared.mark_diverged()
        self._trained.samples += result.samples
        return result

    def evaluate(self, batch: Batch) -> StepResult:
        """Run forward and loss of a batch in inference mode; collective."""
        context = self._context
        self._begin(batch)
        context.shared.combine_state()
        program = context.layout.program(batch.samples, context.rank, False)
        with ending_all(context.session):
            step = PipelineStep(context, self.functions, program, batch, "evaluate", self._observe)
            result = step.run()
        context.channel.finish()
        return result

    def predict(self, batch: Batch) -> list[Any]:
        """Return the model's flat outputs for a batch, on all ranks; collective."""
        context, engine = self._context, self._context.session.engine
        engine.agree(f"prediction step of {context.layout.stages.graph.name} on a batch of {batch.samples}")
        context.shared.combine_state()
        program = context.layout.program(batch.samples, context.rank, False)
        with ending_all(context.session):
            result = PipelineStep(context, self.functions, program, batch, "predict").run()
        context.channel.finish()
        mine = {i: [np.asarray(value) for value in values] for i, values in result.outputs.items()}
        everyone: dict[int, list[Any]] = {}
        for found in engine.allgather_object(mine, "results of predict"):
            everyone |= found
        in_order = [everyone[i] for i in sorted(everyone)]
        return [np.concatenate(of_output) for of_output in zip(*in_order, strict=True)]

    def _begin(self, batch: Batch) -> None:
        """Check that a loss has targets, and tell masked losses the batch's entries; collective."""
        if compat.compiled_loss(self._pipeline) is not None and not self._has_y:
            raise HvpipeError(
                f"{self._pipeline.name} is compiled with a loss, so it needs targets. "
                "Received: a batch without any"
            )
        if self._entries is not None:
            self._entries.count(batch.inputs, batch.targets)

    def _check_weights(self) -> None:
        """Raise HvpipeError if a stage reads weights of another stage's layers: they would not be trained."""
        for functions in self.functions.values():
            if functions.foreign_weights:
                raise foreign_weight_error(functions.foreign_weights[0].path)

    def _check_loss(self) -> None:
        mine = sum(stage.trains_by_a_loss for stage in self.functions.values())
        engine = self._context.session.engine
        if not any(engine.agree("whether any stage has a loss", float(mine))):
            raise HvpipeError(
                f"Training {self._pipeline.name} needs a loss: pass one to compile(loss=...), or add one in "
                "a layer (add_loss, a regularizer). Received: loss=None, and no layer with a loss"
            )

    def _coverage(self) -> GradientCoverage:
        """Return the gradient coverage; collective for the first driver with targets of this structure."""
        stages = self._context.layout.stages
        known = self._coverages.get(self._targets_described)
        if known is None:
            known = find_coverage(self._context.session, stages, self.functions)
            self._coverages[self._targets_described] = known
        apply_coverage(stages, self.functions, known.unreached)
        return known

    def _entry_counter(self) -> EntryCounter | None:
        layout, loss = self._context.layout, compat.compiled_loss(self._pipeline)
        graph = layout.stages.graph
        masked = masked_losses(loss, graph, self.signature, self._compare)
        if not masked:
            return None
        session = self._context.session
        return EntryCounter(session, layout.data_rank, graph, masked, self.signature, loss.entries)

    # On the rank with the last stage --------------------------------------------------------------------

    def _loss(self, outputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        return self._compare(compat.compiled_loss(self._pipeline), outputs, targets)

    def _compare(self, loss: Any, outputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        y, sample_weight = self._pack_targets(targets)
        return loss(y, self._pipeline.pack_outputs(outputs), sample_weight)

    def _pack_targets(self, values: Sequence[Any]) -> Any:
        """Return flat targets in the batch's structure, with None where it has None."""
        rest = iter(values)
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(rest), self.structure, none_is_leaf=True
        )

    def _observe(self, targets: Sequence[Any], outputs: Sequence[Any], masks: Mapping[int, Any]) -> None:
        if compat.compiled_metrics(self._pipeline) is not None:
            self._update_metrics(list(targets), list(outputs), list(masks), list(masks.values()))

    def _build_metrics(self) -> None:
        """Make the metrics on every rank: callbacks ask them whether more is better."""
        metrics = compat.compiled_metrics(self._pipeline)
        if metrics is None or metrics.built or not self._has_y:
            return
        targets = [keras.KerasTensor(spec.shape, spec.dtype.name) for spec in self.signature]
        y, _ = self._pack_targets(targets)
        metrics.build(y, compat.outputs_structure(functional_of(self._context.model)))

    def _metrics_in_graph(
        self, targets: Sequence[Any], outputs: Sequence[Any], masked: Sequence[int], masks: Sequence[Any]
    ) -> None:
        for index, mask in zip(masked, masks, strict=True):
            compat.set_keras_mask(outputs[index], mask)
        y, sample_weight = self._pack_targets(targets)
        metrics = compat.compiled_metrics(self._pipeline)
        metrics.update_state(y, self._pipeline.pack_outputs(outputs), sample_weight)


@dataclass
class _TrainedSamples:
    """Counts the samples for which this rank has computed the loss, for the run's summary."""

    samples: int = 0

    def total(self) -> float:
        return float(self.samples)
