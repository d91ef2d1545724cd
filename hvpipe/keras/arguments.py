"""The arguments of a call by name, so that some can be replaced before the method gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def by_name(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], handed_to: Callable[..., Any]
) -> dict[str, Any]:
    """Return the arguments of a call of `method` by name, so that it can be called with them as keywords.

    Arguments that it takes as *args get the names they have in `handed_to`, the function it passes them to.
    Raises TypeError if the call would.
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
    """Return whether a method takes an argument of this name."""
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
