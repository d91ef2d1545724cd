"""A call's arguments by name, so that some can be replaced before the method gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def by_name(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], handed_to: Callable[..., Any]
) -> dict[str, Any]:
    """The arguments of a call of `method`, with the names by which it can be called instead.

    What it takes as *args has the names that `handed_to` has at those places. Raises TypeError as the call
    would.
    """
    signature = inspect.signature(method)
    found: dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(found.pop(name, {}))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = len(found.pop(name, ()))
            named = list(inspect.signature(handed_to).bind_partial(*args).arguments.items()) if rest else []
            found.update(named[len(args) - rest :])
    return found


def takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a method can be given an argument by this name."""
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
