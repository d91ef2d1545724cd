"""Everything in Keras that is not public: only this file imports `keras.src` or touches private attributes.

Each entry says what it reads, and what in hvpipe needs it and breaks if Keras drops it. All of them are in
each Keras from `supported.OLDEST` to `supported.NEWEST`. `missing_members` finds what another Keras lacks.

Subclasses of Keras classes override private members that a function cannot wrap:
  - `Model._symbolic_build`, `Model._maybe_symbolic_build` in pipeline/model.py: its models are built already;
  - `Model._assert_compile_called` there: the error says that `build_model` has compiled the model;
  - `BatchNormalization._moments` in collectives/sync_batch_norm.py: its statistics are those of all ranks;
  - `CompileLoss._flat_losses`, `CompileLoss._metrics` in pipeline/microbatch_loss.py and loss_entries.py,
    which put their own losses there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.models import cloning
from keras.src.models.functional import Functional
from keras.src.ops.symbolic_arguments import SymbolicArguments
from keras.src.random import seed_generator
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving.serialization_lib import SerializableDict
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.naming import to_snake_case
from keras.src.wrappers import sklearn_wrapper

# What the names from `keras.src` are, and what needs them:
#   compute_output_spec  runs a function on symbols; the first step would be traced twice (initial_state.py)
#   get_keras_mask, set_keras_mask  the mask on a tensor; masked layers and losses in pipelines
#   Functional           the class of functional models; cutting a model into stages
#   SymbolicArguments    the arguments of a call to insert into a graph; nested models in pipelines
#   global_seed_generator  the generator of `keras.random` without a seed; resuming
#   SerializableDict     the compile configuration in a saved file; saving a pipeline as a plain model
#   CompileLoss, CompileMetrics  what `compile` makes; losses of micro-batches, metrics of pipelines
#   cloning, sklearn_wrapper  the modules that hold `clone_model`; clones keep hooks (copies.py)
#   to_snake_case        Keras' default names; names of layers that are equal on all ranks
__all__ = ["CompileLoss", "Functional", "SerializableDict", "SymbolicArguments"]
__all__ += ["compute_output_spec", "get_keras_mask", "global_seed_generator", "set_keras_mask"]
__all__ += ["SWAPPED", "to_snake_case"]

SWAPPED = "_ema_weights_in_model"  # what SwapEMAWeights remembers; resuming
_CACHED = "_use_cached_eval_dataset"  # `Trainer.fit` passes it to `evaluate`; validation data after a loss
# Where Keras keeps the generator of `keras.random`; resuming. Keras 3.12 has no name for it.
_GLOBAL_SEEDS = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")

# The members of Keras' classes that hvpipe reads, calls or overrides. A test compares them with this file.
_MEMBERS: dict[Any, tuple[str, ...]] = {
    keras.Layer: (
        *("_assert_input_compatibility", "_flatten_layers", "_losses", "_non_trainable_variables"),
        *("_seed_generators", "_trainable_variables", "_call_context_args"),
    ),
    keras.layers.BatchNormalization: ("_moments",),
    keras.Model: (
        *("_assert_compile_called", "_compile_config", "_compile_loss", "_compile_metrics", "_compute_loss"),
        *("_flatten_metrics_in_order", "_get_metrics_result_or_logs", "_initial_epoch"),
        *("_maybe_symbolic_build", "_symbolic_build", _CACHED),
    ),
    keras.Sequential: ("_functional",),
    Functional: ("_inputs_struct", "_nodes_by_depth", "_outputs_struct", "_standardize_inputs"),
    CompileLoss: ("_flat_losses", "_metrics", "_user_loss", "_user_loss_weights"),
    CompileMetrics: (
        *("_flat_metrics", "_flat_weighted_metrics", "_user_metrics", "_user_weighted_metrics"),
    ),
    EpochIterator: ("_enumerate_iterator",),
    TFEpochIterator: ("_distributed_dataset",),
    keras.callbacks.CallbackList: ("_configure_async_dispatch",),
    keras.callbacks.SwapEMAWeights: ("_swap_variables", SWAPPED),
    keras.Variable: (
        "_convert_to_tensor",
        "_deferred_initialize",
        "_initialize",
        "_initializer",
        "_path",
        "_value",
    ),
    keras.optimizers.Optimizer: (
        *("_accumulated_gradients", "_apply_weight_decay", "_backend_apply_gradients"),
        *("_backend_update_step", "_check_variables_are_known", "_clip_gradients", "_filter_empty_gradients"),
        *("_get_variable_index", "_iterations", "_learning_rate", "_trainable_variables", "_variables"),
        *("_overwrite_variables_directly_with_gradients", "apply"),
    ),
}


def missing_members() -> list[str]:
    """Return the members of Keras' classes that hvpipe needs and this Keras lacks.

    An attribute that only instances have counts as present if a method of the class mentions it.
    """
    return [
        f"{kind.__name__}.{name}"
        for kind, names in _MEMBERS.items()
        for name in names
        if not hasattr(kind, name) and not any(name in mentioned for mentioned in _names_in_methods(kind))
    ]


def _names_in_methods(kind: type) -> Iterator[tuple[Any, ...]]:
    for base in kind.__mro__:
        for member in vars(base).values():
            method = getattr(member, "fget", None) or getattr(member, "__func__", member)
            code = getattr(inspect.unwrap(method), "__code__", None)
            if isinstance(code, CodeType):
                yield (*code.co_names, *code.co_consts)


def has_global_seed_generator() -> bool:
    """Return whether Keras's generator for `keras.random` without a seed is in use. Resuming."""
    return global_state.get_global_attribute(_GLOBAL_SEEDS) is not None


