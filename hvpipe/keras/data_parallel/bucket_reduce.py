"""Announce, submit, collect: inside a graph, gradients go to the engine by bucket and come back reduced."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.compat import layers_in
from hvpipe.keras.data_parallel.backward_order import order_backward
from hvpipe.keras.gpu import on_the_host, reduces_on_gpu
from hvpipe.keras.ops import library
from hvpipe.keras.variables import identity, name_of
from hvpipe.plan.buckets import Bucket, BucketPlan, Gradient, plan_buckets
from hvpipe.plan.compression import compression_named
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")

_GPU = "GPU:0"

_TABLE_BYTES, _TABLE_BYTES_BESIDE_NCCL = 1 << 20, 64 << 20
"""From these sizes on, a table's rows are sent instead of the table, if the user gives no size."""


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are cut into buckets and sent.

    Args:
        compression: None; "bf16" or "fp16": the type in which float32 gradients are sent; or what
            hvpipe/plan/compression.py names, which needs `compressed_reduce.make_reducer`.
        bucket_bytes: Size of a fused buffer; None: HVPIPE_BUCKET_BYTES, else a default by the model's size.
        in_turn: Reduce buckets in the order of the plan instead of by urgency.
        tables: The variables, by `identity`, whose gradients have few rows that are not zero.
        tables_agreed: Whether all ranks have agreed on them when they saw gradients. Otherwise they come from
            the model's layers, and a gradient may still be dense.
        slices: Whether gradients of tables can be IndexedSlices. If not, GPUs reduce whole tables.
        on_stream: The step collects only after it has submitted everything. On a GPU the sums are then waited
            for on TensorFlow's stream, and the host goes on.
        nonfinite: What to do where a sum is NaN or Inf: "raise", "skip" or "ignore".
        places: The variables' numbers in a list that is the same on all ranks; (): 0, 1, 2 ... Ranks that
            train different parts of it differ, also if the parts have equal shapes.
    """

    compression: str | None = None
    bucket_bytes: int | None = None
    in_turn: bool = False
    on_stream: bool = False
    tables: frozenset[int] = frozenset()
    tables_agreed: bool = False
    slices: bool = True
    nonfinite: str = "ignore"
    places: tuple[int, ...] = ()


class BucketReducer:
    """Reduces the gradients of one list of variables by a fixed plan.

    Owns the step counter that the ops read, so keep it alive as long as a graph with the plan's ops runs.

    Args:
        session: The ranks that reduce together.
        name: The plan's name in the engine's messages.
        variables: The variables with a gradient, in the order of the model.
        options: How to cut and send their gradients.
    """

    def __init__(
        self, session: Session, name: str, variables: Sequence[Any], options: ReduceOptions = ReduceOptions()
    ) -> None:
        self.session = session
        self.name = name
        self.variables = list(variables)
        self.options = options
        gradients = [
            Gradient(
                f"{place} {_role(v)}",
                tuple(map(int, v.shape)),
                tf.as_dtype(v.dtype).name,
                identity(v) in options.tables,
            )
            for place, v in zip(options.places or range(len(variables)), variables, strict=True)
        ]
        self._compression = compression_named(options.compression)
        # A second phase waits for the first, but sums of NCCL may wait for all submits of a step.
        on_device = self._compression is None and reduces_on_gpu(session)
        self.plan: BucketPlan = plan_buckets(
            gradients,
            options.bucket_bytes or session.settings.bucket_bytes,
            options.compression if self._compression is None else None,
            ignores_priority=options.in_turn,
            table_bytes=_table_bytes(session, on_device) if options.slices or not on_device else None,
            by_nccl=on_device and session.engine.nccl_connects_all,
        )
        self.used = False
        """Whether any graph or eager step has announced steps of this plan."""
        self._gradients = gradients
        self._on_device = on_device
        self._on_stream = on_device and options.on_stream
        self._tables_agreed = options.tables_agreed
        self._plan_id = session.engine.add_plan(name, self._plan_to_send(), on_device)
        self._remove_plan = weakref.finalize(self, session.engine.remove_plan, self._plan_id)
        self._remove_plan.atexit = False
        with tf.init_scope(), on_the_host():
            # An input that changes every step keeps grappler from folding or sharing the announcement.
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvpipe_step")

    def dense_tables(self, gradients: Sequence[Any], variables: Sequence[Any]) -> frozenset[int]:
        """Return the tables, by `identity`, that should not go through the host: their gradients are dense.

        The same on all ranks, whose graphs are equal. The other gradients stay on the GPU.
        """
        if self._tables_agreed or not self._on_device:
            return frozenset()
        rows = [self.variables[bucket.members[0]] for bucket in self.plan.buckets if bucket.row]
        sliced = [v for g, v in zip(gradients, variables, strict=True) if isinstance(g, tf.IndexedSlices)]
        return frozenset(map(identity, rows)) - frozenset(map(identity, sliced))

    def _plan_to_send(self) -> BucketPlan:
        """Return the engine's buckets, which the numbers of `_submit` and `_collect` mean."""
        return self.plan

    def state(self) -> dict[str, Any]:
        """Return the variables that a resumed training needs and that differ between ranks, by name."""
        return {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.session.world.rank

    def end(self) -> None:
        """Free the plan's buffers. Call it once no graph made with the plan runs any more."""
        self._remove_plan()

    def announce(self, samples: Any, reduces: Any = True) -> Any:
        """Announce a step to all ranks.

        Args:
            samples: This rank's samples in the step (scalar).
            reduces: Whether the step submits gradients (bool scalar). False between accumulated steps.

        Returns:
            This rank's share of all ranks' samples (float64 scalar), once all ranks have announced.

        Raises:
            HvpipeError: In a graph that XLA is to compile.
        """
        if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise HvpipeError(
                "XLA cannot compile communication: pass jit_compile=False to the model's compile (Keras "
                "switches it on by default if there is a GPU), or to tf.function. "
                "Received: a step that reduces gradients under jit_compile=True"
            )
        self.used = True
        self.session.announcements += 1
        ones, others = _take_earlier()
        with on_the_host():
            samples = tf.cast(samples, tf.float64)
            if ones:
                reduces = tf.logical_and(reduces, tf.add_n(ones) > 0)
        with tf.control_dependencies([*others, samples]), on_the_host():
            # TensorFlow reads a variable at once. A sum it would queue behind the forward.
            announced = self.step.read_value()
            self.step.assign_add(1)
            share = library().hvpipe_begin_step(
                samples=samples,
                announced=announced,
                reduces=tf.convert_to_tensor(reduces),
                plan=self._plan_id,
            )
        order_after(share)  # "step" and "stale" collect what they submit in the next step only
        return share

    def as_submitted(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients as `submit` takes them: dense, or IndexedSlices of a table that sends its rows."""
        rows = {bucket.members[0] for bucket in self.plan.buckets if bucket.row}
        return [
            gradient if place in rows and isinstance(gradient, tf.IndexedSlices) else dense(gradient)
            for place, gradient in enumerate(gradients)
        ]

    def submit(
        self, share: Any, gradients: Sequence[Any], after: Callable[[int], Sequence[Any]] | None = None
    ) -> list[Any]:
        """Submit each bucket as soon as its gradients are computed.

        Args:
            share: The factor for this rank's gradients, from `announce`; they are multiplied when packed.
            gradients: From `as_submitted`, in the order of the variables.
            after: `after(bucket)` returns the tensors that the packing of this bucket waits for.

        Returns:
            A token for each bucket (int64 scalar, 1), to collect it by.
        """
        tensors_of = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        order_backward([[tensors_of[place] for place in bucket.members] for bucket in self.plan.buckets])
        tokens = []
        for number, bucket in enumerate(self.plan.buckets):
            with tf.control_dependencies(after(number) if after else []):
                # As Keras' optimizers: a gradient may have another type than its variable.
                tensors = [tf.cast(gradients[place], bucket.dtype) for place in bucket.members]
                tokens.append(self._send(number, share, tensors))
        return tokens

    def _send(self, number: int, share: Any, tensors: Sequence[Any]) -> Any:
        """Send the gradients of bucket `number`; return a token."""
        return self._submit(number, share, tensors)

    def collect(self, number: int, token: Any) -> list[Any]:
        """Return the reduced gradients of bucket `number`, in the order of its members."""
        bucket, shapes = self.plan.buckets[number], self._shapes(number)
        if bucket.row and self._on_device:
            return [self._collect_rows(number, token, shapes[0], bucket.dtype)]
        return self._collect(number, token, shapes, bucket.dtype)

    def _shapes(self, number: int) -> list[tuple[int, ...]]:
        """Return the shapes of the members of bucket `number`."""
        return [self._gradients[place].shape for place in self.plan.buckets[number].members]

    def _submit(self, sent: int, scale: Any, tensors: Sequence[Any]) -> Any:
        to = {"scale": scale, "plan": self._plan_id, "bucket": sent}
        first = tensors[0]
        if isinstance(first, tf.IndexedSlices):
            with on_the_host():
                rows = tf.cast(first.indices, tf.int64)
                return library().hvpipe_submit_rows(rows=rows, values=first.values, **to)
        with self._device_of(sent):
            return library().hvpipe_submit(tensors=list(tensors), **to)

    def _collect_rows(self, sent: int, token: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a table from the host on the GPU; only the rows that any rank has are copied there."""
        with on_the_host():
            rows, values = library().hvpipe_collect_rows(
                token=token, shapes=[shape], T=dtype, plan=self._plan_id, bucket=sent
            )
            whole = tf.constant(shape, tf.int32)  # which a GPU's kernels take from host memory
        rows.set_shape([None])
        values.set_shape([None, *shape[1:]])
        with tf.device(_GPU):
            table = dense(tf.IndexedSlices(values, rows, whole))
        table.set_shape(shape)
        order_after(table)
        return table

    def _device_of(self, sent: int) -> Any:
        """Return the scope of a bucket's ops: TensorFlow would choose the device by where gradients are."""
        on_device = self._on_device and not self.plan.buckets[sent].row
        return tf.device(_GPU) if on_device else on_the_host()

    def _collect(self, sent: int, token: Any, shapes: Sequence[tuple[int, ...]], dtype: str) -> list[Any]:
        with self._device_of(sent):
            tensors: list[Any] = library().hvpipe_collect(
                token=token,
                shapes=shapes,
                N=len(shapes),
                T=dtype,
                plan=self._plan_id,
                bucket=sent,
                on_stream=self._on_stream,
            )
        order_after(tensors[0])
        return tensors

    def collected_after(self, number: int, tokens: Sequence[Any]) -> list[Any]:
        """Return the tokens that a collect of bucket `number` waits for: all of them with `on_stream`.

        A wait on TensorFlow's stream would delay the rest of backward.
        """
        on_stream = self._on_stream and not self.plan.buckets[number].row
        return list(tokens) if on_stream else [tokens[number]]

    def collect_all(self, tokens: Sequence[Any]) -> list[Any]:
        """Return all reduced gradients, in the order of the variables."""
        found: list[Any] = [None] * len(self.variables)
        for number, bucket in enumerate(self.plan.buckets):
            for place, gradient in zip(bucket.members, self.collect(number, tokens[number]), strict=True):
                found[place] = gradient
        return found

    def members(self, bucket: Bucket) -> list[Any]:
        """Return the variables of a bucket."""
        return [self.variables[place] for place in bucket.members]


def _role(variable: Any) -> str:
    """Return what a variable is to its layer: "kernel". The engine compares it, with place, shape and dtype.

    Layers may have another name on each rank, and a loaded model has shorter paths.
    """
    return name_of(variable).rpartition("/")[2]


def _table_bytes(session: Session, on_device: bool) -> int | None:
    """Return the size from which on a table sends its rows; None: it is always sent whole.

    Rows go through the host. Within a host NCCL is some 50 times as fast (bench/README.md).
    """
    if session.settings.table_bytes:
        return session.settings.table_bytes
    if not (on_device and session.engine.nccl_connects_all):
        return _TABLE_BYTES
    one_host = session.world.local_size == session.world.size
    return None if one_host else _TABLE_BYTES_BESIDE_NCCL


# --- Gradients before they are submitted --------------------------------------------------------------


def dense(gradient: Any) -> Any:
    """Return IndexedSlices (of an Embedding) as a dense tensor; rows with the same index are summed."""
    return tf.convert_to_tensor(gradient)


def tables_of(model: Any) -> frozenset[int]:
    """Return the tables of a model's Embeddings, by `identity`: a batch uses few of their rows."""
    embeddings = [layer for layer in layers_in(model) if isinstance(layer, keras.layers.Embedding)]
    tables = (v for layer in embeddings for v in layer.weights if v.shape[:1] == (layer.input_dim,))
    return frozenset(map(identity, tables))


def agree_on_gradients(
    session: Session, gradients: Sequence[Any], variables: Sequence[Any]
) -> frozenset[int]:
    """Check that ranks reduce the same variables in the same order; collective.

    Returns:
        The variables, by `identity`, whose gradients are IndexedSlices on any rank. A rank whose batch does
        not use a table may have dense zeros there.

    Raises:
        MismatchError: On every rank, if ranks have the same variables in another order.
    """
    mine = [place for place, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    names = [name_of(v) for v in variables]
    digest = hashlib.sha256(repr(names).encode()).hexdigest()
    what = f"the first reduction of {len(gradients)} gradients"
    everyone = session.engine.allgather_object((mine, digest), what)
    if len({digest for _, digest in everyone}) > 1:
        _compare_names(session, session.engine.allgather_object(names, what))
    places = {place for of_rank, _ in everyone for place in of_rank}
    return frozenset(identity(v) for place, v in enumerate(variables) if place in places)


def _compare_names(session: Session, everyone: Sequence[Sequence[str]]) -> None:
    """Raise MismatchError if ranks have the same names in another order; warn of other names.

    A loaded model lacks the begin of paths: "dense/kernel" is "sequential/dense/kernel" elsewhere.
    """
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for place, (here, there) in enumerate(zip(first, theirs, strict=False)):
            if f"/{here}".endswith(f"/{there}") or f"/{there}".endswith(f"/{here}"):
                continue
            found = f"variable {place} is {here} on rank 0 and {there} on rank {rank}"
            if sorted(first) == sorted(theirs):
                raise MismatchError(
                    "All ranks should reduce gradients of the same variables in the same order. "
                    f"Received: {found}"
                )
            if session.world.rank == 0:
                logger.warning(
                    "hvpipe: gradients are averaged by their order, not by name: %s. If these are different "
                    "variables, pass the same ones in the same order on all ranks.",
                    found,
                )
            return


def one_sample(gradients: Sequence[Any]) -> Any:
    """Return 1 (int32 scalar): the samples to announce if all ranks count the same.

    It waits for a gradient. A train function that has reached the end of its data still runs ops that need no
    data, and must not announce a step then. The last variable's gradient is the first that backward computes.
    The op has its result in host memory, also beside a gradient on a GPU; to copy one from there would wait
    until the GPU has computed that gradient. TensorFlow would fold a constant, and move it to the host.
    """
    with tf.control_dependencies([gradients[-1]]):
        return library().hvpipe_one()


# --- Several reductions in one graph -------------------------------------------------------------------

# All ranks must reduce in the same order if one graph reduces several times (two optimizers, two calls). So
# each announcement waits for the announcements before it, and for everything that was collected before it.
_EARLIER = "hvpipe_earlier"


def order_after(tensor: Any) -> None:
    """Let later announcements in this graph wait for `tensor`."""
    if not tf.executing_eagerly():
        tf.compat.v1.get_default_graph().add_to_collection(_EARLIER, tensor)


def _take_earlier() -> tuple[list[Any], list[Any]]:
    """Return the tensors of `order_after` since the last call in this graph.

    For each tensor of this graph a 1 (int32 scalar) that comes when the tensor was enqueued: as in
    `one_sample`, the host does not wait for a GPU then. Tensors of graphs around this one as they are.
    """
    if tf.executing_eagerly():
        return [], []
    graph = tf.compat.v1.get_default_graph()
    found: list[Any] = graph.get_collection(_EARLIER)
    graph.clear_collection(_EARLIER)
    ones = []
    for tensor in (each for each in found if each.graph is graph):
        with tf.control_dependencies([tensor]), tf.device(tensor.device):
            ones.append(library().hvpipe_one())
    return ones, [each for each in found if each.graph is not graph]
