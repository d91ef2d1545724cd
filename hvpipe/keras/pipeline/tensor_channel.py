"""Tensors between the ranks of a pipeline: sends never wait, receives are posted early.

Between GPUs activations and their gradients stay on them; batches and whole numbers go through the host.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import ops
from hvpipe.session import Session

# Tags of messages that are under way at one time differ; both ends count the messages between them.
_TAGS = 30_000
_LONGEST_SHAPE = 8
_ON_DEVICES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class Expected:
    """A tensor on its way to this rank; `take` waits for it."""

    def __init__(
        self, mail: Mail, peer: int, dtype: Any, shape: Sequence[int] | None, what: str, on_device: bool
    ) -> None:
        self._mail = mail
        self._on_device = on_device
        self._peer = peer
        self._dtype = dtype
        self._shape = shape
        self._what = what
        self._header = None if shape is not None else mail.receive(peer, 8 * (_LONGEST_SHAPE + 1), what)
        self._data_tag = mail.next_tag(peer)
        self._data = None if shape is None else self._post(shape)

    def _post(self, shape: Sequence[int]) -> Any:
        nbytes = int(np.prod(shape, dtype=np.int64)) * int(self._dtype.size)
        if self._on_device:
            return self._mail.receive_on_device(self._peer, nbytes, self._what, self._data_tag)
        return self._mail.receive(self._peer, nbytes, self._what, self._data_tag)

    def take(self) -> Any:
        """The tensor."""
        shape = self._shape
        if self._header is not None:
            self._header.wait()
            header = self._header.arrived().view(np.int64)
            shape = [int(axis) for axis in header[1 : 1 + int(header[0])]]
            self._data = self._post(shape)
        assert self._data is not None
        assert shape is not None
        self._data.wait()
        if self._on_device:
            with tf.device(self._mail.device):
                return ops.take_message(self._data.number, shape, self._dtype)
        array = self._data.arrived().view(self._dtype.as_numpy_dtype).reshape(shape)
        return tf.convert_to_tensor(array)


class Mail:
    """What this rank sends to and expects from others, by world rank. One message goes at a time in a step.

    A shape that both ends know travels not; else it goes ahead, and the receive is posted when it is there.
    `device` is where tensors of floats lie on all ranks, None where they go by host memory.
    """

    def __init__(self, session: Session, device: str | None = None) -> None:
        self.device = device
        self._engine = session.engine
        self._counts_sent: Counter[int] = Counter()
        self._counts_expected: Counter[int] = Counter()
        self._under_way: deque[tuple[Any, Any]] = deque()

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
        """Send a tensor, of which the receiver expects `dtype` and `shape` (None: it learns it now).

        `on_host`, at both ends: it comes from the host and is to arrive there, whatever the device. Raises
        HvpipeError for another dtype or shape: the receiver would read its bytes as what it expects.
        """
        if tf.as_dtype(tensor.dtype) != tf.as_dtype(dtype):
            raise HvpipeError(
                "A tensor between stages should have the dtype that the model says, "
                f"{tf.as_dtype(dtype).name}. Received: {what}: dtype={tf.as_dtype(tensor.dtype).name}"
            )
        if shape is None:
            header = np.zeros(_LONGEST_SHAPE + 1, np.int64)
            if len(tensor.shape) > _LONGEST_SHAPE:
                raise HvpipeError(
                    f"A tensor between stages should have at most {_LONGEST_SHAPE} axes. "
                    f"Received: {what}: shape={tuple(tensor.shape)}"
                )
            header[0] = len(tensor.shape)
            header[1 : 1 + len(tensor.shape)] = tensor.shape
            self._post(peer, header, what)
        elif tuple(shape) != tuple(tensor.shape):
            raise HvpipeError(
                f"A tensor between stages should have the shape that the model says, {tuple(shape)}, where "
                "only the first axis may depend on the batch. "
                f"Received: {what}: shape={tuple(tensor.shape)}"
            )
        if self._stays_on_device(dtype, on_host):
            self._post_on_device(peer, tensor, what)
        else:
            self._post(peer, np.asarray(tensor), what)

    def _stays_on_device(self, dtype: Any, on_host: bool) -> bool:
        return self.device is not None and not on_host and tf.as_dtype(dtype) in _ON_DEVICES

    def _post_on_device(self, peer: int, tensor: Any, what: str) -> None:
        request = self._engine.post_send(peer, self._next_sent(peer), what)
        with tf.device(self.device):
            ops.send_message(request.number, tensor)  # which holds it until it is sent
        self._note(request, None)

    def _post(self, peer: int, array: Any, what: str) -> None:
        self._note(self._engine.send(array, peer, self._next_sent(peer), what), array)

    def _next_sent(self, peer: int) -> int:
        tag = self._counts_sent[peer] % _TAGS
        self._counts_sent[peer] += 1
        return tag

    def _note(self, request: Any, array: Any) -> None:
        """Hold a request, and its array, until it is sent."""
        self._under_way.append((request, array))
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()

    def expect(
        self, peer: int, dtype: Any, shape: Sequence[int] | None, what: str, *, on_host: bool = False
    ) -> Expected:
        """Post the receive of the next tensor from `peer`."""
        on_device = self._stays_on_device(dtype, on_host)
        return Expected(self, peer, tf.as_dtype(dtype), shape, what, on_device)

    def next_tag(self, peer: int) -> int:
        tag = self._counts_expected[peer] % _TAGS
        self._counts_expected[peer] += 1
        return tag

    def receive(self, peer: int, nbytes: int, what: str, tag: int | None = None) -> Any:
        return self._engine.receive(nbytes, peer, self.next_tag(peer) if tag is None else tag, what)

    def receive_on_device(self, peer: int, nbytes: int, what: str, tag: int) -> Any:
        return self._engine.post_receive(nbytes, peer, tag, what)

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        while self._under_way:
            self._under_way.popleft()[0].wait()
