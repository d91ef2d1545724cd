"""Arrays in host memory: checks them, and views them in the form that the C++ engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hvpipe.errors import HvpipeError
from hvpipe.plan.buckets import ITEM_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

REDUCIBLE = tuple(ITEM_BYTES)
"""Names of the dtypes that an all-reduce takes."""

_DTYPE_NAMES = {np.dtype(name): name for name in ("float32", "float64", "float16")}


def host_array(array: Any) -> Array:
    """Return a C-contiguous, aligned NumPy view, or copy, of an array in host memory.

    Args:
        array: A NumPy array, an array that supports DLPack, or a nested sequence of numbers.

    Raises:
        HvpipeError: If the array is not in host memory or does not hold numbers.
    """
    if type(array) is np.ndarray and _is_plain(array) and not array.dtype.hasobject:
        return array
    if isinstance(array, (np.ndarray, np.generic)) or not hasattr(array, "__dlpack__"):
        found = np.asarray(array)
    else:
        try:
            found = np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise HvpipeError(
                f"The array should be in host memory. Received: {type(array).__name__}: {error}"
            ) from error
    if found.dtype.hasobject:
        raise HvpipeError(f"The array should hold numbers. Received: dtype={found.dtype}")
    return np.require(found, requirements=("C", "A")).reshape(found.shape)


def _is_plain(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def reducible_dtype(array: Array) -> str:
    """Return the name of the array's dtype; raise HvpipeError if an all-reduce does not take it."""
    name = _DTYPE_NAMES.get(array.dtype) or (array.dtype.name if array.dtype.isnative else array.dtype.str)
    if name not in REDUCIBLE:
        raise HvpipeError(f"allreduce needs one of {', '.join(REDUCIBLE)}. Received: dtype={name}")
    return name


def check_output(out: Array, source: Array) -> Array:
    """Return `out` if the result for `source` fits in it; raise HvpipeError if not."""
    if isinstance(out, np.ndarray) and out.shape == source.shape and out.dtype == source.dtype:
        flags = out.flags
        apart = out.ctypes.data == source.ctypes.data or not np.may_share_memory(out, source)
        if apart and flags.c_contiguous and flags.aligned and flags.writeable:
            return out
    # Only now, since the text takes longer to make than a small array to reduce.
    raise HvpipeError(
        f"out should be a writable C-contiguous {source.dtype}{list(source.shape)}. "
        f"Received: {_unlike(out, source)}"
    )


def _unlike(out: Any, source: Array) -> str:
    if not isinstance(out, np.ndarray):
        return type(out).__name__
    if out.shape != source.shape or out.dtype != source.dtype:
        return f"{out.dtype}{list(out.shape)}"
    if not out.flags.c_contiguous:
        return "an array that is not C-contiguous"
    if out.flags.aligned and out.flags.writeable:
        return "an array that overlaps the one to reduce, but is not the same"
    return "an array that is " + ("read-only" if out.flags.aligned else "not aligned")


def as_bytes(array: Array) -> Array:
    """View the array's memory as uint8[nbytes]."""
    return array.reshape(-1).view(np.uint8)


def as_plain_dtype(array: Array) -> Array:
    """View the array's memory under a dtype that the buffer and DLPack protocols know.

    They do not know bfloat16, so such an array becomes uint8.
    """
    return array if array.dtype.kind in "fiu" else as_bytes(array)
