"""What an optimizer does with reduced gradients: all at once, or bucket by bucket where that is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras.data_parallel.bucket_reducer import identity

# An optimizer that overrides one of these may do something once per step, not once per variable (Nadam
# multiplies a running product, LossScaleOptimizer looks at all gradients).
_ONCE_PER_STEP = (
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
    "_overwrite_variables_directly_with_gradients",
    "apply",
)


def acts_by_variable(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether updating some variables now and the others later gives the same bits as all at once."""
    kind, base = type(optimizer), keras.optimizers.Optimizer
    overridden = any(getattr(kind, name, None) is not getattr(base, name, None) for name in _ONCE_PER_STEP)
    needs_all = optimizer.global_clipnorm or optimizer.use_ema or optimizer.gradient_accumulation_steps
    overwritten = any(getattr(v, "overwrite_with_gradient", False) for v in variables)
    return not (overridden or needs_all or overwritten)


def apply_all(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """The optimizer's own `apply`, whatever replaced it on the instance."""
    lacking = _lacking(optimizer, variables)
    grads, trained = [*gradients, *[None] * len(lacking)], [*variables, *lacking]
    _as_written(lambda: type(optimizer).apply(optimizer, grads, trained))


def _lacking(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Of a MultiOptimizer's variables those without a gradient: it wants to be given all."""
    several = getattr(keras.optimizers, "MultiOptimizer", ())  # came with a later Keras
    if not isinstance(getattr(optimizer, "inner_optimizer", optimizer), several):
        return []
    given = {identity(v) for v in variables}
    return [v for v in optimizer._trainable_variables if identity(v) not in given]


def apply_some(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """The part of `apply` that concerns these variables: unscale, clip, decay, update, constrain.

    Only for an optimizer that `acts_by_variable`; `count_step` follows once per step.
    """

    def update() -> None:
        scale = optimizer.loss_scale_factor
        with keras.name_scope(optimizer.name, caller=optimizer):
            unscaled = list(gradients) if scale is None else [gradient / scale for gradient in gradients]
            optimizer._backend_apply_gradients(unscaled, list(variables))
            for variable in variables:
                if getattr(variable, "constraint", None) is not None:
                    variable.assign(variable.constraint(variable))

    _as_written(update)


def count_step(optimizer: Any) -> None:
    """The last thing that `apply` does."""
    optimizer._iterations.assign_add(1)


def _as_written(update: Callable[[], None]) -> None:
    """Run an update so that TensorFlow rounds it alike wherever in a graph it stands.

    TensorFlow's graph optimizer reorders products and sums with constants, in one way at the top of a graph
    and in another inside a `tf.cond`, so that the last bit would depend on the overlap. It leaves the inside
    of a function alone that is called, not inlined, with the optimizer switched off.
    """
    if tf.executing_eagerly():
        update()
        return
    function = tf.function(update, autograph=False, experimental_attributes={"_noinline": True})
    with _graph_optimizer_off():
        function()


@contextlib.contextmanager
def _graph_optimizer_off() -> Iterator[None]:
    """The functions that are called here in a graph are never optimized; nothing else is concerned."""
    switch = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(switch, False)
    tf.config.optimizer.set_experimental_options({switch: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({switch: before})
