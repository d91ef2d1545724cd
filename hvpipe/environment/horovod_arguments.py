"""Horovod's function arguments: hvpipe accepts those that change nothing, and refuses the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvpipe.errors import HvpipeError

# These never change anything here.
_HARMLESS = ("name", "device", "device_dense", "device_sparse", "ignore_name_scope", "sparse_as_dense")

# Each other argument: the values that change nothing, and what to use instead of the rest.
_INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "average": ((None, True), "op='sum' instead of average=False"),
    "average_aggregated_gradients": ((False, True), "gradient_accumulation_steps= of the Keras optimizer"),
    "backward_passes_per_step": ((1,), "gradient_accumulation_steps= of the Keras optimizer"),
    "gradient_predivide_factor": ((1, None), "a factor in the loss; gradients are averaged"),
    "groups": ((None,), "bucket_bytes="),
    "num_groups": ((0,), "bucket_bytes="),
    "op": ((None, "average"), "a learning rate times hvpipe.size(); gradients are averaged"),
    "postscale_factor": ((1, None), "a factor of the result"),
    "prescale_factor": ((1, None), "a factor of the argument"),
    "process_set": ((None,), "all ranks take part"),
    "scale_local_gradients": ((True, None), "all gradients are averaged"),
    "session": ((None,), "no sessions of TensorFlow 1"),
}


def check_other_arguments(function: str, given: Mapping[str, Any]) -> None:
    """Ignore Horovod's arguments that change nothing; refuse all others.

    Args:
        function: The name of the called function, for the message.
        given: The keyword arguments that hvpipe's function does not have.

    Raises:
        HvpipeError: For an argument of Horovod that would change something. The message names hvpipe's way.
        TypeError: For any other name.
    """
    for name, value in given.items():
        if name in _HARMLESS:
            continue
        if name not in _INSTEAD:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        harmless, instead = _INSTEAD[name]
        plain = value is None or isinstance(value, (bool, int, float, str))
        if not (plain and value in harmless):
            raise HvpipeError(
                f"{function} does not take Horovod's argument {name}. Instead: {instead}. "
                f"Received: {name}={value!r}"
            )
