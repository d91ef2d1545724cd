"""Gradients reduced in the ways that Horovod offers, by the named collectives.

The default way, an average over all ranks, has its own planned and overlapped path (data_parallel).
"""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import step_count, trained_variables
from hvpipe.keras.named import tensors as named
from hvpipe.keras.named.compression import EVERY_COMPRESSOR
from hvpipe.keras.named.ops import world_number
from hvpipe.keras.named.process_sets import number_of, ranks_of
from hvpipe.keras.ops import without_autograph
from hvpipe.keras.supported import described_type
from hvpipe.keras.training_alone import note_averaged, note_hooked
from hvpipe.keras.variables import identity, native
from hvpipe.session import current


@dataclass(frozen=True)
class GradientOptions:
    """How to reduce the gradients of a step.

    Attributes:
        how: The reduction.
        predivide: Divides gradients by this before their sum, and multiplies after it; for an average.
        groups: How many groups travel, or the variables of each group; None: one group.
        sparse_as_dense: Whether IndexedSlices become dense tensors first.
        scale_local: Whether gradients of local variables are divided by the number of ranks.
    """

    how: named.Reduction = field(default_factory=named.Reduction)
    predivide: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    sparse_as_dense: bool = False
    scale_local: bool = True

    def __post_init__(self) -> None:
        if not self.predivide > 0:
            raise ValueError(
                "gradient_predivide_factor should be above 0. "
                f"Received: gradient_predivide_factor={self.predivide}"
            )
        if self.predivide != 1.0 and self.how.op != "average":
            raise ValueError(
                "gradient_predivide_factor needs op=Average. "
                f"Received: gradient_predivide_factor={self.predivide}, op={self.how.op}"
            )
        if self.groups is not None and not isinstance(self.groups, list) and not _is_count(self.groups):
            raise ValueError(
                "groups should be a non-negative integer or a list of lists of variables. "
                f"Received: groups={self.groups!r}"
            )

    @property
    def plain(self) -> bool:
        """Whether this is an average over all ranks, which the planned buckets compute as well."""
        known = self.how.compression in EVERY_COMPRESSOR
        everyone = self.how.process_set is None or self.how.process_set.process_set_id == 0
        return self.how.op == "average" and everyone and known and self.predivide == 1.0


def _is_count(groups: Any) -> bool:
    return isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0


@without_autograph
def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    options: GradientOptions,
    local: Collection[int] = (),
    name: str | None = None,
) -> list[Any]:
    """Reduce gradients over ranks, eagerly or in a graph.

    Args:
        gradients: A tensor, IndexedSlices or None for each variable. All ranks pass None for the same ones.
        variables: The variables.
        options: How to reduce.
        local: Identities (hvpipe.keras.variables) of variables whose gradients stay on their rank.
        name: The name of the calls; None to take one from the graph.

    Returns:
        The gradients in their order; None stays None.
    """
    session = current()
    session.warn_without_checks("optimizers and tapes that reduce gradients by name")
    note_averaged(session, variables)
    by_hand = session.reduced_by_hand  # the collectives below are not the script's own
    number = number_of(options.how.process_set)
    ranks = ranks_of(number)
    reduced = list(gradients)
    if len(ranks) < 2 or current().world.rank not in ranks:
        return reduced
    shared = [p for p, g in enumerate(gradients) if g is not None and identity(variables[p]) not in local]
    how = options.how
    if options.predivide != 1.0:
        how = replace(how, prescale_factor=1 / options.predivide, postscale_factor=options.predivide)
    for index, group in enumerate(_groups(shared, variables, options.groups)):
        given = [gradients[place] for place in group]
        if options.sparse_as_dense:
            given = [tf.convert_to_tensor(gradient) for gradient in given]
        label = f"{name or 'gradients'}.{index}"
        for place, found in zip(group, named.grouped_allreduce(given, how, label), strict=True):
            reduced[place] = found
    session.reduced_by_hand = by_hand
    if options.scale_local and local:
        size = world_number("size", number)
        for place, gradient in enumerate(gradients):
            if gradient is not None and identity(variables[place]) in local:
                reduced[place] = _divided(gradient, size)
    return reduced


