"""Cuts one traced graph into pieces that run as separate functions.

`split_gradient` traces a forward and its gradient into one graph. This module finds which tensors flow from
one part of it to another, and makes a function of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

# If the backward needs only the size of a tensor, only the size is kept.
_SIZE_OPS = ("Shape", "ShapeN", "Size", "Rank")
_LOOP_OPS = ("While", "StatelessWhile")
# Operations on a variable that do not change it.
_READ_OPS = ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd", "Identity")


@dataclass(frozen=True)
class GraphPiece:
    """A part of a traced graph: a function of flat values that adds it to another graph, and their specs."""

    run: Callable[..., list[Any]]
    signature: Sequence[Any]

    def function(self) -> FlatFunction:
        """Return the piece as a function that TensorFlow runs."""
        return FlatFunction(self.run, self.signature)


class FlatFunction:
    """A TensorFlow function of flat values, traced at the first call.

    Hundreds of tensors may flow between pieces. Binding them to a tf.function's parameters would take longer
    than many small layers, so this calls the concrete function with flat inputs.
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


class TracedGraph:
    """A traced forward with its gradient, and which operations belong to the forward."""

    def __init__(
        self,
        graph: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        upstream: Sequence[Any],
        recompute: bool,
    ) -> None:
        """Find the forward's operations.

        Args:
            graph: The graph (tf.Graph).
            inputs: The forward's inputs.
            outputs: The forward's outputs.
            upstream: The placeholders of the outputs' gradients.
            recompute: Run the forward's operations again in the backward, except random numbers.
        """
        self._recompute = recompute
        self._captures = {inside.name: outside for outside, inside in graph.captures}
        self._upstream = {placeholder.op for placeholder in upstream}
        self._whole = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._whole.node}
        self._functions = {f.signature.name: f for f in self._whole.library.function}
        self._written = {_source_of_handle(t).name for op in graph.get_operations() for t in self._writes(op)}
        self._forward = ancestors([*(y.op for y in outputs), *graph.control_outputs], with_control=True)
        self._forward |= {x.op for x in inputs}
        self._inputs = {x.op for x in inputs}
        self._from_weights: dict[Any, bool] = {}

    def saved_by_forward(self, targets: Sequence[Any]) -> list[Any]:
        """Return the tensors that the forward must save to compute `targets`, or only their sizes."""
        # A backward operation that only asks for a size moves into the forward.
        for op in ancestors([t.op for t in targets]):
            if op.type in _SIZE_OPS and op.inputs[0].op in self._forward:
                self._forward.add(op)
        return self._crossing(targets, self._forward)

    def saved_by_inputs_part(
        self, of_inputs: Sequence[Any], of_weights: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the tensors that the backward for the weights needs from the backward for the inputs.

        First come tensors that the backward for the inputs computes, then tensors that it only takes.
        """
        done = ancestors([t.op for t in of_inputs]) - self._forward
        done = {op for op in done if not self._follows_from_weights(op)} | self._upstream
        crossing = self._crossing(of_weights, self._forward | done)
        shared = [t for t in crossing if t.op in self._forward or t.op in self._upstream]
        return [t for t in crossing if t.op not in self._forward and t.op not in self._upstream], shared

    def _crossing(self, targets: Sequence[Any], side: set[Any]) -> list[Any]:
        """Return the tensors made on `side` that operations not on it read to compute `targets`."""
        found: dict[str, Any] = {}
        seen: set[Any] = set()
        stack = []
        for target in targets:
            if target.op in side and not self._runs_again(target.op):
                found[target.name] = target
            else:
                stack.append(target.op)
        while stack:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            for tensor in map(_source_of_handle, op.inputs):
                if tensor.op in side and not self._runs_again(tensor.op):
                    found[tensor.name] = tensor
                else:
                    stack.append(tensor.op)
        return [found[name] for name in sorted(found)]

    def _runs_again(self, op: Any) -> bool:
        """Return whether the backward runs a forward operation again instead of keeping its result."""
        if op in self._inputs or op in self._upstream:
            return False
        if self._recompute and op in self._forward:
            return self._is_pure(op)
        return self._follows_from_weights(op)

    def _is_pure(self, op: Any) -> bool:
        """Return whether an operation gives the same result twice in a step."""
        if op.type == "ReadVariableOp" or op.type in _LOOP_OPS:
            handles = {_source_of_handle(t).name for t in op.inputs if t.dtype == tf.resource}
            return handles.isdisjoint(self._written) and self._only_reads(self._nodes[op.name])
        return op.type == "Placeholder" or not op.op_def.is_stateful

    def _writes(self, op: Any) -> list[Any]:
        """Return the handles of variables that an operation may change.

        An operation with functions inside has an attribute that lists the variables that it only reads.
        """
        if op.type in _READ_OPS:
            return []
        said = self._nodes[op.name].attr.get("_read_only_resource_inputs")
        only_read = () if said is None else said.list.i
        return [t for i, t in enumerate(op.inputs) if t.dtype == tf.resource and i not in only_read]

    def _only_reads(self, node: Any) -> bool:
        """Return whether a node, and the functions inside it, have no effects and draw no random numbers."""
        inside = [
            name
            for attr in node.attr.values()
            for name in (attr.func.name, *(f.name for f in attr.list.func))
        ]
        functions = [self._functions[name] for name in inside if name in self._functions]
        if functions:
            return all(self._only_reads(n) for function in functions for n in function.node_def)
        definition = op_def_registry.get(node.op)
        return node.op in _READ_OPS or (definition is not None and not definition.is_stateful)

    def _follows_from_weights(self, op: Any) -> bool:
        """Return whether an operation's result depends only on weights and constants."""
        if op not in self._from_weights:
            stack = [op]
            while stack:
                top = stack[-1]
                missing = [t.op for t in top.inputs if t.op not in self._from_weights]
                if missing:
                    stack.extend(missing)
                    continue
                self._from_weights[stack.pop()] = self._judge(top)
        return self._from_weights[op]

    def _judge(self, op: Any) -> bool:
        """Return `_follows_from_weights` of an operation, given the answers for its inputs."""
        if op.type == "Placeholder":
            return op.outputs[0].name in self._captures
        if op.type in _LOOP_OPS or not self._is_pure(op):
            return False
        return op.type == "Const" or (bool(op.inputs) and all(self._from_weights[t.op] for t in op.inputs))

    def piece(self, feeds: Sequence[Any], fetches: Sequence[Any], effects: Sequence[Any] = ()) -> GraphPiece:
        """Return the piece that computes `fetches` from `feeds` and runs the operations `effects` as well."""
        fed = {tensor.name: index for index, tensor in enumerate(feeds)}
        wanted = [t.name for t in fetches if t.name not in fed]

        def run(*values: Any) -> list[Any]:
            ops = self._operations_of([t for t in fetches if t.name not in fed], effects, fed)
            used = {_source_of_handle(t).name for op in ops for t in op.inputs}
            capture = tf.compat.v1.get_default_graph().capture
            given = {name: values[index] for name, index in fed.items()}
            inside = {name: value for name, value in given.items() if name in used}
            inside |= {name: capture(outside) for name, outside in self._captures.items() if name in used}
            found = tf.graph_util.import_graph_def(
                self._definition(ops), input_map=inside, return_elements=wanted, name=""
            )
            made = dict(zip(wanted, found, strict=True))
            return [made[t.name] if t.name in made else tf.identity(given[t.name]) for t in fetches]

        return GraphPiece(run, [tf.TensorSpec(t.shape, t.dtype) for t in feeds])

    def _operations_of(self, fetches: Sequence[Any], effects: Sequence[Any], fed: dict[str, int]) -> set[Any]:
        forward = bool(effects) or all(t.op in self._forward for t in fetches)
        seen: set[Any] = set()
        stack = [*(t.op for t in fetches), *effects]
        while stack:
            op = stack.pop()
            if op in seen or (op.type == "Placeholder" and op.outputs[0].name in self._captures):
                continue
            seen.add(op)
            stack.extend(t.op for t in map(_source_of_handle, op.inputs) if t.name not in fed)
            # The backward runs after the forward anyway, so it drops control edges to it.
            stack.extend(c for c in op.control_inputs if forward or c not in self._forward)
        return seen

    def _definition(self, ops: set[Any]) -> Any:
        """Return operations as a GraphDef, without control edges from other operations."""
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
    """Return these operations of a graph and all operations that they depend on.

    Args:
        ops: The operations.
        with_control: Follow control edges too.
    """
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
    """Return the tensor that a variable's handle comes from: loops and Identity pass handles through."""
    while tensor.dtype == tf.resource and tensor.op.type in (*_LOOP_OPS, "Identity"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
