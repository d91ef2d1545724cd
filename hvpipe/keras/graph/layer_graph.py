"""A functional model as a graph of layer calls, nested models opened: what a partitioner cuts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.ops.core import Cast
from keras.src.ops.symbolic_arguments import SymbolicArguments
from keras.src.utils.naming import to_snake_case

from hvpipe.errors import HvpipeError


@dataclass(frozen=True)
class TensorSpec:
    """What travels: shape (None where it depends on the batch) and dtype of a tensor of the model.

    `mask_shape` is that of the Keras mask that goes with it, if one does. Without `of_samples` the first
    axis, where it is None, is something else than the samples: say, time folded into them.
    """

    shape: tuple[int | None, ...]
    dtype: str
    mask_shape: tuple[int | None, ...] | None = None
    of_samples: bool = True

    @property
    def differentiable(self) -> bool:
        return self.dtype in ("float16", "bfloat16", "float32", "float64")

    def nbytes(self, samples: int) -> int:
        """Bytes of the tensor for so many samples; every unknown axis counts as many."""
        count = 1
        for axis in self.shape:
            count *= samples if axis is None else axis
        return count * int(tf.as_dtype(self.dtype).size)


@dataclass(frozen=True)
class Call:
    """One call of a layer (or operation). Tensors are numbers into `LayerGraph.tensors`.

    `reads` and `writes` pair them with the ids of the KerasTensors that stand for them in the arguments.
    """

    name: str
    operation: Any
    arguments: Any  # Keras's SymbolicArguments: the call's arguments with KerasTensors in them
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]

    def __call__(self, values: Mapping[int, Any], training: bool) -> list[Any]:
        """The outputs, flat, given the values of the tensors by their numbers.

        As in Keras, the mode of the whole model wins over a `training=` that a layer was called with, which
        is also where Keras notes a default: Dropout's is False.
        """
        args, kwargs = self.arguments.fill_in({key: values[number] for number, key in self.reads})
        if _takes_training(self.operation):
            kwargs["training"] = training
        return list(keras.tree.flatten(self.operation(*args, **kwargs)))


@dataclass(frozen=True)
class LayerGraph:
    """Calls in a topological order; `inputs` and `outputs` are the model's tensors, flat, by number."""

    name: str
    calls: tuple[Call, ...]
    tensors: tuple[TensorSpec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def makers(self) -> dict[int, int]:
        """The call that makes each tensor; the model's inputs have none."""
        return {number: place for place, call in enumerate(self.calls) for number, _ in call.writes}

    def layers(self, places: Sequence[int]) -> list[Any]:
        """The layers of these calls, each once, in order. Operations without state are left out."""
        found = {id(self.calls[p].operation): self.calls[p].operation for p in places}
        return [operation for operation in found.values() if isinstance(operation, keras.Layer)]

    def whole_models(self) -> list[str]:
        """The names of the calls of nested models that could not be opened."""
        return [call.name for call in self.calls if functional_of(call.operation) is not None]

    def sized(self, inputs: Sequence[Sequence[int | None]]) -> tuple[TensorSpec, ...] | None:
        """The tensors where the model's inputs have these shapes; None where Keras cannot tell.

        Sizes of masks stay as they are.
        """
        known = {
            number: keras.KerasTensor(shape, self.tensors[number].dtype)
            for number, shape in zip(self.inputs, inputs, strict=True)
        }
        try:
            for call in self.calls:
                args, kwargs = call.arguments.fill_in({key: known[number] for number, key in call.reads})
                found = keras.tree.flatten(call.operation.compute_output_spec(*args, **kwargs))
                known.update((number, x) for (number, _), x in zip(call.writes, found, strict=True))
        except Exception:  # of any layer, which was made to be called with other shapes
            return None
        return tuple(replace(spec, shape=tuple(known[n].shape)) for n, spec in enumerate(self.tensors))

    def all_layers(self) -> list[Any]:
        """The layers of all calls, each once."""
        return self.layers(range(len(self.calls)))

    def edges(self) -> list[tuple[int, int]]:
        """Pairs of calls, each from the maker of a tensor to one that reads it."""
        makers = self.makers()
        return sorted(
            {
                (makers[number], place)
                for place, call in enumerate(self.calls)
                for number, _ in call.reads
                if number in makers
            }
        )


def layer_graph(model: Any) -> LayerGraph:
    """The graph of a functional or sequential Keras model.

    Nested functional models are opened, each call of one by itself. Raises HvpipeError for a model that
    has no graph (subclassed, or Sequential without an input shape): says how to make it functional.
    """
    functional = functional_of(model)
    if functional is None:
        raise HvpipeError(
            "A model can be cut into stages where Keras knows its graph: a functional model, "
            "keras.Model(inputs, outputs), or a keras.Sequential that begins with keras.Input. Turn a "
            "subclassed model into a function that calls its layers on keras.Input(...) and returns "
            "keras.Model(inputs, outputs); blocks inside it may stay subclassed layers. "
            f"Received: {type(model).__name__} {getattr(model, 'name', '')!r}"
        )
    builder = _Builder()
    inputs = tuple(builder.tensor(x) for x in functional.inputs)
    table = {id(x): number for x, number in zip(functional.inputs, inputs, strict=True)}
    builder.add(functional, table, "")
    outputs = tuple(table[id(x)] for x in functional.outputs)
    graph = LayerGraph(_own_name(model), tuple(builder.calls), tuple(builder.tensors), inputs, outputs)
    # Inside, sizes are as open as its inputs leave them.
    known = graph.sized([graph.tensors[number].shape for number in inputs]) if builder.opened_wider else None
    return _with_folded(graph if known is None else replace(graph, tensors=known))


def _with_folded(graph: LayerGraph) -> LayerGraph:
    """Find the tensors whose first axis is not that of the samples. No layer of Keras's own makes such."""
    if all(isinstance(call.operation, keras.Layer) and _is_known(call.operation) for call in graph.calls):
        return graph
    two, three = (
        graph.sized([(count, *graph.tensors[number].shape[1:]) for number in graph.inputs])
        for count in (2, 3)
    )
    if two is None or three is None:
        return graph
    first = [(a.shape[:1], b.shape[:1]) for a, b in zip(two, three, strict=True)]
    return replace(
        graph,
        tensors=tuple(
            replace(spec, of_samples=spec.shape[:1] != (None,) or sizes == ((2,), (3,)))
            for spec, sizes in zip(graph.tensors, first, strict=True)
        ),
    )


def _is_known(layer: Any) -> bool:
    """Of Keras's own layers all but Lambda."""
    return type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.layers.Lambda)


