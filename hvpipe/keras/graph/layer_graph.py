"""A functional model as a graph of layer calls, with nested models opened. Partitioners cut this graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.nested_models import Entering, given_to, masks_given, why_whole


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model.

    Attributes:
        shape: Its shape; None for axes that depend on the batch.
        dtype: Its dtype.
        mask_shape: The shape of its Keras mask, if it has one.
        of_samples: Whether the first axis, if it is None, counts samples. It does not if time is folded into
            it, for example.
    """

    shape: tuple[int | None, ...]
    dtype: str
    mask_shape: tuple[int | None, ...] | None = None
    of_samples: bool = True

    def nbytes(self, samples: int) -> int:
        """Return the bytes of the tensor; every unknown axis counts as `samples`."""
        count = 1
        for axis in self.shape:
            count *= samples if axis is None else axis
        return count * int(tf.as_dtype(self.dtype).size)


@dataclass(frozen=True)
class Call:
    """One call of a layer or operation.

    Attributes:
        name: A name that is unique in the graph.
        operation: The Keras layer or operation.
        arguments: Keras's SymbolicArguments: the arguments of the call, with KerasTensors in them.
        reads: The tensors it reads: numbers in `LayerGraph.tensors`, each with the id of the KerasTensor
            that stands for it in the arguments.
        writes: The tensors it makes, likewise.
    """

    name: str
    operation: Any
    arguments: Any
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]

    def __call__(self, values: Mapping[int, Any], training: bool) -> list[Any]:
        """Return the flat outputs.

        As in Keras, the mode of the whole model overrides a `training=` in the call. Keras also stores
        defaults there: Dropout's is False.

        Args:
            values: The values of tensors by number.
            training: Whether to run in training mode.
        """
        args, kwargs = self.arguments.fill_in({key: values[number] for number, key in self.reads})
        if _takes_training(self.operation):
            kwargs["training"] = training
        return list(keras.tree.flatten(self.operation(*args, **kwargs)))