def swap_averages(callback: Any) -> None:
    """Exchange weights and averages as SwapEMAWeights does (`_swap_variables`). Resuming."""
    callback._swap_variables()


# --- Layers and models ---------------------------------------------------------------------------------


def layers_in(layer: Any, *, include_self: bool = True) -> list[Any]:
    """Return a layer and all layers inside it (`Layer._flatten_layers`). Nearly everything needs it."""
    return list(layer._flatten_layers(include_self=include_self))


def own_moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """Return Keras' mean and variance of a batch (`BatchNormalization._moments`). SyncBatchNormalization."""
    mean, variance = keras.layers.BatchNormalization._moments(layer, inputs, mask)
    return mean, variance


def replace_moments(layer: Any, stand_in: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Let a BatchNormalization layer call `stand_in(inputs, mask)` (`BatchNormalization._moments`).

    `data_parallel(sync_batch_norm=True)` needs it.
    """
    layer._moments = stand_in


def restore_moments(layer: Any) -> None:
    """Undo `replace_moments`."""
    vars(layer).pop("_moments", None)


@contextlib.contextmanager
def moments_counted(layer: Any, count: Callable[[], None]) -> Iterator[None]:
    """Call `count` whenever a BatchNormalization layer moves its averages (`BatchNormalization._moments`).

    Pipelines whose stages share the layer need it.
    """
    before = vars(layer).get("_moments")
    moments = layer._moments

    def counting(*args: Any, **kwargs: Any) -> Any:
        count()
        return moments(*args, **kwargs)

    layer._moments = counting
    try:
        yield
    finally:
        restore_moments(layer)
        if before is not None:
            layer._moments = before


def moves_as_keras(layer: Any) -> bool:
    """Return whether a BatchNormalization layer moves its averages as Keras's own `call` does."""
    return type(layer).call is keras.layers.BatchNormalization.call


def has_keras_moments(layer: Any) -> bool:
    """Return whether a BatchNormalization layer uses Keras' own `_moments`. Building models."""
    own = "_moments" in vars(layer)
    return not own and type(layer)._moments is keras.layers.BatchNormalization._moments


def own_trainable_variables(layer: Any) -> list[Any]:
    """Return the variables a layer itself made to be trained, frozen or not (`Layer._trainable_variables`).

    Saved pipelines need it.
    """
    return list(layer._trainable_variables)


def own_statistics(layer: Any) -> list[Any]:
    """Return the variables a layer itself made not to be trained (`Layer._non_trainable_variables`).

    Without it, BatchNormalization's statistics would not be averaged over ranks.
    """
    return list(layer._non_trainable_variables)


def seed_generators(layer: Any) -> list[Any]:
    """Return a layer's own seed generators (`Layer._seed_generators`). For replicated stages."""
    return list(layer._seed_generators)


def own_added_losses(layer: Any) -> list[Any]:
    """Return the losses that a layer's `add_loss` has added (`Layer._losses`). Pipelines need it."""
    return list(layer._losses)


def takes_training(operation: Any) -> bool:
    """Return whether `call` gets `training` (`Layer._call_context_args`, which other operations lack).

    Without it, pipeline stages would run layers in the wrong mode.
    """
    return "training" in getattr(operation, "_call_context_args", ())


def build_from_batch(model: Any, batch: Any) -> None:
    """Build a model for a batch (`Model._symbolic_build`). Models without an input shape need it."""
    model._symbolic_build(data_batch=batch)


def replace_clone_model(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `around(clone_model)` in the place of `keras.models.clone_model` (`cloning`, `sklearn_wrapper`).

    Without it, clones that scikit-learn's wrappers make would lose data_parallel's hooks.
    """
    own: Callable[..., Any] = keras.models.clone_model
    for module in (keras.models, cloning, sklearn_wrapper):
        if getattr(module, "clone_model", None) is own:
            vars(module)["clone_model"] = around(own)


def check_compiled(model: Any, method: str) -> None:
    """Raise Keras' error unless the model is compiled (`Trainer._assert_compile_called`). `data_parallel`."""
    model._assert_compile_called(method)


def metrics_in_order(model: Any, logs: Any) -> Any:
    """Return logs as Keras' list (`Trainer._flatten_metrics_in_order`). `evaluate` and others."""
    return model._flatten_metrics_in_order(logs)


def without_cached_data(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with which `evaluate` reads its `x`, not the data that `fit` keeps for validation."""
    return {**arguments, **({_CACHED: False} if _CACHED in arguments else {})}


def initial_epoch(model: Any) -> int:
    """Return the epoch that BackupAndRestore resumes from, else 0 (`Trainer._initial_epoch`). Resuming."""
    return int(model._initial_epoch or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Start the next loop at `epoch`; 0: at `fit`'s `initial_epoch` (`Trainer._initial_epoch`). Resuming."""
    model._initial_epoch = epoch or None


def reconfigure_callbacks(callbacks: Any, listed: Sequence[Any]) -> None:
    """Tell a CallbackList about callbacks added later (`CallbackList._configure_async_dispatch`)."""
    callbacks._configure_async_dispatch(listed)


@contextlib.contextmanager
def with_epochs(model: Any, change: Callable[[Any], None]) -> Iterator[None]:
    """Let the `fit` in this block call `change(epochs)` with its EpochIterator before the first epoch.

    `fit` passes its iterator to `Trainer._maybe_symbolic_build` first.
    """
    own = model._maybe_symbolic_build

    def build(*args: Any, **kwargs: Any) -> Any:
        vars(model).pop("_maybe_symbolic_build", None)
        built = own(*args, **kwargs)
        change(kwargs["iterator"])
        return built

    vars(model)["_maybe_symbolic_build"] = build
    try:
        yield
    finally:
        vars(model).pop("_maybe_symbolic_build", None)


def enumerate_epochs(epochs: Any, epoch: Callable[..., Any]) -> None:
    """Let an EpochIterator enumerate the batches of an epoch by `epoch(begin, end)`.

    Only so can an epoch get longer while it runs (`EpochIterator._enumerate_iterator`).
    """
    adapter = epochs.data_adapter
    vars(epochs)["_enumerate_iterator"] = lambda: epoch(adapter.on_epoch_begin, adapter.on_epoch_end)


def length_of_epoch(epochs: Any) -> int | None:
    """Return the batches of an EpochIterator's data; None if unknown, or if steps_per_epoch counts."""
    return None if epochs.steps_per_epoch else epochs.data_adapter.num_batches


def cut_epochs(epochs: Any, batches: int) -> None:
    """Let epochs end after `batches` batches (`TFEpochIterator._distributed_dataset`). Shorter ranks."""
    epochs.data_adapter = _Shorter(epochs.data_adapter, batches)
    epochs._distributed_dataset = epochs._distributed_dataset.take(batches)


class _Shorter:
    """Keras' adapter of some data, with fewer batches."""

    def __init__(self, adapter: Any, num_batches: int) -> None:
        self.adapter = adapter
        self.num_batches = num_batches

    def on_epoch_end(self) -> None:
        """Forget the batches that workers have made for this epoch: they would be the next one's first."""
        self.adapter.on_epoch_end()
        left = getattr(getattr(self.adapter, "enqueuer", None), "ready_queue", None)
        while left is not None and not left.empty():
            left.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)


def dataset_of(iterator: Any) -> Any:
    """Return the dataset of a tf.data.Iterator (`OwnedIterator._dataset`, of TensorFlow), else None.

    Resuming needs it: Keras makes the dataset of arrays itself.
    """
    return getattr(iterator, "_dataset", None)


def step_functions(train_function: Any) -> tuple[Any, Any] | None:
    """Return the tf.functions inside a train function: a step on an iterator, and a step on a batch.

    TensorFlowTrainer._make_function closes over them as `multi_step_on_iterator` and `one_step_on_data`, the
    latter in a wrapper that replaces Optionals by None. Returns None if they are not there: under
    `run_eagerly`, or in a `make_train_function` of the user's own. Without them data_parallel cannot trace a
    step before it runs, so `overlap="step"` ends with an error where it now falls back to "backward".
    """
    variables = inspect.getclosurevars(train_function).nonlocals if inspect.isfunction(train_function) else {}
    on_iterator = variables.get("multi_step_on_iterator")
    on_batch = getattr(variables.get("one_step_on_data"), "__wrapped__", None)
    if hasattr(on_iterator, "get_concrete_function") and hasattr(on_batch, "get_concrete_function"):
        return on_iterator, on_batch
    return None


# --- Compiled losses and metrics -----------------------------------------------------------------------


def compiled_loss(model: Any) -> Any:
    """Return the model's CompileLoss or None (`Trainer._compile_loss`). Losses of micro-batches."""
    return model._compile_loss


def compiled_metrics(model: Any) -> Any:
    """Return the model's CompileMetrics or None (`Trainer._compile_metrics`). Metrics of pipelines."""
    return model._compile_metrics


def metrics_by_log(model: Any) -> dict[str, Any]:
    """Return compiled metrics by their names in logs (`CompileMetrics._flat_metrics`). Means over ranks."""
    compiled = compiled_metrics(model)
    if compiled is None or not compiled.built:
        return {}
    found: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for weighted, lists in enumerate((compiled._flat_metrics, compiled._flat_weighted_metrics)):
        for listed in filter(None, lists):
            output = f"{listed.output_name}_" if listed.output_name else ""
            for metric in listed.metrics:
                name = output + metric.name
                if weighted and seen[name]:
                    name = f"{output}weighted_{metric.name}"
                seen[name] += 1
                found[name if seen[name] == 1 else f"{name}_{seen[name] - 1}"] = metric
    return found


def is_own_validation(arguments: Mapping[str, Any]) -> bool:
    """Tell whether `fit` calls `evaluate` with these arguments, at the end of an epoch. Logs of the epoch."""
    return _CACHED in arguments


def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `Trainer._compute_loss`, which passes `training` to `compute_loss` if it accepts it."""
    return model._compute_loss(*args, **kwargs)


def user_losses(loss: Any) -> Any:
    """Return the losses as given to `compile` (`CompileLoss._user_loss`). Losses of micro-batches."""
    return loss._user_loss


def user_loss_weights(loss: Any) -> Any:
    """Return the loss weights given to `compile` (`CompileLoss._user_loss_weights`). Micro-batches."""
    return loss._user_loss_weights


def user_metrics(metrics: Any) -> list[Any]:
    """Return the metrics as given to `compile` (`CompileMetrics._user_metrics`, `_user_weighted_metrics`)."""
    return list(keras.tree.flatten([metrics._user_metrics, metrics._user_weighted_metrics]))


def compile_config(model: Any) -> dict[str, Any]:
    """Return the arguments of `compile` (`Trainer._compile_config`). Saving a pipeline as a plain model."""
    config: dict[str, Any] = model._compile_config.config
    return config


# --- Functional models ---------------------------------------------------------------------------------


def functional_inside(sequential: Any) -> Any:
    """Return the functional model that a Sequential builds (`Sequential._functional`). For cutting models."""
    return sequential._functional


def nodes_by_depth(functional: Any) -> dict[int, list[Any]]:
    """Return the calls in a functional model by depth (`Function._nodes_by_depth`). For cutting models."""
    nodes: dict[int, list[Any]] = functional._nodes_by_depth
    return nodes


def inputs_structure(functional: Any) -> Any:
    """Return the nested structure of inputs (`Function._inputs_struct`). `hvpipe profile` needs it."""
    return functional._inputs_struct


def outputs_structure(functional: Any) -> Any:
    """Return the nested structure of what a call returns: `Function._outputs_struct`, without a list of one.

    Losses with several outputs need it.
    """
    found = functional._outputs_struct
    return found[0] if isinstance(found, (list, tuple)) and len(found) == 1 else found


def standardize_inputs(functional: Any, inputs: Any) -> list[Any]:
    """Return inputs as the model casts them (`Functional._standardize_inputs`). Stages of pipelines."""
    return list(functional._standardize_inputs(inputs))


def check_inputs(functional: Any, inputs: Any) -> None:
    """Raise Keras' error for wrong shapes (`Layer._assert_input_compatibility`). Stages of pipelines."""
    functional._assert_input_compatibility(inputs)


# --- Variables -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def values_as_initializers() -> Iterator[None]:
    """Let a StatelessScope take variables that are made from values, not only from initializers.

    `Variable.__init__` refuses them there. Optimizers make such variables, stateful recurrent layers, and
    layers of users. Building models without memory needs it.
    """
    cls = keras.Variable
    given = vars(cls).get("__init__")
    make = cls.__init__

    def init(self: Any, initializer: Any, shape: Any = None, dtype: Any = None, **kwargs: Any) -> None:
        if not callable(initializer) and not isinstance(initializer, str):
            value = tf.convert_to_tensor(cls._convert_to_tensor(self, initializer, dtype=dtype))
            dtype = value.dtype.name if dtype is None else dtype
            initializer, shape = _Value(value), tuple(value.shape)
        make(self, initializer, shape, dtype, **kwargs)

    cls.__init__ = init
    try:
        yield
    finally:
        if given is None:
            del cls.__init__
        else:
            cls.__init__ = given


class _Value:
    """An initializer that returns a given value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return keras.ops.cast(self._value, dtype) if dtype is not None else self._value


def native_value(variable: Any) -> Any:
    """Return the tf.Variable in a Keras variable, None without memory (`Variable._value`). Stages."""
    return variable._value


def has_memory(variable: Any) -> bool:
    """Return whether a Keras variable has a value (`Variable._value`). Building models without memory."""
    return variable._value is not None


def drop_memory(variable: Any) -> None:
    """Take a variable's value away (`Variable._value`). Building models without memory."""
    variable._value = None


def initialize_now(variable: Any) -> None:
    """Give a variable its initial value (`Variable._deferred_initialize`). Models without memory."""
    variable._deferred_initialize()


def initialize_with(variable: Any, value: Any) -> None:
    """Give a variable without memory this value (`Variable._initialize`). Saving pipelines."""
    variable._initialize(value)


def initializer_of(variable: Any) -> Any:
    """Return the initializer of a variable without memory (`Variable._initializer`). The same models."""
    return variable._initializer


def set_initializer(variable: Any, initializer: Any) -> None:
    """Replace the initializer of a variable without memory (`Variable._initializer`). The same models."""
    variable._initializer = initializer


def set_path(variable: Any, path: str) -> None:
    """Give a variable another's path (`Variable._path`). Optimizer state of other ranks' variables."""
    variable._path = path


@contextlib.contextmanager
def uninitialized_variables_kept() -> Iterator[None]:
    """Keep Keras' global list of variables to initialise as it was (`uninitialized_variables`).

    Otherwise the next StatelessScope that ends gives memory to all variables made inside this one.
    """
    name = "uninitialized_variables"
    before = list(global_state.get_global_attribute(name, []))
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


# --- Optimizers ----------------------------------------------------------------------------------------

# An optimizer that overrides one of these may act once per step, not once per variable (`acts_by_variable`).
METHODS_ONCE_PER_STEP = (
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
    "_overwrite_variables_directly_with_gradients",
    "apply",
)


def trained_variables(optimizer: Any) -> list[Any]:
    """Return what an optimizer was built for (`Optimizer._trainable_variables`). The order of buckets."""
    return list(optimizer._trainable_variables)


def step_count(optimizer: Any) -> Any:
    """Return the variable that counts every `apply` (`Optimizer._iterations`).

    The public `iterations` counts updates under gradient accumulation.
    """
    return optimizer._iterations


def is_last_micro_step(optimizer: Any) -> Any:
    """Return whether the next `apply` updates, under gradient accumulation: a tensor. Accumulation."""
    return (step_count(optimizer).value + 1) % int(optimizer.gradient_accumulation_steps) == 0


def learning_rate_variable(optimizer: Any) -> Any:
    """Return the rate's variable, schedule or function (`Optimizer._learning_rate`). `--lr-scaling`."""
    return getattr(optimizer, "_learning_rate", None)


def update_variables(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Clip, decay and update (`Optimizer._backend_apply_gradients`). Updates bucket by bucket need it."""
    optimizer._backend_apply_gradients(list(gradients), list(variables))


def gradient_accumulators(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return variables' accumulators (`_accumulated_gradients`, `_get_variable_index`). Accumulation."""
    return [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables]


def check_variables_are_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise Keras' error for unknown variables (`_check_variables_are_known`). Updates by bucket."""
    optimizer._check_variables_are_known(variables)


def warn_of_empty_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Warn of variables without a gradient (`Optimizer._filter_empty_gradients`). Updates by bucket."""
    optimizer._filter_empty_gradients(gradients, variables)


# --- Pipelines: more overrides and attributes ----------------------------------------------------------

# PipelineParallel (pipeline/model.py) also overrides `Trainer._get_metrics_result_or_logs` and
# `Trainer._flatten_metrics_in_order`: its logs come from all ranks.

COMPILE_CONFIG = "_compile_config"
"""The attribute that holds the arguments of `compile`. Saving a pipeline as a plain compiled model."""


def set_compiled_loss(model: Any, loss: Any) -> None:
    """Replace the model's CompileLoss (`Trainer._compile_loss`). Losses of micro-batches."""
    model._compile_loss = loss


def optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes without its lists of variables (`_variables`, `_trainable_variables`).

    Saving pipelines: the rest are its state, in lists of slots and single variables.
    """
    lists = ("_variables", "_trainable_variables")
    return {name: value for name, value in vars(optimizer).items() if name not in lists}


def unlisted_variables(optimizer: Any) -> dict[str, Any]:
    """Return variables of an optimizer that `optimizer.variables` lacks, by name; resuming.

    Within a LossScaleOptimizer, Keras does not list Nadam's `_u_product`.
    """
    listed = {id(v) for v in optimizer.variables}
    return {
        f"{type(one).__name__}.{name}": value
        for one in (optimizer, getattr(optimizer, "inner_optimizer", None))
        if one is not None
        for name, value in optimizer_attributes(one).items()
        if isinstance(value, keras.Variable) and id(value) not in listed
    }