class _Builder:
    """Collects calls and numbers tensors: of a model that is called twice each call has its own."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tensors: list[TensorSpec] = []
        self.opened_wider = False  # a nested model whose inputs leave sizes open that are known
        self._names: dict[str, int] = {}

    def tensor(self, symbolic: Any) -> int:
        mask = getattr(symbolic, "_keras_mask", None)
        mask_shape = None if mask is None else tuple(mask.shape)
        self.tensors.append(TensorSpec(tuple(symbolic.shape), symbolic.dtype, mask_shape))
        return len(self.tensors) - 1

    def add(self, functional: Any, table: dict[int, int], prefix: str) -> None:
        """Add the calls of a functional model, of whose tensors `table` holds the inputs' numbers by id."""
        for depth in sorted(functional._nodes_by_depth, reverse=True):
            for node in functional._nodes_by_depth[depth]:
                if node.operation is None or node.is_input:
                    continue
                if any(id(x) not in table for x in node.input_tensors):
                    continue  # of another use of a shared layer
                inner = functional_of(node.operation)
                if inner is not None and _can_be_opened(node, inner):
                    self._open(node, inner, table, prefix)
                else:
                    self._call(node, table, prefix)

    def _call(self, node: Any, table: dict[int, int], prefix: str) -> None:
        reads = {id(x): table[id(x)] for x in node.input_tensors}
        for x in node.outputs:
            table[id(x)] = self.tensor(x)
        self.calls.append(
            Call(
                name=self._unique(prefix + _own_name(node.operation)),
                operation=node.operation,
                arguments=node.arguments,
                reads=tuple((number, key) for key, number in reads.items()),
                writes=tuple((table[id(x)], id(x)) for x in node.outputs),
            )
        )

    def _open(self, node: Any, inner: Any, table: dict[int, int], prefix: str) -> None:
        given = keras.tree.flatten(node.arguments.args[0])
        self.opened_wider |= any(
            tuple(x.shape) != tuple(y.shape) for x, y in zip(inner.inputs, given, strict=True)
        )
        within = f"{prefix}{_own_name(node.operation)}/"
        of_inner = {
            id(x): self._entering(x, y, table, within) for x, y in zip(inner.inputs, given, strict=True)
        }
        self.add(inner, of_inner, within)
        for x, y in zip(inner.outputs, node.outputs, strict=True):
            table[id(y)] = of_inner[id(x)]

    def _entering(self, inner: Any, given: Any, table: dict[int, int], prefix: str) -> int:
        """The number of what stands for a nested model's input: Keras casts what goes in to its dtype."""
        number = table[id(given)]
        if given.dtype == inner.dtype:
            return number
        cast = replace(self.tensors[number], dtype=inner.dtype)
        self.tensors.append(cast)
        self.calls.append(
            Call(
                name=self._unique(f"{prefix}cast"),
                operation=Cast(inner.dtype),
                arguments=SymbolicArguments(given),
                reads=((number, id(given)),),
                writes=((len(self.tensors) - 1, id(inner)),),
            )
        )
        return len(self.tensors) - 1

    def _unique(self, name: str) -> str:
        """A layer of a name that there is already, or that is called again, gets a number."""
        self._names[name] = self._names.get(name, 0) + 1
        return name if self._names[name] == 1 else f"{name}#{self._names[name]}"