@dataclass(frozen=True)
class LayerGraph:
    """A model's calls in topological order.

    Attributes:
        name: The model's name.
        calls: The calls.
        tensors: All tensors of the model.
        inputs: The numbers of the model's flat inputs.
        outputs: The numbers of the model's flat outputs.
        deleted: Tensors whose mask a layer inside a call deletes, each with the index of that call.
        whole: The calls of nested models that could not be opened, by name, and why.
    """

    name: str
    calls: tuple[Call, ...]
    tensors: tuple[TensorSpec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    deleted: tuple[tuple[int, int], ...] = ()
    whole: tuple[tuple[str, str], ...] = ()

    def makers(self) -> dict[int, int]:
        """Return the index of the call that makes each tensor. No call makes the model's inputs."""
        return {number: index for index, call in enumerate(self.calls) for number, _ in call.writes}

    def mask_ends(self) -> dict[int, int]:
        """Return, by tensor, the index of the call after which its mask is gone, if there is one.

        When MultiHeadAttention runs, it deletes the masks of the tensors that it reads, also for later
        calls. A tensor of another dtype it casts first, and deletes the mask of its own copy. Inside an own
        layer or a nested model that was not opened it does the same (`deleted`).
        """
        ends = dict(self.deleted)
        for index, call in enumerate(self.calls):
            if isinstance(call.operation, keras.layers.MultiHeadAttention):
                for number, _ in call.reads:
                    if self.tensors[number].dtype == call.operation.compute_dtype:
                        ends[number] = min(index, ends.get(number, index))
        return ends

    def layers(self, calls: Sequence[int]) -> list[Any]:
        """Return the layers of these calls, each once, in order, without stateless operations."""
        found = {id(self.calls[p].operation): self.calls[p].operation for p in calls}
        return [operation for operation in found.values() if isinstance(operation, keras.Layer)]

    def sized(self, inputs: Sequence[Sequence[int | None]]) -> tuple[TensorSpec, ...] | None:
        """Return the tensors for model inputs of these shapes; None if Keras cannot infer them.

        The shapes of masks stay as they are.
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
        except Exception:  # any layer may refuse shapes it was not made for
            return None
        # Nobody makes the tensors of calls that were left out (`_without_unread`).
        return tuple(
            replace(spec, shape=tuple(known[n].shape)) if n in known else spec
            for n, spec in enumerate(self.tensors)
        )

    def all_layers(self) -> list[Any]:
        """Return the layers of all calls, each once."""
        return self.layers(range(len(self.calls)))

    def edges(self) -> list[tuple[int, int]]:
        """Return pairs of call indices: the maker of a tensor, and a call that reads it."""
        makers = self.makers()
        return sorted(
            {
                (makers[number], index)
                for index, call in enumerate(self.calls)
                for number, _ in call.reads
                if number in makers
            }
        )


def layer_graph(model: Any) -> LayerGraph:
    """Return the graph of a functional or Sequential Keras model, with nested functional models opened.

    Args:
        model: The model.

    Returns:
        The graph.

    Raises:
        HvpipeError: Keras does not know the model's graph: it is subclassed, or Sequential without an input
            shape. The message tells how to make it functional.
    """
    functional = functional_of(model)
    if functional is None:
        raise HvpipeError(
            "hvpipe can cut a model into stages if Keras knows its graph: a functional model, "
            "keras.Model(inputs, outputs), or a keras.Sequential that begins with keras.Input. Turn a "
            "subclassed model into a function that calls its layers on keras.Input(...) and returns "
            "keras.Model(inputs, outputs); blocks inside it may stay subclassed layers. "
            f"Received: {type(model).__name__} {getattr(model, 'name', '')!r}"
        )
    builder = _Builder()
    inputs = tuple(builder.tensor(x) for x in functional.inputs)
    table = {id(x): number for x, number in zip(functional.inputs, inputs, strict=True)}
    builder.add(functional, table, "")
    outputs = tuple(builder.now(table[id(x)]) for x in functional.outputs)
    calls = _without_unread(builder.calls, outputs)
    graph = LayerGraph(
        _own_name(model),
        tuple(calls),
        tuple(builder.tensors),
        inputs,
        outputs,
        whole=tuple(builder.whole.items()),
    )
    # The call of a nested model may fix sizes that the model itself leaves open.
    known = graph.sized([graph.tensors[number].shape for number in inputs]) if builder.opened_wider else None
    return _with_running_masks(_with_folded(graph if known is None else replace(graph, tensors=known)))


def _without_unread(calls: Sequence[Call], outputs: Sequence[int]) -> list[Call]:
    """Return the calls without operations whose results nobody reads.

    They make the masks that Keras hands to the call of a nested model. Its layers find them on the tensors.
    """
    read = set(outputs)
    kept = []
    for call in reversed(calls):
        if isinstance(call.operation, keras.Layer) or any(number in read for number, _ in call.writes):
            read.update(number for number, _ in call.reads)
            kept.append(call)
    return kept[::-1]


def _with_running_masks(graph: LayerGraph) -> LayerGraph:
    """Return the graph with the masks that tensors have when the model runs.

    Keras's description of the model does not know of deleted masks (`LayerGraph.mask_ends`), nor of masks
    that a layer sets, or passes on to layers inside it, only when it runs.
    """
    ends = graph.mask_ends()
    deleted: dict[int, int] = {}
    masks = {
        number: keras.KerasTensor(spec.mask_shape, "bool")
        for number, spec in enumerate(graph.tensors)
        if spec.mask_shape is not None
    }
    if not masks and not any(_may_hide_masks(call.operation) for call in graph.calls):
        return graph
    for index, call in enumerate(graph.calls):
        # Keras made the call on these. In a nested model they have no masks, whatever it is called on.
        described = {id(x): compat.get_keras_mask(x) for x in call.arguments.keras_tensors}
        known, changed, masked = {}, False, isinstance(call.operation, Entering)
        for number, key in call.reads:
            spec = graph.tensors[number]
            known[key] = keras.KerasTensor(spec.shape, spec.dtype)
            mask = masks.get(number) if index <= ends.get(number, index) else None
            compat.set_keras_mask(known[key], mask)
            changed |= (mask is None) != (described[key] is None)
            masked |= mask is not None
        # An operation that returns what it reads, such as a cast to the same dtype, keeps the mask.
        if _may_hide_masks(call.operation) or (masked and not isinstance(call.operation, keras.Layer)):
            made, lost = _masks_when_run(call, [known[key] for _, key in call.reads])
            deleted |= dict.fromkeys(lost, index)
            ends |= dict.fromkeys(lost, index)
        else:
            made = _masks_by_layer(call, known) if changed else None
        for (number, _), mask in zip(call.writes, made or (), strict=False):
            masks.pop(number, None)
            if mask is not None:
                masks[number] = mask
    return replace(
        graph,
        deleted=tuple(deleted.items()),
        tensors=tuple(
            replace(spec, mask_shape=tuple(masks[number].shape) if number in masks else None)
            for number, spec in enumerate(graph.tensors)
        ),
    )


def _may_hide_masks(operation: Any) -> bool:
    """Return whether a layer's outputs may have masks only when it runs."""
    reversible = getattr(keras.layers, "ReversibleEmbedding", ())
    return isinstance(operation, keras.Layer) and (
        not _is_known(operation) or functional_of(operation) is not None or isinstance(operation, reversible)
    )


def _masks_by_layer(call: Call, known: Mapping[int, Any]) -> list[Any]:
    """Return what a layer's `compute_mask` makes of these inputs, by the id of KerasTensors."""
    if not getattr(call.operation, "supports_masking", False):
        return [None] * len(call.writes)
    args, kwargs = call.arguments.fill_in(known)
    first = args[0] if args else next(iter(kwargs.values()))
    before = kwargs.get("mask")
    if before is None:
        before = keras.tree.map_structure(compat.get_keras_mask, first)
    made = keras.tree.flatten(call.operation.compute_mask(first, before))
    return made if len(made) == len(call.writes) else [None] * len(call.writes)


def _masks_when_run(call: Call, reads: Sequence[Any]) -> tuple[list[Any] | None, list[int]]:
    """Run a call on symbols; return its outputs' masks, and the tensors whose masks it deletes.

    The masks are None if it cannot run on symbols.
    """
    lost: list[int] = []

    def run(values: Sequence[Any], masks: Sequence[Any]) -> list[Any]:
        known = {}
        for (number, _), value, mask in zip(call.reads, values, masks, strict=True):
            if mask is not None:
                compat.set_keras_mask(value, mask)
            known[number] = value
        made = [compat.get_keras_mask(x) for x in call(known, training=False)]
        masked = [number for (number, _), mask in zip(call.reads, masks, strict=True) if mask is not None]
        lost[:] = [number for number in masked if compat.get_keras_mask(known[number]) is None]
        return made

    try:
        made = compat.compute_output_spec(run, reads, [compat.get_keras_mask(x) for x in reads])
    except Exception:  # what Keras said when the model was made counts
        return None, []
    return list(made), lost


def _with_folded(graph: LayerGraph) -> LayerGraph:
    """Return the graph with `of_samples` set: tensors are inferred for 2 and 3 samples and compared.

    Keras's own layers always keep the samples on the first axis.
    """
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
    """Return whether a layer is one of Keras's, other than Lambda."""
    return type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.layers.Lambda)


