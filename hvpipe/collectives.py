"""The public collectives on NumPy arrays, arrays of other frameworks, and Python objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvpipe.environment.horovod_arguments import check_other_arguments
from hvpipe.session import current

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvpipe.engine.engine import Compression, Op

__all__ = ["allgather", "allgather_object", "allreduce", "barrier", "broadcast", "broadcast_object"]


def allreduce(
    array: Any,
    op: Op = "average",
    compression: Compression = None,
    out: NDArray[Any] | None = None,
    **others: Any,
) -> NDArray[Any]:
    """Average or sum an array over all ranks. The result has the same bits on every rank.

    All ranks call it together. Half types are added in float32, and sums are rounded once for the
    ranks of a host and again at each further host. NCCL, which reduces arrays in device memory, adds them in
    their own type.

    Args:
        array: Of float32, float64, float16 or bfloat16, with the same shape and dtype on every rank: a NumPy
            array, an array that supports DLPack, or a nested sequence. An array in device memory needs `out`,
            and then all ranks must give device arrays.
        op: "average" or "sum".
        compression: "bf16" or "fp16" to send float32 as a half type; None to send it as it is.
        out: Where to write the result; may be `array` itself, and otherwise does not overlap it. After an
            error its contents are undefined, and may still change.
        **others: Arguments of Horovod that change nothing here, such as `name`.

    Returns:
        `out`, or a new array of the same shape and dtype.

    Raises:
        HvpipeError: Before `init`, or for an argument that hvpipe does not take.
        MismatchError: If the ranks give different shapes, dtypes or operations.
        DeadlineError: If a rank does not take part in time.
        PeerError: If another rank failed.

    Example:
        ```python
        loss = hvpipe.allreduce([loss])[0]
        hvpipe.allreduce(gradient, op="sum", out=gradient)
        ```
    """
    if others:
        check_other_arguments("allreduce", others)
    found = current().engine.allreduce(array, op, compression, out)
    size = getattr(found, "size", None)  # a method of a device array
    current().reduced_by_hand += size if isinstance(size, int) else 1 << 40  # these may be gradients
    return found


def allgather(array: Any, **others: Any) -> NDArray[Any]:
    """Concatenate the arrays of all ranks along axis 0, in rank order. All ranks call it together.

    Args:
        array: At least one axis, in host memory. Ranks may contribute different lengths of axis 0; the other
            axes and the dtype are the same on every rank.
        **others: Arguments of Horovod that change nothing here, such as `name`.

    Returns:
        The same array on every rank.

    Raises:
        HvpipeError: Before `init`, for a scalar, or for an argument that hvpipe does not take.
        MismatchError: If the ranks give different dtypes or axes.
        DeadlineError: If a rank does not take part in time.
        PeerError: If another rank failed.

    Example:
        ```python
        predictions = hvpipe.allgather(model.predict(my_part))
        ```
    """
    check_other_arguments("allgather", others)
    return current().engine.allgather(array)


def broadcast(array: Any, root_rank: int = 0, *, root: int | None = None, **others: Any) -> NDArray[Any]:
    """Return the array of one rank on every rank. All ranks call it together.

    Args:
        array: The same shape and dtype on every rank. A device array is overwritten with the result.
        root_rank: The rank whose array is sent.
        root: Another name for `root_rank`.
        **others: Arguments of Horovod that change nothing here, such as `name`.

    Returns:
        A new NumPy array, or the device array itself.

    Raises:
        HvpipeError: Before `init`, if there is no such rank, or for an argument that hvpipe does not take.
        MismatchError: If the ranks give different shapes, dtypes or roots.
        DeadlineError: If a rank does not take part in time.
        PeerError: If another rank failed.

    Example:
        ```python
        weights = hvpipe.broadcast(weights)  # rank 0's, everywhere
        ```
    """
    check_other_arguments("broadcast", others)
    return current().engine.broadcast(array, root_rank if root is None else root)


def allgather_object(value: Any, **others: Any) -> list[Any]:
    """Return the values of all ranks on every rank. All ranks call it together.

    Args:
        value: Anything that pickle can write; may differ by rank.
        **others: Arguments of Horovod that change nothing here, such as `name`.

    Returns:
        The values in rank order.

    Raises:
        HvpipeError: Before `init`, or for an argument that hvpipe does not take.
        DeadlineError: If a rank does not take part in time.
        PeerError: If another rank failed.

    Example:
        ```python
        hosts = hvpipe.allgather_object(socket.gethostname())
        ```
    """
    check_other_arguments("allgather_object", others)
    return current().engine.allgather_any_object(value)


def broadcast_object(value: Any, root_rank: int = 0, *, root: int | None = None, **others: Any) -> Any:
    """Return the value of one rank on every rank. All ranks call it together.

    Args:
        value: Anything that pickle can write; ignored on the other ranks.
        root_rank: The rank whose value is sent.
        root: Another name for `root_rank`.
        **others: Arguments of Horovod that change nothing here, such as `name`.

    Returns:
        The root's value.

    Raises:
        HvpipeError: Before `init`, if there is no such rank, or for an argument that hvpipe does not take.
        DeadlineError: If a rank does not take part in time.
        PeerError: If another rank failed.

    Example:
        ```python
        config = hvpipe.broadcast_object(read_config() if hvpipe.rank() == 0 else None)
        ```
    """
    check_other_arguments("broadcast_object", others)
    return current().engine.broadcast_any_object(value, root_rank if root is None else root)


def barrier() -> None:
    """Wait until all ranks have called this.

    Raises:
        HvpipeError: Before `init`.
        MismatchError: If another rank called something else.
        DeadlineError: If a rank does not arrive in time.
        PeerError: If another rank failed.

    Example:
        ```python
        if hvpipe.rank() == 0:
            download()
        hvpipe.barrier()
        ```
    """
    current().engine.agree("barrier")