def _divided(gradient: Any, size: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def _groups(
    places: Sequence[int], variables: Sequence[Any], groups: int | Sequence[Sequence[Any]] | None
) -> list[list[int]]:
    """Split places into groups. Variables that no group names make a group each."""
    if not places:
        return []
    if groups is None or groups == 0:
        return [list(places)]
    if isinstance(groups, int):
        most = -(-len(places) // groups)
        return [list(places[start : start + most]) for start in range(0, len(places), most)]
    rest = {identity(variables[place]): place for place in places}
    made = [[rest.pop(identity(v)) for v in group if identity(v) in rest] for group in groups]
    return [group for group in made if group] + [[place] for place in rest.values()]


# --- An optimizer -----------------------------------------------------------------------------------------


_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()


def wrap_optimizer(
    optimizer: Any,
    options: GradientOptions,
    passes: int = 1,
    average_passes: bool = False,
    local_variables: Iterable[Any] = (),
) -> Any:
    """Make a Keras optimizer's `apply` reduce gradients first, on every `passes`-th call.

    Args:
        optimizer: A Keras optimizer; its `apply` is replaced on the instance.
        options: How to reduce.
        passes: Calls whose gradients are added up on this rank; between them nothing is updated.
        average_passes: Whether the sum of `passes` gradients is divided by their number.
        local_variables: Their gradients stay on this rank. `register_local_var` adds more.

    Returns:
        The same optimizer.

    Raises:
        HvpipeError: If `optimizer` is no Keras optimizer.
        ValueError: If `passes` is below 1, or the optimizer was wrapped before.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise HvpipeError(
            f"DistributedOptimizer needs a keras.optimizers.Optimizer. Received: {described_type(optimizer)}"
        )
    given: Any = passes
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
        raise ValueError(
            f"backward_passes_per_step should be 1 or more. Received: backward_passes_per_step={passes!r}"
        )
    if optimizer in _wrapped:
        raise ValueError(
            "DistributedOptimizer should be called once for an optimizer: a second one would reduce again. "
            f"Received: a {described_type(optimizer)} that it has returned"
        )
    _wrapped.add(optimizer)
    own_apply = optimizer.apply
    local = {identity(variable) for variable in local_variables}
    optimizer.register_local_var = lambda variable: local.add(identity(variable))
    sums: list[Any] = []
    calls: list[Any] = []

    def update(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        reduced = reduce_gradients(gradients, variables, options, local, "optimizer")
        note_hooked(current(), optimizer)
        with _after(reduced):
            own_apply(reduced, variables)

    @functools.wraps(own_apply)
    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        given = trained_variables(optimizer) if trainable_variables is None else trainable_variables
        variables = list(given)
        refuse_loss_scaling_outside(optimizer)
        if passes > 1 and optimizer.gradient_accumulation_steps:
            raise HvpipeError(
                "backward_passes_per_step and Keras's gradient_accumulation_steps do the same: give one. "
                f"Received: {passes} and {optimizer.gradient_accumulation_steps}"
            )
        if not optimizer.built:
            optimizer.build(variables)
        if passes == 1:
            return update(grads, variables)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        if not calls:
            with tf.init_scope():
                calls.append(tf.Variable(0, trainable=False, dtype=tf.int64))
                sums.extend(
                    None if g is None else tf.Variable(tf.zeros(v.shape, g.dtype), trainable=False)
                    for g, v in zip(dense, variables, strict=True)
                )
        # Schedules count every pass, as in Horovod.
        steps = native(step_count(getattr(optimizer, "inner_optimizer", optimizer)))
        return _accumulate(dense, variables, calls[0], steps, sums, passes, average_passes, update)

    optimizer.apply = apply
    return optimizer


def _after(gradients: Sequence[Any]) -> Any:
    """Return a scope of ops that run only once there are gradients.

    A train function that has reached the end of its data still runs the ops that need no data: counters, and
    the optimizer's weight decay.
    """
    return tf.control_dependencies([gradient for gradient in gradients if gradient is not None])


def refuse_loss_scaling_outside(optimizer: Any) -> None:
    """Raise if Keras would skip an update, and its reduction, on ranks whose own gradients overflow."""
    if keras.config.dtype_policy().name != "mixed_float16" or current().world.size == 1:
        return
    if not (isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor):
        raise HvpipeError(
            "With mixed_float16 the optimizer that scales the loss should be inside: "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). "
            f"Received: DistributedOptimizer of {type(optimizer).__name__}"
        )


def _accumulate(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    calls: Any,
    steps: Any,
    sums: Sequence[Any],
    passes: int,
    average: bool,
    update: Callable[[Sequence[Any], Sequence[Any]], None],
) -> None:
    with _after(gradients):
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(gradient)
        calls.assign_add(1)

    def flush() -> bool:
        factor = 1.0 / passes if average else 1.0
        update([None if total is None else total * tf.cast(factor, total.dtype) for total in sums], variables)
        for total in sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        return True

    def skip() -> bool:
        steps.assign_add(1)
        return False

    tf.cond(tf.equal(calls % passes, 0), flush, skip)


# --- A tape -----------------------------------------------------------------------------------------------


class ReducingTape:
    """A `tf.GradientTape` whose `gradient` reduces over ranks; everything else is the tape's own."""

    def __init__(
        self,
        tape: Any,
        options: GradientOptions,
        planned: Callable[[Sequence[Any], Sequence[Any]], list[Any]] | None = None,
    ) -> None:
        self._tape = tape
        self._options = options
        self._planned = planned  # reduces the default way, in a graph
        self._local: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> ReducingTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def register_local_source(self, source: Any) -> None:
        """Let the gradients of a variable stay on their rank."""
        self._local.add(identity(source))

    @without_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **others: Any,
    ) -> Any:
        """Return what `tf.GradientTape.gradient` returns, reduced over the ranks."""
        leaves = tf.nest.flatten(sources)
        watched = [leaf.value if hasattr(leaf, "overwrite_with_gradient") else leaf for leaf in leaves]
        found = tf.nest.flatten(self._tape.gradient(target, watched, output_gradients, **others))
        in_graph = not tf.executing_eagerly()
        trains = all(isinstance(leaf, tf.Variable) for leaf in watched)
        dense = not any(isinstance(gradient, tf.IndexedSlices) for gradient in found)
        plain = self._options.plain and not self._local and any(g is not None for g in found)
        if self._planned is not None and in_graph and trains and dense and plain:
            reduced = self._planned(found, leaves)
        else:
            label = "tape" if use_generic_names or not in_graph else None
            reduced = reduce_gradients(found, leaves, self._options, self._local, label)
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) of the local sources, and of all others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = [pair for pair in pairs if identity(pair[0]) in self._local]
        return local, [pair for pair in pairs if identity(pair[0]) not in self._local]
