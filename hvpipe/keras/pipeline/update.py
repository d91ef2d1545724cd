"""What a pipeline's rank does with complete gradients: sums them where weights are shared, clips, updates."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.pipeline.shared_variables import Sharing
from hvpipe.plan.buckets import fitting_bytes
from hvpipe.session import Session


@dataclass
class _Bucket:
    """Gradients that some ranks sum together."""

    group: int
    members: list[int]  # places in PipelineUpdate.variables
    request: Any = None
    buffer: Any = None


class PipelineUpdate:
    """Sums, clips and applies the gradients of one rank's stages; who shares a variable adds the same sum.

    `trainable` is what the optimizer is built with where it is not yet: the stages' variables in the order
    of the model, also those that no gradient reaches, as Keras counts on when it averages weights. `reached`
    are the ids of those variables to which a gradient comes on any rank.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        trainable: Sequence[Any],
        functions: Mapping[int, StageFunctions],
        sharing: Sharing,
        reached: Collection[int],
    ) -> None:
        self._session = session
        self._optimizer = optimizer
        self._functions = functions
        holders = self._holders = sharing.holders
        keras_variables = {id(v.value): v for of_stage in functions.values() for v in of_stage.trainable}
        # Of each variable, by the id of its tf.Variable: of all stages of this rank that use it, by stage.
        accumulators: dict[int, dict[int, Any]] = {key: {} for key in keras_variables}
        for stage in sorted(functions):
            halves = functions[stage].training
            for variable, accumulator in zip(halves.variables, halves.accumulators, strict=True):
                accumulators[id(variable)][stage] = accumulator
        # In the order in which the stages here use them; a shared one even where nothing reaches it here.
        keys = [
            key
            for key, v in keras_variables.items()
            if accumulators[key] or (id(v) in holders and id(v) in reached)
        ]
        self.variables = [keras_variables[key] for key in keys]
        self._accumulators = [accumulators[key] for key in keys]
        self._stages_of = [
            {stage for stage, of_stage in functions.items() if any(v is u for u in of_stage.trainable)}
            for v in self.variables
        ]
        self._buckets = self._make_buckets(sharing)
        self._done: set[int] = set()
        self._idle: set[int] = set()
        if not optimizer.built:
            optimizer.build(list(trainable))
        self._apply = self._make_apply()

    def _make_buckets(self, sharing: Sharing) -> list[list[_Bucket]]:
        """Those of each group, in the one order in which all of its ranks sum them."""
        places = {id(variable): place for place, variable in enumerate(self.variables)}
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for variable in sharing.variables:
            if id(variable) in places:
                by_ranks.setdefault(self._holders[id(variable)], []).append(places[id(variable)])
        return [self._cut(sharing.groups[ranks], by_ranks[ranks]) for ranks in sorted(by_ranks)]

    def _cut(self, group: int, places: Sequence[int]) -> list[_Bucket]:
        """The buckets of a group whose variables, in the order of the model, are at these places."""
        buckets: list[_Bucket] = []
        sizes_bytes = [4 * int(np.prod(self.variables[place].shape)) for place in places]
        limit_bytes = self._session.settings.bucket_bytes or fitting_bytes(sum(sizes_bytes))
        held_bytes = 0
        # The gradients of the last layers are there first.
        for place, size_bytes in reversed(list(zip(places, sizes_bytes, strict=True))):
            if not buckets or held_bytes + size_bytes > limit_bytes:
                buckets.append(_Bucket(group, []))
                held_bytes = 0
            buckets[-1].members.append(place)
            held_bytes += size_bytes
        return buckets

    def begin(self, active: Collection[int]) -> None:
        """A step begins: no gradient is complete but those of stages that are not active in it, which are 0.

        Of a batch with fewer samples than a stage has replicas, some get none.
        """
        self._done = set()
        self._idle = self._functions.keys() - set(active)
        for stage in sorted(self._idle):
            self.stage_done(stage)

    def stage_done(self, stage: int) -> None:
        """Start the sums of what is complete now, while other stages still run."""
        self._done.add(stage)
        for of_group in self._buckets:
            for bucket in of_group:
                needed = {s for place in bucket.members for s in self._stages_of[place]}
                if not needed <= self._done:
                    # The next ones wait too: all ranks of a group sum in one order.
                    break
                if bucket.request is None:
                    self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        dtype = np.result_type(*(_dtype_of_sum(self.variables[place]) for place in bucket.members))
        gradients = [np.asarray(self._gradient(place), dtype) for place in bucket.members]
        bucket.buffer = np.concatenate([g.reshape(-1) for g in gradients])
        bucket.request = self._session.engine.group_allreduce(
            bucket.group, bucket.buffer, f"gradients of {self.variables[bucket.members[0]].path}"
        )

    def apply(self) -> None:
        """Update this rank's weights; all ranks together, as some updates depend on all gradients."""
        gradients: list[Any] = [None] * len(self.variables)
        for bucket in chain(*self._buckets):
            bucket.request.wait()
            bucket.request = None
            start = 0
            for place in bucket.members:
                variable = self.variables[place]
                end = start + int(np.prod(variable.shape))
                found = bucket.buffer[start:end].reshape(variable.shape)
                gradients[place] = tf.convert_to_tensor(found, _dtype_of_sum(variable))
                start = end
            bucket.buffer = None  # not until the next step
        for place, gradient in enumerate(gradients):
            if gradient is None:
                gradients[place] = self._gradient(place)
        norm = self._global_norm(gradients)
        finite = self._all_finite(gradients)
        if not self.variables:
            self._count_step(finite)
        else:
            self._apply(norm, tf.constant(1.0 if finite else np.nan), *gradients)

    def _gradient(self, place: int) -> Any:
        """Of one variable, over all stages of this rank that use it."""
        of_stages = self._accumulators[place].items()
        values = [accumulator.read_value() for stage, accumulator in of_stages if stage not in self._idle]
        return sum(values[1:], values[0]) if values else tf.zeros(self.variables[place].shape)

    @property
    def loss_scale(self) -> float:
        """The factor that the optimizer wants the loss to have (mixed precision in float16)."""
        if isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer):
            return float(self._optimizer.dynamic_scale)
        return float(self._optimizer.loss_scale_factor or 1.0)

    def _global_norm(self, gradients: Sequence[Any]) -> Any:
        """Over the gradients of all stages; each shared one counts once."""
        if not _clipping(self._optimizer).global_clipnorm:
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
        """With dynamic loss scaling all ranks skip a step or none."""
        if not isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer):
            return True
        mine = all(bool(tf.reduce_all(tf.math.is_finite(g))) for g in gradients)
        return not any(self._session.engine.agree("whether all gradients are finite", 0.0 if mine else 1.0))

    def _count_step(self, finite: bool) -> None:
        """Without gradients here: what an optimizer has once, and averages of weights, move as elsewhere."""
        optimizer, inner = self._optimizer, _clipping(self._optimizer)
        if finite:
            with _clipped_already(inner):
                inner._backend_apply_gradients([], [])
            inner._iterations.assign_add(1)
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return
        grows = finite and int(optimizer.step_counter) == optimizer.dynamic_growth_steps - 1
        optimizer.step_counter.assign(int(optimizer.step_counter) + 1 if finite and not grows else 0)
        if grows or not finite:
            optimizer.dynamic_scale.assign(optimizer.dynamic_scale * (2.0 if grows else 0.5))

    def _make_apply(self) -> Any:
        optimizer, clipping = self._optimizer, _clipping(self._optimizer)
        limit = clipping.global_clipnorm
        if limit and clipping.gradient_accumulation_steps:
            raise HvpipeError(
                "global_clipnorm over all stages goes without gradient_accumulation_steps: take larger "
                f"batches of more micro-batches. Received: global_clipnorm={limit}, "
                f"gradient_accumulation_steps={clipping.gradient_accumulation_steps}"
            )

        def apply(norm: Any, factor: Any, *gradients: Any) -> None:
            found = list(gradients)
            if clipping is not optimizer:
                found = [g * tf.cast(factor, g.dtype) for g in found]
            if limit:
                scale = tf.convert_to_tensor(
                    optimizer.loss_scale_factor or 1.0 if clipping is optimizer else optimizer.dynamic_scale
                )
                found, _ = tf.clip_by_global_norm(found, limit * scale, use_norm=norm * scale)
            with _clipped_already(clipping):
                optimizer.apply(found, self.variables)

        return tf.function(apply, autograph=False)


