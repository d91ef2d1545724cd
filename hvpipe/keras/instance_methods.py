"""Methods replaced on one instance; its class, and what is saved of it, stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class InstanceMethods:
    """The methods of an object that others stand in for; `own` calls the object's, `restore` ends it."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self._own: dict[str, Callable[..., Any]] = {}

    def own(self, name: str) -> Callable[..., Any]:
        """The object's own method."""
        return self._own[name]

    def replace(self, name: str, stand_in: Callable[..., Any]) -> None:
        """From now on `instance.name(...)` calls `stand_in(...)`, with the signature of the object's own."""
        own = getattr(self._instance, name)
        self._own[name] = own

        @functools.wraps(own)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return stand_in(*args, **kwargs)

        setattr(self._instance, name, replaced)

    def restore(self) -> None:
        """Give the object its own methods back."""
        for name in self._own:
            vars(self._instance).pop(name, None)
        self._own = {}
