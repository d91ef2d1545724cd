"""A function's forward and backward as separate graphs: run now, keep what is needed, run the rest later.

An eager tape keeps every intermediate result and runs the whole backward at once. Here the forward and its
gradient are traced into one graph, which is then cut:

    inputs -> [forward] -> outputs                        saved: what flows from forward to backward
                  | saved
    gradients -> [backward for inputs] -> gradients of the inputs
                  | saved, and what both parts share
                 [backward for weights] -> added to the accumulators

A value that follows from weights alone is computed again rather than saved: weights stay as they are until
the end of the step. With `recompute` so is everything but the inputs and what random numbers are drawn from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

# Of a tensor of which the backward wants only the size, the size is kept.
_SIZES = ("Shape", "ShapeN", "Size", "Rank")
_LOOPS = ("While", "StatelessWhile")
# Operations on a variable that leave it as it is.
_READS = ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd", "Identity")


@dataclass(frozen=True)
class Halves:
    """What `split_gradient` makes. All values are flat lists of tensors.

    `forward(inputs)` gives outputs and what to keep. `backward(kept, gradients, first)` gives the gradients
    of the wanted floating inputs; those of the variables it adds to the `accumulators`, or with `first` sets
    them. The same in two parts: `backward_inputs(kept, gradients)` gives gradients and what to keep further,
    `backward_weights(kept further, first)` the rest. `captured` are the tensors and handles of variables
    from outside that the function reads, `reached` says of the wanted floating inputs whether a gradient
    comes to them; of the others it is 0.
    """

    forward: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    backward: Callable[[Sequence[Any], Sequence[Any], bool], list[Any]]
    backward_inputs: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    backward_weights: Callable[[Sequence[Any], bool], None]
    accumulators: list[Any]
    variables: list[Any]
    captured: list[Any]
    reached: list[bool]


def split_gradient(
    function: Callable[..., Sequence[Any]],
    signature: Sequence[Any],
    variables: Sequence[Any],
    *,
    wanted: int,
    only_out: int = 0,
    recompute: bool = False,
    passed_over: Collection[int] = (),
) -> Halves:
    """Cut `function(*inputs) -> outputs` and its gradient, for inputs of `signature` (tf.TensorSpec).

    Gradients are taken of all floating outputs but the last `only_out`, with respect to the floating ones of
    the first `wanted` inputs and the `variables` (tf.Variable); `Halves.variables` are those that get any.
    Those floating outputs whose places are to be `passed_over` get gradients that count for nothing.
    """
    traced: dict[str, Any] = {}

    def whole(*inputs: Any) -> Any:
        # What is kept must be a tensor that the graph computes, not one that is passed through.
        outputs = [tf.identity(y) for y in function(*inputs)]
        floating = [y for y in outputs[: len(outputs) - only_out] if y.dtype.is_floating]
        given = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in floating]
        sought = [x for x in inputs[:wanted] if x.dtype.is_floating]
        every = [*sought, *variables]
        counted = [place for place in range(len(floating)) if place not in passed_over]
        found: list[Any] = [None] * len(every)
        if counted and every:
            found = tf.gradients([floating[k] for k in counted], every, [given[k] for k in counted])
        dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
        of_inputs = [
            tf.zeros_like(x) if g is None else tf.identity(g)
            for x, g in zip(sought, dense[: len(sought)], strict=True)
        ]
        used = [(v, g) for v, g in zip(variables, dense[len(sought) :], strict=True) if g is not None]
        traced.update(reached=[g is not None for g in dense[: len(sought)]])
        traced.update(inputs=inputs, outputs=outputs, given=given, of_inputs=of_inputs, used=used)
        return outputs

    graph = tf.function(whole, autograph=False).get_concrete_function(*signature).graph
    used = [variable for variable, _ in traced["used"]]
    of_weights = [gradient for _, gradient in traced["used"]]
    cut = _Cut(graph, traced["inputs"], traced["outputs"], traced["given"], recompute)
    kept = cut.kept_from_forward([*traced["of_inputs"], *of_weights])
    further, shared = cut.kept_from_inputs_part(traced["of_inputs"], of_weights)

    accumulators = [
        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name="hvpipe_gradient") for v in used
    ]
    inputs, given, outputs = traced["inputs"], traced["given"], traced["outputs"]
    of_inputs = traced["of_inputs"]
    forward = cut.piece(inputs, [*outputs, *kept], effects=graph.control_outputs).function()
    both = _storing(cut.piece([*kept, *given], [*of_inputs, *of_weights]), accumulators)
    inputs_part = cut.piece([*kept, *given], [*of_inputs, *shared, *further]).function()
    weights_part = _storing(cut.piece([*shared, *further], of_weights), accumulators)

    def run_forward(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = forward(values)
        return found[: len(outputs)], found[len(outputs) :]

    def run_inputs_part(saved: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = inputs_part([*saved, *gradients])
        return found[: len(of_inputs)], found[len(of_inputs) :]

    def run_weights_part(saved: Sequence[Any], first: bool) -> None:
        weights_part[first](saved)

    return Halves(
        forward=run_forward,
        backward=lambda saved, gradients, first: both[first]([*saved, *gradients]),
        backward_inputs=run_inputs_part,
        backward_weights=run_weights_part,
        accumulators=accumulators,
        variables=used,
        captured=[outside for outside, _ in graph.captures],
        reached=traced["reached"],
    )


@dataclass(frozen=True)
class _Piece:
    """A part of the traced graph as a function of flat values, to be traced anew, and their specs."""

    run: Callable[..., list[Any]]
    signature: Sequence[Any]

    def function(self) -> FlatFunction:
        return FlatFunction(self.run, self.signature)


class FlatFunction:
    """A function of flat values with a signature, as TensorFlow runs it; traced at the first call.

    What flows between pieces may be hundreds of tensors, whose binding to the parameters of a tf.function
    would take longer than many a small layer: its flat inputs are known to fit.
    """

    def __init__(self, run: Callable[..., list[Any]], signature: Sequence[Any]) -> None:
        self._run = run
        self._signature = signature
        self._concrete: Any = None

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        if self._concrete is None:
            function = tf.function(self._run, input_signature=self._signature, autograph=False)
            self._concrete = function.get_concrete_function()
        return list(self._concrete._call_flat(list(values), self._concrete.captured_inputs) or ())


def _storing(piece: _Piece, accumulators: Sequence[Any]) -> dict[bool, FlatFunction]:
    """Puts the last of what a piece returns into the accumulators: first sets, then adds; gives the rest."""

    def put(first: bool, *values: Any) -> list[Any]:
        found = piece.run(*values)
        rest = len(found) - len(accumulators)
        for accumulator, gradient in zip(accumulators, found[rest:], strict=True):
            (accumulator.assign if first else accumulator.assign_add)(gradient)
        return found[:rest]

    return {first: FlatFunction(functools.partial(put, first), piece.signature) for first in (True, False)}


class _Cut:
    """One traced graph, and which of its operations belong to the forward."""

    def __init__(
        self,
        graph: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        given: Sequence[Any],
        recompute: bool,
    ) -> None:
        self._graph = graph
        self._recompute = recompute
        self._captures = {inside.name: outside for outside, inside in graph.captures}
        self._given = {placeholder.op for placeholder in given}
        self._whole = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._whole.node}
        self._functions = {f.signature.name: f for f in self._whole.library.function}
        self._written = {_source_of_handle(t).name for op in graph.get_operations() for t in self._writes(op)}
        self._forward = ancestors([*(y.op for y in outputs), *graph.control_outputs], with_control=True)
        self._forward |= {x.op for x in inputs}
        self._inputs = {x.op for x in inputs}
        self._cheap: dict[Any, bool] = {}

    def kept_from_forward(self, targets: Sequence[Any]) -> list[Any]:
        """What flows from the forward into what is behind `targets`: where it will do, a size alone."""
        # An operation of the backward that only asks for a size can run with the forward.
        for op in ancestors([t.op for t in targets]):
            if op.type in _SIZES and op.inputs[0].op in self._forward:
                self._forward.add(op)
        return self._crossing(targets, self._forward)

    def kept_from_inputs_part(
        self, of_inputs: Sequence[Any], of_weights: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """What the weights' part takes of the inputs' part, and of what that takes itself."""
        done = ancestors([t.op for t in of_inputs]) - self._forward
        done = {op for op in done if not self._follows_from_weights(op)} | self._given
        crossing = self._crossing(of_weights, self._forward | done)
        shared = [t for t in crossing if t.op in self._forward or t.op in self._given]
        return [t for t in crossing if t.op not in self._forward and t.op not in self._given], shared

    def _crossing(self, targets: Sequence[Any], side: set[Any]) -> list[Any]:
        """The tensors made on one side that the operations behind `targets` on the other side take."""
        found: dict[str, Any] = {}
        seen: set[Any] = set()
        stack = []
        for target in targets:
            if target.op in side and not self._again(target.op):
                found[target.name] = target
            else:
                stack.append(target.op)
        while stack:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            for tensor in map(_source_of_handle, op.inputs):
                if tensor.op in side and not self._again(tensor.op):
                    found[tensor.name] = tensor
                else:
                    stack.append(tensor.op)
        return [found[name] for name in sorted(found)]

    def _again(self, op: Any) -> bool:
        """Whether to run a forward operation again in the backward rather than to keep what it made."""
        if op in self._inputs or op in self._given:
            return False
        if self._recompute and op in self._forward:
            return self._is_pure(op)
        return self._follows_from_weights(op)

    def _is_pure(self, op: Any) -> bool:
        """Running it twice in a step gives the same both times."""
        if op.type == "ReadVariableOp" or op.type in _LOOPS:
            handles = {_source_of_handle(t).name for t in op.inputs if t.dtype == tf.resource}
            return handles.isdisjoint(self._written) and self._only_reads(self._nodes[op.name])
        return op.type == "Placeholder" or not op.op_def.is_stateful

    def _writes(self, op: Any) -> list[Any]:
        """The handles of what an operation may change; one with functions inside says what it only reads."""
        if op.type in _READS:
            return []
        said = self._nodes[op.name].attr.get("_read_only_resource_inputs")
        only_read = () if said is None else said.list.i
        return [t for i, t in enumerate(op.inputs) if t.dtype == tf.resource and i not in only_read]

    def _only_reads(self, node: Any) -> bool:
        """Whether a node and the functions inside it draw no random numbers and have no other effects."""
        inside = [
            name
            for attr in node.attr.values()
            for name in (attr.func.name, *(f.name for f in attr.list.func))
        ]
        functions = [self._functions[name] for name in inside if name in self._functions]
        if functions:
            return all(self._only_reads(n) for function in functions for n in function.node_def)
        definition = op_def_registry.get(node.op)
        return node.op in _READS or (definition is not None and not definition.is_stateful)

    def _follows_from_weights(self, op: Any) -> bool:
        if op not in self._cheap:
            stack = [op]
            while stack:
                top = stack[-1]
                missing = [t.op for t in top.inputs if t.op not in self._cheap]
                if missing:
                    stack.extend(missing)
                    continue
                self._cheap[stack.pop()] = self._judge(top)
        return self._cheap[op]

    def _judge(self, op: Any) -> bool:
        if op.type == "Placeholder":
            return op.outputs[0].name in self._captures
        if op.type in _LOOPS or not self._is_pure(op):
            return False
        return op.type == "Const" or (bool(op.inputs) and all(self._cheap[t.op] for t in op.inputs))

    def piece(self, feeds: Sequence[Any], fetches: Sequence[Any], effects: Sequence[Any] = ()) -> _Piece:
        """A function of `feeds` that computes `fetches`, and runs `effects` as well."""
        fed = {tensor.name: place for place, tensor in enumerate(feeds)}
        wanted = [t.name for t in fetches if t.name not in fed]

        def run(*values: Any) -> list[Any]:
            ops = self._behind([t for t in fetches if t.name not in fed], effects, fed)
            used = {_source_of_handle(t).name for op in ops for t in op.inputs}
            capture = tf.compat.v1.get_default_graph().capture
            given = {name: values[place] for name, place in fed.items()}
            inside = {name: value for name, value in given.items() if name in used}
            inside |= {name: capture(outside) for name, outside in self._captures.items() if name in used}
            found = tf.graph_util.import_graph_def(
                self._definition(ops), input_map=inside, return_elements=wanted, name=""
            )
            made = dict(zip(wanted, found, strict=True))
            return [made[t.name] if t.name in made else tf.identity(given[t.name]) for t in fetches]

        return _Piece(run, [tf.TensorSpec(t.shape, t.dtype) for t in feeds])

    def _behind(self, fetches: Sequence[Any], effects: Sequence[Any], fed: dict[str, int]) -> set[Any]:
        forward = bool(effects) or all(t.op in self._forward for t in fetches)
        seen: set[Any] = set()
        stack = [*(t.op for t in fetches), *effects]
        while stack:
            op = stack.pop()
            if op in seen or (op.type == "Placeholder" and op.outputs[0].name in self._captures):
                continue
            seen.add(op)
            stack.extend(t.op for t in map(_source_of_handle, op.inputs) if t.name not in fed)
            # The backward need not wait for what the forward did long ago.
            stack.extend(c for c in op.control_inputs if forward or c not in self._forward)
        return seen

    def _definition(self, ops: set[Any]) -> Any:
        """The operations as a GraphDef; control edges from outside are left out."""
        definition = tf.compat.v1.GraphDef(library=self._whole.library, versions=self._whole.versions)
        names = {op.name for op in ops}
        for op in sorted(ops, key=lambda op: op.name):
            node = definition.node.add()
            node.CopyFrom(self._nodes[op.name])
            del node.input[:]
            node.input.extend(_source_of_handle(t).name for t in op.inputs)
            node.input.extend(f"^{c.name}" for c in op.control_inputs if c.name in names)
            node.attr.pop("_class", None)
        return definition


def ancestors(ops: Iterable[Any], with_control: bool = False) -> set[Any]:
    """The operations of a graph that lead to these, themselves among them."""
    seen: set[Any] = set()
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        stack.extend(t.op for t in op.inputs)
        if with_control:
            stack.extend(op.control_inputs)
    return seen


def _source_of_handle(tensor: Any) -> Any:
    """A variable's handle that a loop passes through is the one that went in."""
    while tensor.dtype == tf.resource and tensor.op.type in (*_LOOPS, "Identity"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
