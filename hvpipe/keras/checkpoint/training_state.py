"""What a kind of training tells a checkpoint: what each rank writes, and how it is set again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from hvpipe.checkpoints.manifest import Manifest
from hvpipe.keras.fit_call import FitCall
from hvpipe.keras.variables import native
from hvpipe.session import Session

OWN = "own/"
"""What the names of values begin with that are each rank's own."""


class TrainingState(Protocol):
    """The state of one model that is trained on all ranks."""

    session: Session
    kind: str
    """Stands in the manifest: only the same kind of training resumes."""
    shares_data: bool
    """Whether each rank reads its own part of the data. If not, all read the same."""

    @property
    def fit_call(self) -> FitCall:
        """The `fit` that runs."""

    def build(self) -> bool:
        """Make all variables if the data says how; return whether they exist. Collective."""

    def prepare(self, batch: Any) -> None:
        """Make all variables, and let all ranks start equal; collective. `batch` is one, or its spec."""

    def finish_step(self) -> None:
        """Run the updates that wait for the next step. On all ranks at the same boundary."""

    def can_write(self) -> bool:
        """Return whether a checkpoint can be written at this step boundary; the same on all ranks."""

    def too_few(self) -> bool:
        """Return whether too few ranks are left, and all exit at this step boundary."""

    def batch(self, counted: int) -> int:
        """Return the batch of the epoch at which to resume, if `counted` calls have trained on one each."""

    def notes(self, counted: int) -> dict[str, int]:
        """Return what else `resume_data` needs, if `counted` calls have trained in this epoch."""

    def resume_data(self, manifest: Manifest) -> bool:
        """Bring the data to its position, and return True, if it is not read from Keras's iterator."""

    def samples(self) -> float:
        """Return the samples that this rank has trained on since the model was made; those of all ranks
        together if `shares_data` is False."""

    def samples_in(self, batch: Any) -> Any:
        """Return how many samples of a batch `samples` counts."""

    def description(self) -> dict[str, Any]:
        """Return what a model must have to resume, as JSON."""

    def to_write(self) -> dict[str, Any]:
        """Return the values that this rank writes, by name. Later steps do not change them."""

    def weight_names(self) -> list[str] | None:
        """Return names of `model.weights` that do not depend on the rank; None if all ranks have the same."""

    def read(self, place: Path, manifest: Manifest) -> Restored:
        """Read this rank's values from a checkpoint whose files are unchanged. Nothing changes yet."""


class Restored(Protocol):
    """The values of a checkpoint on this rank, to be set."""

    def set_shared(self) -> None:
        """Set what all ranks share; collective. Once all variables exist."""

    def set_own(self) -> None:
        """Set what is this rank's own; after `set_shared`, before the first step."""

    def own_arrays(self) -> dict[str, Any]:
        """Return what is this rank's own, by name, until `drop`."""

    def drop(self) -> None:
        """Free the values."""


def readable(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of variables; in host memory without copying them.

    TensorFlow never changes a tensor: the next update of a variable writes to a new buffer while somebody
    holds the old one. A device has less memory to spare than the host, so its values are copied to the host.
    """
    return {name: _on_host(native(v).read_value()) for name, v in variables.items()}


def _on_host(value: Any) -> Any:
    if "CPU" in value.device:
        return value
    with tf.device("CPU:0"):
        return tf.identity(value)
