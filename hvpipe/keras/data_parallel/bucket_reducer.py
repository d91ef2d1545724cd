"""Gradients to and from the engine inside a graph: announce, submit, collect, by bucket."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvpipe.errors import HvpipeError
from hvpipe.keras import ops
from hvpipe.keras.gpu import on_the_host, reduces_on_gpu
from hvpipe.plan.buckets import Bucket, BucketPlan, Gradient, plan_buckets
from hvpipe.session import Session


def native(variable: Any) -> Any:
    """The tf.Variable of a Keras variable."""
    return variable.value if hasattr(variable, "overwrite_with_gradient") else variable


def identity(variable: Any) -> int:
    """A key for this very variable: two layers of one name give their variables one path."""
    return id(native(variable))


def name_of(variable: Any) -> str:
    """A name that is the same on all ranks: Keras's path, without the numbers that Keras counts up.

    They differ where one rank has made more layers before, say a model for itself alone.
    """
    return re.sub(r"_\d+(?=[/:]|$)", "", str(getattr(variable, "path", None) or variable.name))


def dense(gradient: Any) -> Any:
    """IndexedSlices (of an Embedding) as a dense tensor, with the rows of one index summed."""
    return tf.convert_to_tensor(gradient)


def tables_of(model: Any) -> set[int]:
    """The weights of a model's Embeddings, of which a batch uses few rows, by `identity`."""
    embeddings = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
    return {identity(v) for layer in embeddings for v in layer.weights if v.shape[:1] == (layer.input_dim,)}


def sliced(session: Session, gradients: Sequence[Any], variables: Sequence[Any]) -> set[int]:
    """The variables, by `identity`, whose gradients are IndexedSlices on any rank; collective.

    A rank whose batch does not use a table may have dense zeros there.
    """
    mine = [place for place, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    session.engine.agree(f"the first reduction of {len(gradients)} gradients")
    places = {place for each in session.world.allgather_object(mine) for place in each}
    return {identity(v) for place, v in enumerate(variables) if place in places}


def counted_alike(gradients: Sequence[Any]) -> Any:
    """One sample, for ranks that count alike whatever their batch (float64 scalar); there with a gradient.

    The call of a train function that finds the data at its end runs what needs no data, and must announce
    no step. Of the last variable, which backward reaches first.
    """
    with tf.control_dependencies([gradients[-1]]):
        return tf.identity(tf.constant(1.0, tf.float64))


# Where one graph reduces several times (two optimizers, two calls), all ranks must do so in one order: each
# announcement waits for what was collected before it.
_COLLECTED = "hvpipe_collected"


def note_collected(tensor: Any) -> None:
    """Let later announcements in this graph wait for `tensor`."""
    if not tf.executing_eagerly():
        tf.compat.v1.get_default_graph().add_to_collection(_COLLECTED, tensor)


def _take_collected() -> list[Any]:
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    found: list[Any] = graph.get_collection(_COLLECTED)
    graph.clear_collection(_COLLECTED)
    return found


class Reducer:
    """Reduces one list of variables' gradients by a fixed plan; owns the step counter that the ops need.

    `tables` are those variables, by `identity`, that have gradients in few rows.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        variables: Sequence[Any],
        compression: str | None,
        bucket_bytes: int | None,
        in_turn: bool = False,
        tables: Collection[int] = (),
    ) -> None:
        self._session = session
        self.variables = list(variables)
        gradients = [
            Gradient(
                f"{place} {name_of(v)}",
                tuple(map(int, v.shape)),
                tf.as_dtype(v.dtype).name,
                identity(v) in tables,
            )
            for place, v in enumerate(variables)
        ]
        on_device = reduces_on_gpu(session)
        self.plan: BucketPlan = plan_buckets(
            gradients,
            bucket_bytes or session.settings.bucket_bytes,
            compression,
            in_turn=in_turn,
            table_bytes=None if on_device else session.settings.table_bytes,
        )
        self._gradients = gradients
        # Asked for by name: what TensorFlow would choose depends on where the gradients are.
        self._place = "GPU:0" if on_device else "CPU:0"
        self._plan_id = session.engine.add_plan(name, self.plan, on_device)
        # Whoever runs a graph with the plan's ops keeps this alive: they need `step`, a variable.
        self._remove_plan = weakref.finalize(self, session.engine.remove_plan, self._plan_id)
        self._remove_plan.atexit = False
        with tf.init_scope(), on_the_host():
            # An input that changes every step keeps grappler from folding or sharing the announcement.
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvpipe_step")

    def end(self) -> None:
        """Give the plan's buffers back; no graph that was made with it runs any more."""
        self._remove_plan()

    def announce(self, samples: Any, reduces: Any = True) -> Any:
        """Begin a step; the factor of this rank's gradients in the average over all samples (float64).

        Raises HvpipeError in a graph that XLA is to compile.
        """
        if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise HvpipeError(
                "XLA cannot compile communication: pass jit_compile=False to the model's compile (Keras "
                "switches it on by itself where there is a GPU), or to tf.function. "
                "Received: a step that reduces gradients under jit_compile=True"
            )
        self._session.announcements += 1
        with tf.control_dependencies([*_take_collected(), samples]), on_the_host():
            step = tf.convert_to_tensor(self.step.assign_add(1))
            return ops.begin_step(samples, step, tf.convert_to_tensor(reduces), self._plan_id)

    def submit(
        self, scale: Any, gradients: Sequence[Any], after: Callable[[int], Sequence[Any]] | None = None
    ) -> list[Any]:
        """Submit all gradients by bucket as each is complete; one token per bucket.

        `after(bucket)` names tensors that the bucket's packing must wait for.
        """
        tokens = []
        for number, bucket in enumerate(self.plan.buckets):
            with tf.control_dependencies(after(number) if after else []):
                tensors = [gradients[place] for place in bucket.members]
                with tf.device(self._place):
                    tokens.append(ops.submit(scale, tensors, self._plan_id, number))
        return tokens

    def collect(self, number: int, token: Any) -> list[Any]:
        """The reduced gradients of a bucket, in the order of its members."""
        bucket = self.plan.buckets[number]
        shapes = [self._gradients[place].shape for place in bucket.members]
        with tf.device(self._place):
            tensors = ops.collect(token, shapes, bucket.dtype, self._plan_id, number)
        note_collected(tensors[0])
        return tensors

    def collect_all(self, tokens: Sequence[Any]) -> list[Any]:
        """All reduced gradients, in the order of the variables."""
        found: list[Any] = [None] * len(self.variables)
        for number, bucket in enumerate(self.plan.buckets):
            for place, gradient in zip(bucket.members, self.collect(number, tokens[number]), strict=True):
                found[place] = gradient
        return found

    def members(self, bucket: Bucket) -> list[Any]:
        """The variables of a bucket."""
        return [self.variables[place] for place in bucket.members]
