"""Lets TensorFlow finish the gradients of one bucket before it goes on with backward.

A layer's backward has two products: the gradient of its weights, and that of its input, with which backward
goes on. TensorFlow's executor runs what became ready last. On one thread it first computes the inputs'
gradients down to the first layer, and then those of the weights, so no bucket can be sent before backward has
nearly ended. Control edges in the step's graph put them in order. They change no result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def order_backward(gradients: Sequence[Sequence[Any]]) -> None:
    """Let operations that only later buckets need wait for the gradients of earlier ones.

    The order of buckets is that in which backward reaches them: by how many operations they need that others
    need, too. What a bucket needs never waits for a later bucket.

    Args:
        gradients: The gradients of each bucket, in any order. Nothing happens if they are not all in the
            graph that is being made, or if TensorFlow has more than one thread for operations: then another
            one computes the weights'.
    """
    if tf.executing_eagerly() or threads() > 1 or len(gradients) < 2:
        return
    graph = tf.compat.v1.get_default_graph()
    if any(each.graph is not graph for bucket in gradients for each in bucket):
        return
    operations = graph.get_operations()
    needed = _needed_by(operations, [[each.op for each in bucket] for bucket in gradients])
    shared = [mask for mask in needed.values() if mask & (mask - 1)]
    order = sorted(range(len(gradients)), key=lambda number: sum(mask >> number & 1 for mask in shared))
    ends = {each.op for bucket in gradients for each in bucket}
    level: dict[Any, int] = {}  # of backward's operations: the first place in `order` that needs it
    done: dict[int, Any] = {}
    for operation in operations:
        mask = needed.get(operation, 0)
        if not mask or not (level or operation in ends or "gradient_tape" in operation.name):
            continue  # forward's operations were made before any of backward's
        own = level[operation] = next(at for at, number in enumerate(order) if mask >> number & 1)
        goes_on = any(level.get(each.op, own) < own for each in operation.inputs)
        # TensorFlow merges the gradients of a layer's kernel and bias, which may be in two buckets. So only
        # those operations wait with which backward goes on to more than one bucket.
        if goes_on and mask & (mask - 1):
            if own not in done:
                done[own] = tf.group(*gradients[order[own - 1]])
            operation._add_control_input(done[own])


def _needed_by(operations: Sequence[Any], buckets: Sequence[Sequence[Any]]) -> dict[Any, int]:
    """Return a bit for each bucket that needs an operation.

    TensorFlow may later order stateful operations as they were made, so each one counts as an input of the
    next.
    """
    needed: dict[Any, int] = {}
    for number, bucket in enumerate(buckets):
        for operation in bucket:
            needed[operation] = needed.get(operation, 0) | 1 << number
    later_stateful = 0
    for operation in reversed(operations):
        mask = needed.get(operation, 0)
        if operation.op_def.is_stateful:
            mask = later_stateful = mask | later_stateful
        if mask:
            needed[operation] = mask
            for before in (*(each.op for each in operation.inputs), *operation.control_inputs):
                needed[before] = needed.get(before, 0) | mask
    return needed


def threads() -> int:
    """Return how many operations TensorFlow runs at a time."""
    return int(tf.config.threading.get_inter_op_parallelism_threads() or len(os.sched_getaffinity(0)))
