"""A function's forward and backward as separate graphs, so that other work can run between them.

An eager tape keeps every intermediate result and runs the whole backward at once. Here the forward and its
gradient are traced into one graph, which is then cut:

    inputs -> [forward] -> outputs                        saved: tensors kept for the backward
                  | saved
    gradients -> [backward for inputs] -> gradients of the inputs
                  | saved, and tensors that both parts need
                 [backward for weights] -> added to the accumulators

Values that depend only on weights are computed again instead of saved: weights do not change until the end of
the step. With `recompute`, everything but the inputs and the state of random numbers is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import tensorflow as tf

from hvpipe.keras.graph.graph_pieces import FlatFunction, GraphPiece, TracedGraph


@dataclass(frozen=True)
class SplitGradient:
    """A forward and its backward. All values are flat lists of tensors.

    Attributes:
        forward: `forward(inputs)` returns the outputs and the tensors that the backward needs (`saved`).
        backward: `backward(saved, gradients, first)` returns the gradients of the floating inputs. It adds
            the variables' gradients to the accumulators; with `first` it sets the accumulators.
        backward_inputs: The first part of the backward: `backward_inputs(saved, gradients)` returns the
            gradients of the inputs and the tensors that the second part needs.
        backward_weights: The second part: `backward_weights(saved, first)` changes the accumulators.
        accumulators: The sums of gradients, in the order of `variables`.
        variables: The variables that have a gradient.
        captured: Tensors and variable handles from outside that the function reads.
        reached: For each floating input, whether it has a gradient. If not, the backward returns 0.
    """

    forward: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    backward: Callable[[Sequence[Any], Sequence[Any], bool], list[Any]]
    backward_inputs: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    backward_weights: Callable[[Sequence[Any], bool], object]
    accumulators: list[Any]
    variables: list[Any]
    captured: list[Any]
    reached: list[bool]


def split_gradient(
    function: Callable[..., Sequence[Any]],
    signature: Sequence[Any],
    variables: Sequence[Any],
    *,
    differentiated_inputs: int,
    extra_outputs: int = 0,
    recompute: bool = False,
    ignored: Collection[int] = (),
) -> SplitGradient:
    """Trace a function and its gradient into one graph, and separate the two.

    Args:
        function: Takes and returns flat tensors.
        signature: A tf.TensorSpec for each input.
        variables: The tf.Variables to differentiate with respect to.
        differentiated_inputs: How many of the first inputs get gradients, if they are floating.
        extra_outputs: The number of outputs at the end that have no gradients.
        recompute: Run the forward again in the backward instead of saving activations.
        ignored: The indices, among floating outputs, of those whose gradients are ignored.

    Returns:
        The parts.
    """
    traced = _trace(function, signature, variables, differentiated_inputs, extra_outputs, ignored)
    graph = TracedGraph(traced.graph, traced.inputs, traced.outputs, traced.upstream, recompute)
    of_inputs, of_weights = traced.of_inputs, traced.of_weights
    saved = graph.saved_by_forward([*of_inputs, *of_weights])
    saved_later, shared = graph.saved_by_inputs_part(of_inputs, of_weights)

    # Half types would lose what is added to a much larger sum.
    accumulators = [
        tf.Variable(
            tf.zeros(v.shape, tf.float32 if v.dtype.size < 4 else v.dtype),
            trainable=False,
            name="hvpipe_gradient",
        )
        for v in traced.variables
    ]
    effects = traced.graph.control_outputs
    forward = graph.piece(traced.inputs, [*traced.outputs, *saved], effects=effects).function()
    backward_feeds = [*saved, *traced.upstream]
    both = _accumulating(graph.piece(backward_feeds, [*of_inputs, *of_weights]), accumulators)
    inputs_part = graph.piece(backward_feeds, [*of_inputs, *shared, *saved_later]).function()
    weights_part = _accumulating(graph.piece([*shared, *saved_later], of_weights), accumulators)

    return SplitGradient(
        forward=_with_saved(forward, len(traced.outputs)),
        backward=lambda saved, gradients, first: both[first]([*saved, *gradients]),
        backward_inputs=_with_saved(inputs_part, len(of_inputs)),
        backward_weights=lambda saved, first: weights_part[first](saved),
        accumulators=accumulators,
        variables=traced.variables,
        captured=[outside for outside, _ in traced.graph.captures],
        reached=traced.reached,
    )


def _with_saved(function: FlatFunction, results: int) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Return a function that takes lists of values, and returns its first `results` results and the rest."""

    def run(*values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = function(list(chain(*values)))
        return found[:results], found[results:]

    return run


@dataclass(frozen=True)
class _Traced:
    """A function and its gradient in one graph; `upstream` are the placeholders of outputs' gradients."""

    graph: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    upstream: Sequence[Any]
    of_inputs: list[Any]
    reached: list[bool]
    variables: list[Any]  # that have a gradient
    of_weights: list[Any]


def _trace(
    function: Callable[..., Sequence[Any]],
    signature: Sequence[Any],
    variables: Sequence[Any],
    differentiated_inputs: int,
    extra_outputs: int,
    ignored: Collection[int],
) -> _Traced:
    """Trace a function with its gradient; arguments as for `split_gradient`."""
    traced: dict[str, Any] = {}

    def whole(*inputs: Any) -> Any:
        # The graph must compute the saved tensors, so no input may be returned as it is.
        outputs = [tf.identity(y) for y in function(*inputs)]
        floating = [y for y in outputs[: len(outputs) - extra_outputs] if y.dtype.is_floating]
        upstream = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in floating]
        sought = [x for x in inputs[:differentiated_inputs] if x.dtype.is_floating]
        every = [*sought, *variables]
        counted = [index for index in range(len(floating)) if index not in ignored]
        found: list[Any] = [None] * len(every)
        if counted and every:
            found = tf.gradients([floating[k] for k in counted], every, [upstream[k] for k in counted])
        dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
        of_inputs = [
            tf.zeros_like(x) if g is None else tf.identity(g)
            for x, g in zip(sought, dense[: len(sought)], strict=True)
        ]
        used = [(v, g) for v, g in zip(variables, dense[len(sought) :], strict=True) if g is not None]
        traced.update(inputs=inputs, outputs=outputs, upstream=upstream, of_inputs=of_inputs)
        traced.update(reached=[g is not None for g in dense[: len(sought)]])
        traced.update(variables=[v for v, _ in used], of_weights=[g for _, g in used])
        return outputs

    graph = tf.function(whole, autograph=False).get_concrete_function(*signature).graph
    return _Traced(graph, **traced)


def _accumulating(piece: GraphPiece, accumulators: Sequence[Any]) -> dict[bool, FlatFunction]:
    """Return functions that put the last results of a piece into the accumulators, and return the others.

    The function under True sets the accumulators; the one under False adds to them.
    """

    def run(first: bool, *values: Any) -> list[Any]:
        found = piece.run(*values)
        rest = len(found) - len(accumulators)
        for accumulator, gradient in zip(accumulators, found[rest:], strict=True):
            (accumulator.assign if first else accumulator.assign_add)(tf.cast(gradient, accumulator.dtype))
        return found[:rest]

    return {first: FlatFunction(functools.partial(run, first), piece.signature) for first in (True, False)}
