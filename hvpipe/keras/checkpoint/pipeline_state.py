"""The state of a pipeline: each rank writes its stages, under names that do not depend on the cuts.

pipeline_values.py has those. Every rank also writes what is its own: own/logs and own/metrics of the epoch so
far, own/random, and own/best, the best weights of its stages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvpipe.checkpoints.arrays import read_arrays
from hvpipe.checkpoints.manifest import Manifest
from hvpipe.keras import compat
from hvpipe.keras.checkpoint.callback_state import BEST
from hvpipe.keras.checkpoint.data_position import has_metrics
from hvpipe.keras.checkpoint.inheritance import Held, shares
from hvpipe.keras.checkpoint.model_check import as_variable
from hvpipe.keras.checkpoint.pipeline_values import KIND, describe, read_values, variables_to_write
from hvpipe.keras.checkpoint.random_state import AT_EPOCH, random_state, set_random_state
from hvpipe.keras.checkpoint.training_state import OWN, readable
from hvpipe.keras.fit_call import FitCall
from hvpipe.keras.pipeline.model import PipelineParallel
from hvpipe.keras.pipeline.model_file import optimizer_of
from hvpipe.keras.pipeline.state_names import RankState, numbers_of

_LOGS = "own/logs"


class PipelineState:
    """The state of one model of `pipeline_parallel`."""

    kind = KIND
    shares_data = False

    def __init__(self, pipeline: PipelineParallel) -> None:
        self.session = pipeline.context.session
        self.pipeline = pipeline
        self._rank_state: RankState | None = None
        self._share: frozenset[str] | None = None

    @property
    def fit_call(self) -> FitCall:
        """The `fit` that runs."""
        return self.pipeline.fit_call

    def build(self) -> bool:
        """Name the state of this rank; collective. A pipeline is always built."""
        self.named()
        return True

    def prepare(self, batch: Any) -> None:
        """Do nothing: all ranks have started equal."""

    def finish_step(self) -> None:
        """Do nothing: a step ends with its updates."""

    def can_write(self) -> bool:
        """Return True."""
        return True

    def too_few(self) -> bool:
        """Return False: a pipeline does not survive the loss of a rank."""
        return False

    def batch(self, counted: int) -> int:
        """Return the count."""
        return counted

    def notes(self, counted: int) -> dict[str, int]:
        """Return nothing: batches tell where all ranks are."""
        return {}

    def resume_data(self, manifest: Manifest) -> bool:
        """Return False: all ranks read Keras's iterator."""
        return False

    def samples(self) -> float:
        """Return the samples of the whole pipeline."""
        return float(self.pipeline.samples_trained)

    def samples_in(self, batch: Any) -> Any:
        """Return the length of a batch's tensors, which is the same for all."""
        return tf.nest.flatten(batch)[0].shape[0]

    def named(self) -> RankState:
        """Return the state of this rank; collective the first time."""
        if self._rank_state is None:
            self._rank_state = self.pipeline.rank_state()
        return self._rank_state

    def metrics(self) -> dict[str, Any]:
        """Return the variables of metrics, by name."""
        return {f"{OWN}metrics/{i}": v for i, v in enumerate(self.pipeline.metrics_variables)}

    def description(self) -> dict[str, Any]:
        """Return the variables and the optimizer that a model must have to resume, as JSON."""
        name = self.pipeline.context.layout.stages.graph.name
        return describe(name, self.named(), optimizer_of(self.pipeline))

    def to_write(self) -> dict[str, Any]:
        """Return the values that this rank writes, by name."""
        if self._share is not None:
            named = self.named().named
            return readable({name: named[name] for name in sorted(self._share)})
        values = readable({**variables_to_write(self.named(), self.session.world.rank), **self.metrics()})
        values |= {f"{OWN}{name}": value for name, value in random_state().items()}
        return values | {_LOGS: np.array(self.pipeline.logs.state(), np.float64)}

    def weight_names(self) -> list[str]:
        """Return the names of this rank's `weights`."""
        numbers = numbers_of(self.named().variables)
        return [f"weights/{numbers[id(v)]}" for v in self.pipeline.weights]

    # --- After the loss of a rank, on those that are left ------------------------------------------------

    @property
    def counts_updates(self) -> bool:
        """Whether `inherit` can work: under --elastic, if stages have replicas."""
        return self.pipeline.context.undo is not None

    @property
    def updates(self) -> int:
        """The steps that have updated this rank's weights, if they are counted."""
        undo = self.pipeline.context.undo
        return 0 if undo is None else undo.updates

    def inherit(self, place: tuple[int, int, int] | None) -> bool:
        """Take back a step that did not end, and divide the state among the ranks; collective.

        Afterwards `to_write` returns this rank's share of the state, without what is each rank's own.

        Args:
            place: The steps that this rank has done, the epoch, and the batches done in it; None if its state
                is not that of a place.

        Returns:
            Whether the ranks have the whole state, all of the same place.
        """
        undo, state = self.pipeline.context.undo, self._rank_state
        mine = None
        if undo is not None and state is not None and place is not None:
            undo.undo()
            trains = bool(compat.trained_variables(optimizer_of(self.pipeline)))
            mine = Held(place, trains, frozenset(state.named))
        held = self.session.engine.allgather_object(mine, "saving replicas")
        divided = shares(held, 0 if state is None else len(state.variables))
        self._share = None if divided is None else divided[self.session.world.rank]
        return divided is not None

    def read(self, place: Path, manifest: Manifest) -> RestoredPipeline:
        """Read this rank's values. Raises HvpipeError if they are of another training."""
        rank, size = self.session.world.rank, self.session.world.size
        values = read_values(place, manifest, self.named(), optimizer_of(self.pipeline), rank)
        part = manifest.parts[rank % manifest.ranks]
        # Ranks that were left after a loss have written as many parts as they were, of the layout before it.
        if manifest.ranks == size == part.notes.get("ranks", size):
            names = [name for name in part.names if name.startswith(OWN)]
            own = read_arrays(place / part.file.name, names)
        else:  # all ranks read the same data, in the same order
            part = manifest.parts[0]
            names = [name for name in part.names if name.startswith(f"{OWN}{AT_EPOCH}")]
            own = read_arrays(place / part.file.name, names)
        mine = set(self.weight_names())
        for part in manifest.parts:  # of any layout
            of_best = [name for name in part.names if name.startswith(BEST)]
            names = [name for name in of_best if name.split("/", 3)[3] in mine and name not in own]
            own |= read_arrays(place / part.file.name, names)
        return RestoredPipeline(self, manifest, values, own)