class _Builder:
    """Collects calls and numbers tensors. If a model is called twice, its calls and tensors appear twice."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tensors: list[TensorSpec] = []
        self.opened_wider = False  # an opened model's inputs leave sizes open that its call fixes
        self.whole: dict[str, str] = {}  # why nested models stay whole, by the names of their calls
        self._replaced: dict[int, int] = {}  # by a tensor, the one with the mask that a nested model gave it
        self._names: dict[str, int] = {}

    def tensor(self, symbolic: Any) -> int:
        """Number a new tensor like a KerasTensor."""
        mask = compat.get_keras_mask(symbolic)
        mask_shape = None if mask is None else tuple(mask.shape)
        self.tensors.append(TensorSpec(tuple(symbolic.shape), symbolic.dtype, mask_shape))
        return len(self.tensors) - 1

    def add(self, functional: Any, table: dict[int, int], prefix: str) -> None:
        """Add the calls of a functional model.

        `table` maps the ids of its KerasTensors to numbers. It holds the inputs, and gets all others.
        """
        nodes_by_depth = compat.nodes_by_depth(functional)
        for depth in sorted(nodes_by_depth, reverse=True):
            for node in nodes_by_depth[depth]:
                if node.operation is None or node.is_input:
                    continue
                if any(id(x) not in table for x in node.input_tensors):
                    continue  # a call of a shared layer outside this model
                inner = functional_of(node.operation)
                why = "" if inner is None else why_whole(node, inner)
                if inner is not None and not why:
                    self._open(node, inner, table, prefix)
                    continue
                self._call(node, table, prefix)
                if why:
                    self.whole[self.calls[-1].name] = why

    def _call(self, node: Any, table: dict[int, int], prefix: str) -> None:
        reads = {id(x): self.now(table[id(x)]) for x in node.input_tensors}
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
        given, masks = given_to(node, inner), masks_given(node, inner)
        self.opened_wider |= any(
            tuple(x.shape) != tuple(y.shape) for x, y in zip(inner.inputs, given, strict=True)
        )
        within = f"{prefix}{_own_name(node.operation)}/"
        of_inner = {}
        for index, (x, y) in enumerate(zip(inner.inputs, given, strict=True)):
            mask = None if masks is None else masks[index]
            of_inner[id(x)] = self._entering(x, y, mask, masks is None, table, within)
        self.add(inner, of_inner, within)
        for x, y in zip(inner.outputs, node.outputs, strict=True):
            table[id(y)] = self.now(of_inner[id(x)])

    def _entering(
        self, inner: Any, given: Any, mask: Any, keeps_mask: bool, table: dict[int, int], prefix: str
    ) -> int:
        """Return the number of a nested model's input, after the cast and with the mask that Keras gives it.

        Keras casts a copy, but gives a mask to the tensor itself, which later calls read.
        """
        number = self.now(table[id(given)])
        own = compat.get_keras_mask(given)
        has_mask = mask is None or (mask is own and not self._may_have_lost_mask(number))
        if given.dtype == inner.dtype and has_mask:
            return number
        read = [given] if mask is None else [given, mask]
        self.tensors.append(
            replace(
                self.tensors[number],
                dtype=inner.dtype,
                mask_shape=None if mask is None else tuple(mask.shape),
            )
        )
        made = len(self.tensors) - 1
        self.calls.append(
            Call(
                name=self._unique(prefix + ("cast" if given.dtype != inner.dtype else "mask")),
                operation=Entering(inner.dtype, keeps_mask),
                arguments=compat.SymbolicArguments(*read),
                reads=tuple((self.now(table[id(x)]), id(x)) for x in read),
                writes=((made, id(inner)),),
            )
        )
        if given.dtype == inner.dtype:
            self._replaced[number] = made
        return made

    def _may_have_lost_mask(self, number: int) -> bool:
        """Return whether a call so far may have deleted a tensor's mask (`LayerGraph.mask_ends`)."""
        return any(
            number in dict(call.reads)
            and (
                isinstance(call.operation, keras.layers.MultiHeadAttention) or _may_hide_masks(call.operation)
            )
            for call in self.calls
        )

    def now(self, number: int) -> int:
        """Return the number of a tensor after all that nested models did to it so far."""
        while number in self._replaced:
            number = self._replaced[number]
        return number

    def _unique(self, name: str) -> str:
        """Return a name with a number appended, if the name was used before."""
        self._names[name] = self._names.get(name, 0) + 1
        return name if self._names[name] == 1 else f"{name}#{self._names[name]}"


def _own_name(operation: Any) -> str:
    """Return an operation's name without the number that Keras appends to default names.

    The number counts the operations that the process has made, so it differs between ranks.
    """
    kind = compat.to_snake_case(type(operation).__name__)
    return kind if re.fullmatch(rf"{kind}_\d+", operation.name) else str(operation.name)


def functional_of(operation: Any) -> Any:
    """Return the functional model that an operation is, or that a Sequential holds; otherwise None."""
    # A subclass with its own `call` does more than its graph says.
    call = getattr(type(operation), "call", None)
    if isinstance(operation, keras.Sequential):
        is_plain = operation.built and call is keras.Sequential.call
        return compat.functional_inside(operation) if is_plain else None
    return operation if isinstance(operation, compat.Functional) and call is compat.Functional.call else None


def _takes_training(operation: Any) -> bool:
    """Return whether a call takes `training`. All layers do: Keras passes the mode on to layers inside."""
    return isinstance(operation, keras.Layer) and compat.takes_training(operation)
