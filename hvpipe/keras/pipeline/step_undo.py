"""Takes back a step that the loss of a rank has ended, so that the remaining ranks can be saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvpipe.keras.variables import native


class StepUndo:
    """Counts this rank's updates, and takes back what a step has changed before its update.

    The forwards of a step change statistics (BatchNormalization) and the states of seed generators. Weights
    and the optimizer change at its end, all at once. SpectralNormalization rescales its kernel in a forward,
    and gives nearly the same kernel if that is repeated.

    Args:
        variables: The statistics and seeds of this rank.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self.updates = 0
        """The steps that have updated this rank's weights."""
        self._variables = list(variables)
        self._before: list[Any] = []

    def begin(self) -> None:
        """Begin a step."""
        # TensorFlow never changes a tensor, so this copies nothing.
        self._before = [native(variable).read_value() for variable in self._variables]

    def updated(self) -> None:
        """Count the step, whose update has been applied."""
        self.updates += 1
        self._before = []

    def undo(self) -> None:
        """Take back a step that has begun and has not been counted, if there is one."""
        if self._before:
            for variable, value in zip(self._variables, self._before, strict=True):
                variable.assign(value)
        self._before = []