def _own_name(operation: Any) -> str:
    """Without the number that Keras gives to what has no name: it counts all that the process has made."""
    kind = to_snake_case(type(operation).__name__)
    return kind if re.fullmatch(rf"{kind}_\d+", operation.name) else str(operation.name)


def functional_of(operation: Any) -> Any:
    """The functional model that an operation is or (Sequential) holds; None where it is none."""
    # A subclass with a call of its own does more than its graph says.
    call = getattr(type(operation), "call", None)
    if isinstance(operation, keras.Sequential):
        return operation._functional if operation.built and call is keras.Sequential.call else None
    return operation if isinstance(operation, Functional) and call is Functional.call else None


def _can_be_opened(node: Any, inner: Any) -> bool:
    """Only tensors go in, without masks (which inner layers would have to be given)."""
    given = [x for x in node.input_tensors if getattr(x, "_keras_mask", None) is not None]
    flat = keras.tree.flatten(node.arguments.args[0]) if len(node.arguments.args) == 1 else []
    more = {name for name, value in node.arguments.kwargs.items() if value is not None}
    only_tensors = len(flat) == len(node.input_tensors) and more <= {"training"}
    return not given and only_tensors and all(map(_fits, flat, inner.inputs))


def _fits(given: Any, wanted: Any) -> bool:
    """What is given has all sizes that are wanted; others may be left open."""
    sizes = list(zip(given.shape, wanted.shape, strict=False))
    return len(given.shape) == len(wanted.shape) and all(want in (None, size) for size, want in sizes)


def _takes_training(operation: Any) -> bool:
    """Every layer does: Keras hands the mode to the layers inside even where `call` has no such argument."""
    return isinstance(operation, keras.Layer) and (
        "training" in getattr(operation, "_call_context_args", ())
        or bool(getattr(operation, "_call_has_training_arg", False))
    )
