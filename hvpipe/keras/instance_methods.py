"""Methods replaced on one instance. Its class and its saved form stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class InstanceMethods:
    """The replaced methods of an object. `own` returns an original; `restore` puts all originals back."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self._own: dict[str, Callable[..., Any]] = {}

    def own(self, name: str) -> Callable[..., Any]:
        """Return the object's own method."""
        return self._own[name]

    def replace(self, name: str, stand_in: Callable[..., Any]) -> None:
        """Let `instance.name(...)` call `stand_in(...)`, with the signature of the original method."""
        own = getattr(self._instance, name)
        self._own[name] = own

        @functools.wraps(own)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return stand_in(*args, **kwargs)

        setattr(self._instance, name, replaced)

    def restore(self) -> None:
        """Restore the object's own methods."""
        for name in self._own:
            vars(self._instance).pop(name, None)
        self._own = {}
