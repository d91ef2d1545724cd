"""Tensor channel between the ranks of a pipeline: sends never wait, receives are posted early.

Activations, their gradients, and sums of weights' gradients stay on the GPU if all ranks have one. Batches
and integers go through host memory.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import ops
from hvpipe.keras.gpu import on_the_host
from hvpipe.session import Session

# Tags repeat after this many messages between two ranks; both ends count them. The engine keeps a queue for
# each tag (600 bytes). Messages in flight with the same tag wait for each other.
_TAGS = 2_000
_MOST_AXES = 8
_DEVICE_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
# Elements of first messages, and of first sums: NCCL allocates before TensorFlow fills the GPU. How it sums
# depends on the size.
_FIRST_MESSAGE, _FIRST_SUMS = 1 << 8, (1 << 8, 1 << 22)


class TensorChannel:
    """Sends tensors to other ranks and receives tensors from them, by world rank; sums them over groups.

    Both ends agree on the order: the n-th tensor that a rank sends to a peer is the n-th that this peer
    receives from it. If both ends know a tensor's shape, only its values travel. Otherwise a header with the
    shape goes first, and the values' receive is posted when the header has arrived.
    """

    def __init__(self, session: Session, device: str | None = None) -> None:
        """`device` is where float tensors are on all ranks; None sends them through host memory."""
        self._device = device
        self._engine = session.engine
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self.by_nccl = device is not None and session.engine.messages_by_nccl
        """Whether NCCL carries tensors between all ranks."""

    def send(
        self,
        peer: int,
        tensor: Any,
        dtype: Any,
        shape: Sequence[int] | None,
        what: str,
        *,
        on_host: bool = False,
    ) -> None:
        """Start to send a tensor; does not wait.

        Args:
            peer: The world rank that receives it.
            tensor: The tensor or array.
            dtype: The dtype that the receiver expects.
            shape: The shape that the receiver expects, or None to send the shape first.
            what: Describes the tensor in errors.
            on_host: Send it through host memory, whatever the device. Must be the same at both ends.

        Raises:
            HvpipeError: The dtype or the shape differs, so the receiver would misread the bytes.
        """
        if tf.as_dtype(tensor.dtype) != tf.as_dtype(dtype):
            raise HvpipeError(
                "A tensor between stages should have the dtype that the model gives, "
                f"{tf.as_dtype(dtype).name}. Received: {what}: dtype={tf.as_dtype(tensor.dtype).name}"
            )
        if shape is None:
            self._send_from_host(peer, _header(tensor, what), what)
        elif tuple(shape) != tuple(tensor.shape):
            raise HvpipeError(
                f"A tensor between stages should have the shape that the model gives, {tuple(shape)}; "
                "only the first axis may depend on the batch. "
                f"Received: {what}: shape={tuple(tensor.shape)}"
            )
        if self._stays_on_device(dtype, on_host):
            request = self._engine.post_send(peer, self._next_tag(self._sent, peer), what)
            with tf.device(self._device):
                ops.send_message(request.number, tensor)  # holds the tensor until it is sent
            self._keep(request, None)
        else:
            self._send_from_host(peer, np.asarray(tensor), what)

    def receive(
        self, peer: int, dtype: Any, shape: Sequence[int] | None, what: str, *, on_host: bool = False
    ) -> PendingTensor:
        """Post the receive of the next tensor from `peer`; arguments as for `send`."""
        device = self._device if self._stays_on_device(dtype, on_host) else None
        header = None
        if shape is None:
            tag = self._next_tag(self._received, peer)
            header = self._engine.receive(8 * (_MOST_AXES + 1), peer, tag, what)
        tag = self._next_tag(self._received, peer)
        return PendingTensor(self._engine, peer, tag, tf.as_dtype(dtype), shape, what, device, header)

    def connect(self, peers: Sequence[int]) -> None:
        """Exchange first messages with other ranks, for which NCCL connects them."""
        shape, what = (_FIRST_MESSAGE,), "a first message"
        pending = [self.receive(peer, tf.float32, shape, what) for peer in peers]
        for peer in peers:
            self.send(peer, tf.zeros(shape), tf.float32, shape, what)
        for message in pending:
            message.wait()
        self.finish()

    def add_group(self, ranks: Sequence[int]) -> int:
        """Make a group of ranks (ascending, with this one) and return its number; collective over them."""
        group = self._engine.add_group(ranks)
        if self.by_nccl:
            for count in _FIRST_SUMS:
                self.start_sum(group, [tf.zeros(count)], tf.float32, "a group's first sums").wait()
        return group

    def start_sum(self, group: int, tensors: Sequence[Any], dtype: Any, what: str) -> PendingSum:
        """Start to sum tensors over the ranks of a group; does not wait.

        Args:
            group: The number of `add_group`. Its ranks make the same calls in the same order.
            tensors: Floating tensors, whose shapes are the same on all ranks.
            dtype: The dtype to sum in: float32 or float64.
            what: Describes the tensors in errors.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._device is None:
            vector = np.concatenate([np.asarray(t, dtype.as_numpy_dtype).reshape(-1) for t in tensors])
            request = self._engine.group_allreduce(group, vector, what)
            ends = list(accumulate(map(math.prod, shapes)))
            parts = [vector[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            return PendingSum(self._engine, request, shapes, lambda: map(tf.convert_to_tensor, parts))
        count = sum(map(math.prod, shapes))
        with tf.device(self._device):
            summand = tf.concat([tf.reshape(tf.cast(tensor, dtype), [-1]) for tensor in tensors], 0)
            request = self._engine.post_group_reduce(group, count, dtype.name, what)
            ops.send_message(request.number, summand)

        def take() -> Any:
            with tf.device(self._device):
                vector = ops.take_message(request.number, [count], dtype)
                return tf.split(vector, [math.prod(shape) for shape in shapes])

        return PendingSum(self._engine, request, shapes, take)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        while self._in_flight:
            self._engine.wait(self._in_flight.popleft()[0])

    def _stays_on_device(self, dtype: Any, on_host: bool) -> bool:
        return self._device is not None and not on_host and tf.as_dtype(dtype) in _DEVICE_DTYPES

    def _send_from_host(self, peer: int, array: Any, what: str) -> None:
        self._keep(self._engine.send(array, peer, self._next_tag(self._sent, peer), what), array)

    @staticmethod
    def _next_tag(counts: Counter[int], peer: int) -> int:
        tag = counts[peer] % _TAGS
        counts[peer] += 1
        return tag

    def _keep(self, request: Any, array: Any) -> None:
        """Hold a request and its array until it is sent."""
        self._in_flight.append((request, array))
        while self._in_flight and self._in_flight[0][0].done:
            self._in_flight.popleft()


class PendingTensor:
    """A tensor on its way to this rank. Without a `shape`, its `header` brings it."""

    def __init__(
        self,
        engine: Any,
        peer: int,
        tag: int,
        dtype: Any,
        shape: Sequence[int] | None,
        what: str,
        device: str | None,
        header: Any,
    ) -> None:
        self._engine = engine
        self._peer = peer
        self._tag = tag
        self._dtype = dtype
        self._shape = shape
        self._what = what
        self._device = device
        self._header = header
        self._data = None if shape is None else self._post(shape)

    def wait(self) -> Any:
        """Wait for the tensor and return it."""
        shape = self._shape
        if shape is None:
            self._engine.wait(self._header)
            header = self._header.arrived().view(np.int64)
            shape = [int(axis) for axis in header[1 : 1 + int(header[0])]]
            self._data = self._post(shape)
        assert self._data is not None
        self._engine.wait(self._data)
        if self._device is not None:
            with tf.device(self._device):
                return ops.take_message(self._data.number, shape, self._dtype)
        array = self._data.arrived().view(self._dtype.as_numpy_dtype).reshape(shape)
        with on_the_host():  # a copy to a GPU would wait for all that was enqueued there
            return tf.convert_to_tensor(array)

    def _post(self, shape: Sequence[int]) -> Any:
        size_bytes = int(np.prod(shape, dtype=np.int64)) * int(self._dtype.size)
        post = self._engine.receive if self._device is None else self._engine.post_receive
        return post(size_bytes, self._peer, self._tag, self._what)


class PendingSum:
    """Sums over a group's ranks, on their way in one vector."""

    def __init__(
        self, engine: Any, request: Any, shapes: Sequence[tuple[int, ...]], take: Callable[[], Iterable[Any]]
    ) -> None:
        """`take` returns the parts of the vector, one of each shape, once the request has ended."""
        self._engine = engine
        self._request = request
        self._shapes = shapes
        self._take = take

    def wait(self) -> list[Any]:
        """Wait for the sums and return them, in the order of the tensors."""
        self._engine.wait(self._request)
        return [tf.reshape(part, shape) for part, shape in zip(self._take(), self._shapes, strict=True)]


def _header(tensor: Any, what: str) -> Any:
    """Return the number of axes and their lengths, as int64."""
    if len(tensor.shape) > _MOST_AXES:
        raise HvpipeError(
            f"A tensor between stages should have at most {_MOST_AXES} axes. "
            f"Received: {what}: shape={tuple(tensor.shape)}"
        )
    header = np.zeros(_MOST_AXES + 1, np.int64)
    header[0] = len(tensor.shape)
    header[1 : 1 + len(tensor.shape)] = tensor.shape
    return header
