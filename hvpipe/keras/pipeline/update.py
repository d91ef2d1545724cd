"""The update of one rank's weights: sum gradients over the ranks that share a weight, clip, apply."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.pipeline.optimizer_settings import clipping_optimizer
from hvpipe.keras.pipeline.shared_variables import SharedVariables, dtype_of_sum, widest_sum
from hvpipe.keras.pipeline.step_checks import StepChecks
from hvpipe.keras.pipeline.tensor_channel import PendingSum, TensorChannel
from hvpipe.keras.training_alone import note_averaged
from hvpipe.plan.buckets import cut_buckets, fitting_bytes
from hvpipe.session import Session


@dataclass
class _Bucket:
    """Gradients that a group of ranks sums in one buffer; `members` index `PipelineUpdate.variables`."""

    group: int
    members: list[int]
    pending: PendingSum | None = None


class PipelineUpdate:
    """Sums, clips and applies the gradients of one rank's stages.

    All ranks that hold a variable update it with the same summed gradient, so their copies stay equal.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        trainable: Sequence[Any],
        functions: Mapping[int, StageFunctions],
        shared: SharedVariables,
        with_gradient: Collection[int],
        checks: StepChecks,
        channel: TensorChannel,
        *,
        together: bool = False,
    ) -> None:
        """Build the optimizer, unless it is built, and cut shared gradients into buckets.

        Args:
            session: The session.
            optimizer: This rank's Keras optimizer.
            trainable: The variables that the optimizer is built with, in the order of the model. Variables
                without a gradient are among them, because use_ema averages these weights too.
            functions: The functions of this rank's stages, by stage.
            shared: The variables that several ranks hold.
            with_gradient: The ids of variables that get a gradient on any rank.
            checks: Says whether gradients must be finite.
            channel: Sums gradients over the ranks that share them.
            together: Whether no rank updates its weights before all ranks can. If a rank is lost within a
                step, then all others are still at the step before.
        """
        self._session = session
        self._checks = checks
        self._channel = channel
        self._together = together
        self._optimizer = optimizer
        self._functions = functions
        holders = self._holders = shared.holders
        keras_variables = {id(v.value): v for of_stage in functions.values() for v in of_stage.trainable}
        # For each variable, by the id of its tf.Variable: the accumulators of this rank's stages, by stage.
        accumulators: dict[int, dict[int, Any]] = {key: {} for key in keras_variables}
        for stage in sorted(functions):
            gradient = functions[stage].training
            for variable, accumulator in zip(gradient.variables, gradient.accumulators, strict=True):
                accumulators[id(variable)][stage] = accumulator
        # A shared variable takes part even if it has a gradient on other ranks only.
        keys = [
            key
            for key, v in keras_variables.items()
            if accumulators[key] or (id(v) in holders and id(v) in with_gradient)
        ]
        self.variables = [keras_variables[key] for key in keys]
        self._accumulators = [accumulators[key] for key in keys]
        self._stages_of = [
            {stage for stage, of_stage in functions.items() if any(v is u for u in of_stage.trainable)}
            for v in self.variables
        ]
        self._buckets = self._make_buckets(shared)
        self._done: set[int] = set()
        self._idle: set[int] = set()
        if not optimizer.built:
            optimizer.build(list(trainable))
        self._apply = self._make_apply()

    def _make_buckets(self, shared: SharedVariables) -> list[list[_Bucket]]:
        """Return the buckets of each group, in the order in which all ranks of the group sum them."""
        index_of = {id(variable): index for index, variable in enumerate(self.variables)}
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for variable in shared.variables:
            if id(variable) in index_of:
                by_ranks.setdefault(self._holders[id(variable)], []).append(index_of[id(variable)])
        return [self._cut(shared.groups[ranks], by_ranks[ranks]) for ranks in sorted(by_ranks)]

    def _cut(self, group: int, indices: Sequence[int]) -> list[_Bucket]:
        """Return the buckets of a group whose variables have these indices, in the order of the model."""
        # Counted as four bytes an element, even for float64. A bucket may mix dtypes; `_start` sums it in
        # the widest.
        sizes_bytes = [4 * int(np.prod(self.variables[index].shape)) for index in indices]
        limit_bytes = self._session.settings.bucket_bytes or fitting_bytes(
            sum(sizes_bytes), self._channel.by_nccl
        )
        buckets = cut_buckets(sizes_bytes, limit_bytes)
        return [_Bucket(group, [indices[member] for member in members]) for members in buckets]

    def begin(self, active: Collection[int]) -> None:
        """Begin a step. Stages of this rank that are not in `active` contribute gradients of 0.

        A stage is not active if the batch has fewer samples than the stage has replicas, and this one gets
        none.
        """
        self._done = set()
        self._idle = self._functions.keys() - set(active)
        for stage in sorted(self._idle):
            self.stage_done(stage)

    def stage_done(self, stage: int) -> None:
        """Start the sums of the buckets that are complete now, while other stages still run."""
        self._done.add(stage)
        for of_group in self._buckets:
            for bucket in of_group:
                needed = {s for index in bucket.members for s in self._stages_of[index]}
                if not needed <= self._done:
                    # Later buckets wait too, because all ranks of a group must sum in the same order.
                    break
                if bucket.pending is None:
                    self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        widest = widest_sum([self.variables[index] for index in bucket.members])
        gradients = [self._local_gradient(index) for index in bucket.members]
        what = f"gradients of {self.variables[bucket.members[0]].path}"
        bucket.pending = self._channel.start_sum(bucket.group, gradients, widest, what)

    def apply(self) -> None:
        """Update this rank's weights; all ranks together, because some updates depend on all gradients."""
        gradients: list[Any] = [None] * len(self.variables)
        for bucket in chain(*self._buckets):
            assert bucket.pending is not None  # every stage has ended
            for index, found in zip(bucket.members, bucket.pending.wait(), strict=True):
                gradients[index] = tf.cast(found, dtype_of_sum(self.variables[index]))
            bucket.pending = None  # free the memory until the next step
        for index, gradient in enumerate(gradients):
            if gradient is None:
                gradients[index] = self._local_gradient(index)
        norm = self._global_norm(gradients)
        finite = self._all_finite(gradients)
        if not finite and self._checks.looks_at_gradients:
            return
        if not self.variables:
            self._count_step(finite)
        else:
            self._apply(norm, tf.constant(1.0 if finite else np.nan), *gradients)

    def _local_gradient(self, index: int) -> Any:
        """Return a variable's gradient, summed over the stages of this rank that use it."""
        of_stages = self._accumulators[index].items()
        values = [accumulator.read_value() for stage, accumulator in of_stages if stage not in self._idle]
        return sum(values[1:], values[0]) if values else tf.zeros(self.variables[index].shape)

    @property
    def loss_scale(self) -> float:
        """The optimizer's factor for the loss (mixed precision in float16)."""
        if isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer):
            return float(self._optimizer.dynamic_scale)
        return float(self._optimizer.loss_scale_factor or 1.0)

    def _global_norm(self, gradients: Sequence[Any]) -> Any:
        """Return the norm over the gradients of all stages; a shared gradient counts once."""
        if not clipping_optimizer(self._optimizer).global_clipnorm:
            return tf.constant(1.0)
        rank = self._session.world.rank
        own = [
            g
            for g, v in zip(gradients, self.variables, strict=True)
            if self._holders.get(id(v), (rank,))[0] == rank
        ]
        mine = float(tf.add_n([tf.reduce_sum(tf.square(tf.cast(g, tf.float64))) for g in own])) if own else 0
        everyone = self._session.engine.agree("the global norm of the gradients", float(mine))
        return tf.constant(float(np.sqrt(sum(everyone))) / self.loss_scale)

    def _all_finite(self, gradients: Sequence[Any]) -> bool:
        """Return whether the gradients of all ranks are finite, or nobody asks; collective.

        If they are not, all ranks must skip the same steps.

        Raises:
            HvpipeError: They are not, and `nonfinite` is "raise".
        """
        looks = self._checks.looks_at_gradients
        bad: list[str] = []
        if looks or isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer):
            flags = [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
            finite = tf.stack(flags).numpy() if flags else []  # one copy from a GPU
            bad = [v.path for v, good in zip(self.variables, finite, strict=True) if not good]
        elif not self._together:
            return True
        if not any(self._session.engine.agree("the update of all ranks' weights", float(len(bad)))):
            return True
        if looks:
            self._checks.tell_nonfinite(bad)
        return False

    def _count_step(self, finite: bool) -> None:
        """Advance the optimizer on a rank that has no gradient, as on the other ranks.

        This advances the step counter, the loss scale and averages of weights.
        """
        optimizer, inner = self._optimizer, clipping_optimizer(self._optimizer)
        if finite:
            with _without_clipping(inner):
                compat.update_variables(inner, [], [])
            compat.step_count(inner).assign_add(1)
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return
        grows = finite and int(optimizer.step_counter) == optimizer.dynamic_growth_steps - 1
        optimizer.step_counter.assign(int(optimizer.step_counter) + 1 if finite and not grows else 0)
        if grows or not finite:
            optimizer.dynamic_scale.assign(optimizer.dynamic_scale * (2.0 if grows else 0.5))

    def _make_apply(self) -> Any:
        """Return a graph that clips by the global norm and applies gradients.

        With dynamic loss scaling it first multiplies the gradients by a factor: 1, or NaN to skip the step.
        """
        optimizer, clipping = self._optimizer, clipping_optimizer(self._optimizer)
        limit = clipping.global_clipnorm
        if limit and clipping.gradient_accumulation_steps:
            raise HvpipeError(
                "In a pipeline global_clipnorm does not work with gradient_accumulation_steps: take larger "
                f"batches of more micro-batches instead. Received: global_clipnorm={limit}, "
                f"gradient_accumulation_steps={clipping.gradient_accumulation_steps}"
            )

        note_averaged(self._session, self.variables)  # by micro-batches, and over the ranks that hold them

        def apply(norm: Any, factor: Any, *gradients: Any) -> None:
            found = list(gradients)
            if clipping is not optimizer:
                found = [g * tf.cast(factor, g.dtype) for g in found]
            if limit:
                scale = tf.convert_to_tensor(
                    optimizer.loss_scale_factor or 1.0 if clipping is optimizer else optimizer.dynamic_scale
                )
                found, _ = tf.clip_by_global_norm(found, limit * scale, use_norm=norm * scale)
            with _without_clipping(clipping):
                optimizer.apply(found, self.variables)

        return tf.function(apply, autograph=False)


@contextlib.contextmanager
def _without_clipping(optimizer: Any) -> Iterator[None]:
    """Keep an optimizer from clipping by this rank's norm: the norm over all ranks was used already."""
    limit, optimizer.global_clipnorm = optimizer.global_clipnorm, None
    try:
        yield
    finally:
        optimizer.global_clipnorm = limit