def _dtype_of_sum(variable: Any) -> Any:
    return np.float64 if variable.dtype == "float64" else np.float32


def check_optimizers(session: Session, optimizer: Any) -> None:
    """See that all ranks update alike; collective. Raises MismatchError where settings differ."""
    everyone = session.engine.allgather_object(_settings(optimizer))
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        odd = sorted(name for name in first.keys() | theirs.keys() if first.get(name) != theirs.get(name))
        if odd:
            here, there = (f"{odd[0]}={of_rank.get(odd[0])}" for of_rank in (first, theirs))
            raise MismatchError(
                "A pipeline wants the same optimizer on all ranks, or its stages would train apart. "
                f"Received: {here} on rank 0 and {there} on rank {rank}"
            )


def _settings(optimizer: Any) -> dict[str, str]:
    """What it is made with, as far as it can tell; names, which Keras numbers in each process, left out."""
    found = {"optimizer": type(optimizer).__name__}
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):
        found |= {name: repr(_nameless(value)) for name, value in _nameless(optimizer.get_config()).items()}
    return found


def _nameless(value: Any) -> Any:
    """Plain values as they are; of others the class, as what they print may be an address."""
    if isinstance(value, dict):
        return {key: _nameless(of_key) for key, of_key in sorted(value.items()) if key != "name"}
    if isinstance(value, (list, tuple)):
        return [_nameless(one) for one in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def learning_rate_of(optimizer: Any) -> float:
    """What callbacks may have changed; 0 where it follows from the steps taken."""
    rate = getattr(_clipping(optimizer), "_learning_rate", None)
    return float(rate) if isinstance(rate, keras.Variable) else 0.0


@contextlib.contextmanager
def _clipped_already(optimizer: Any) -> Iterator[None]:
    """Over all stages, so the optimizer is not to clip by the norm of the gradients that are here."""
    limit, optimizer.global_clipnorm = optimizer.global_clipnorm, None
    try:
        yield
    finally:
        optimizer.global_clipnorm = limit


def _clipping(optimizer: Any) -> Any:
    """The optimizer that clips: the one inside, where losses are scaled dynamically."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if scaled else optimizer
