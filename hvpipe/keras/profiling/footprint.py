"""The memory of one layer call: weights, the optimizer's slots, and tensors kept for the backward."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.graph.deferred_build import trained_by

# TensorFlow does not expose the dtype of the elements of a loop's list, so try these.
_ELEMENT_DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64, tf.bool)

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def weight_bytes(operation: Any) -> int:
    """Return the bytes of an operation's trained variables."""
    return _bytes_of(trained_variables(operation))


def trained_variables(operation: Any) -> list[Any]:
    """Return an operation's trained variables; none if it is no layer."""
    return trained_by([operation]) if isinstance(operation, keras.Layer) else []


def untrained_bytes(operation: Any) -> int:
    """Return the bytes of variables that are not trained: statistics, states of seeds, frozen weights."""
    every = operation.variables if isinstance(operation, keras.Layer) else []
    return _bytes_of(variable for variable in every if not variable.trainable)


class OptimizerSlots:
    """The slots of an optimizer. Works on clones, so the optimizer stays as it is."""

    def __init__(self, optimizer: Any) -> None:
        """Take a Keras optimizer, or anything that `keras.optimizers.get` accepts."""
        try:
            self._optimizer = keras.optimizers.get(optimizer)
            self.new_optimizer()
        except (TypeError, ValueError) as error:
            raise HvpipeError(
                "optimizer should be a Keras optimizer that its config can recreate, or the name of "
                f"one. Received: optimizer={optimizer!r}"
            ) from error

    def bytes_for(self, operation: Any) -> int:
        """Return the slot bytes of an operation's trainable variables, without slots of a single number.

        Makes the slots and frees them. The variables must have memory.
        """
        weights = trained_variables(operation)
        if not weights:
            return 0
        clone = self.new_optimizer()
        before = {id(v) for v in clone.variables}
        clone.build(weights)
        return _bytes_of(v for v in clone.variables if id(v) not in before and len(v.shape) > 0)

    def new_optimizer(self) -> Any:
        """Return an unbuilt clone."""
        return type(self._optimizer).from_config(self._optimizer.get_config())


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's values; only a guess for strings and handles."""
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)


def kept_bytes(outputs: Sequence[Any], saved: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Return the bytes of the eager tensors kept until the backward: outputs and saved, without inputs.

    Tensors that share memory, such as a reshaped tensor, count once. A list that a loop fills counts as its
    length times its first element.
    """
    before = {_address(x) for x in inputs if _has_address(x)}
    found: dict[int, int] = {}
    lists_bytes = 0
    for tensor in (*outputs, *saved):
        if tensor.dtype == tf.variant:
            lists_bytes += _list_bytes(tensor)
        elif not _has_address(tensor):
            lists_bytes += tensor_bytes(tensor)
        elif (address := _address(tensor)) not in before:
            found[address] = max(found.get(address, 0), tensor_bytes(tensor))
    return sum(found.values()) + lists_bytes


def _bytes_of(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.shape) * int(tf.as_dtype(v.dtype).size) for v in variables if v.dtype != "string")


def _has_address(tensor: Any) -> bool:
    kind = tensor.dtype
    known = kind.is_floating or kind.is_complex or kind.is_bool or kind.is_integer
    return known and not kind.is_quantized and tensor_bytes(tensor) > 0


def _address(tensor: Any) -> int:
    """Return the address of a tensor's values: the first field of its DLPack capsule."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return ctypes.c_void_p.from_address(_capsule_pointer(capsule, b"dltensor")).value or 0


def _list_bytes(handle: Any) -> int:
    """Return the bytes of a TensorList; 0 for other variants."""
    try:
        length = int(tf.raw_ops.TensorListLength(input_handle=handle))
    except tf.errors.InvalidArgumentError:  # not a list
        return 0
    if length == 0:
        return 0
    shape = tf.raw_ops.TensorListElementShape(input_handle=handle, shape_type=tf.int32)
    for dtype in _ELEMENT_DTYPES:
        try:
            first = tf.raw_ops.TensorListGetItem(
                input_handle=handle, index=0, element_shape=shape, element_dtype=dtype
            )
        except tf.errors.InvalidArgumentError:  # of another dtype
            continue
        return length * tensor_bytes(first)
    return 0