class RestoredPipeline:
    """The values of a checkpoint on this rank.

    Args:
        state: The state to set.
        manifest: The checkpoint.
        values: The variables of this rank, by name.
        own: What is this rank's own, by name.
    """

    def __init__(
        self, state: PipelineState, manifest: Manifest, values: dict[str, Any], own: dict[str, Any]
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._values = values
        self._own = own

    def set_shared(self) -> None:
        """Set the variables of this rank."""
        named = self._state.named().named
        for name, value in self._values.items():
            named[name].assign(value)
        self._state.pipeline.settle()
        self._state.pipeline.context.shared.mark_diverged()

    def set_own(self) -> None:
        """Set this rank's logs, metrics and random numbers."""
        state = self._state
        # Keras resets metrics and logs at the beginning of an epoch.
        if has_metrics(self._manifest) and _LOGS in self._own:
            for name, variable in state.metrics().items():
                if name in self._own:
                    variable.assign(as_variable(self._own[name], variable))
            loss_sum, samples, samples_here = self._own[_LOGS].tolist()
            state.pipeline.logs.resume(loss_sum, int(samples), int(samples_here))
        set_random_state({name.removeprefix(OWN): value for name, value in self._own.items()})

    def own_arrays(self) -> dict[str, Any]:
        """Return what is this rank's own, by name."""
        return self._own

    def drop(self) -> None:
        """Free the values."""
        self._values, self._own = {}, {}
