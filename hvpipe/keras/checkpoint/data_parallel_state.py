"""The state of data-parallel training: rank 0 writes what all ranks share, every rank what is its own.

weights/3, optimizer/5      shared: rank 0's file has them
pending/0                   with overlap="stale": the sum that the next step updates with
own/weights/7               the state of layers that each rank computes from its own data
own/start/7                 of a sum: the value to which ranks have added since
own/optimizer/9             gradients that are accumulated but not reduced
optimizers/0.other/5        of other optimizers, for a train_step with several; own/optimizers/ as above
own/states/1                of recurrent layers with stateful=True
own/metrics/0               the metrics of the epoch so far
own/compression/error/3     what compressed gradients have left out so far
own/compression/left/3      X by which the next step compresses ("powersgd:R"), and right/3, Y
own/counted                 samples since the statistics were averaged

With overlap="local" trainable weights and the optimizer's state are each rank's own, too, and there are:

own/round/momentum/3        of the outer step; also steps
own/round/anchor/3          the last averaged weights, if ranks had weights of their own, and
own/round/average/3         the average that was under way
own/round/turns             turns of fragments that have ended, and by fragment
own/round/steps_since       steps since this rank sent it; also samples_since
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.checkpoints.arrays import read_arrays
from hvpipe.checkpoints.manifest import Manifest, RankPart
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.data_position import epochs_read, has_metrics
from hvpipe.keras.checkpoint.model_check import (
    as_variable,
    check_kind,
    check_optimizer,
    check_variables,
    described,
    of_type,
)
from hvpipe.keras.checkpoint.random_state import AT_EPOCH, random_state, set_random_state
from hvpipe.keras.checkpoint.training_state import OWN, readable
from hvpipe.keras.compat import layers_in, unlisted_variables
from hvpipe.keras.data_parallel.model_methods import DataParallel
from hvpipe.keras.data_parallel.untrained_state import UntrainedState
from hvpipe.keras.fit_call import FitCall
from hvpipe.keras.initial_state import build_state, is_built, other_optimizers, settle, shared_slots
from hvpipe.keras.variables import broadcast_variables, name_of
from hvpipe.log import logger

_COUNTED, _STEPS, _PENDING = "own/counted", "own/steps", "pending/"
_OWN_WEIGHTS, _START, _ROUND = "own/weights/", "own/start/", "own/round/"
_COMPRESSION = "own/compression/"
_OTHERS, _RECURRENT = "optimizers/", "own/states/"


class DataParallelState:
    """The state of one model of `data_parallel`."""

    kind = "data_parallel"
    shares_data = True

    def __init__(self, data_parallel: DataParallel) -> None:
        self.session = data_parallel.session
        self.model = data_parallel.model
        self.data_parallel = data_parallel
        self._held: tuple[list[Any], int] = [], 0

    @property
    def is_local(self) -> bool:
        """Whether trainable weights are each rank's own."""
        return not self.data_parallel.updates.overlap.reduces_gradients

    @property
    def untrained(self) -> UntrainedState:
        """The state of layers that no gradient trains."""
        return self.data_parallel.steps.untrained

    @property
    def fit_call(self) -> FitCall:
        """The `fit` that runs."""
        return self.data_parallel.fit_call

    def build(self) -> bool:
        """Make all variables if the model is built, or its data is a dataset; return whether they exist."""
        data = self.fit_call.x
        if not is_built(self.model) and isinstance(data, tf.data.Dataset):
            build_state(self.model, data.element_spec)
        if is_built(self.model) and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        return is_built(self.model)

    def prepare(self, batch: Any) -> None:
        """Make all variables, and let all ranks start equal; collective."""
        self.data_parallel.steps.prepare(batch)

    def finish_step(self) -> None:
        """Run the updates that wait for the next step, unless they belong to it; collective."""
        self._held = self.data_parallel.updates.hold()

    def resume_data(self, manifest: Manifest) -> bool:
        """Bring data that all ranks share in an elastic job to its position."""
        elastic = self.data_parallel.elastic
        if elastic is None or not elastic.data.shares_source:
            return False
        position, notes = manifest.position, manifest.parts[0].notes
        elastic.data.resume(epochs_read(manifest), position.batch, manifest.ranks, notes)
        return True

    def notes(self, counted: int) -> dict[str, int]:
        """Return how far data that all ranks share in an elastic job was read."""
        elastic = self.data_parallel.elastic
        return {} if elastic is None else elastic.data.notes(counted)

    def can_write(self) -> bool:
        """Return whether this is not within a round of "local"."""
        return self.data_parallel.updates.mode.rounds.steps == 0

    def too_few(self) -> bool:
        """Return whether too few ranks are left."""
        elastic = self.data_parallel.elastic
        return elastic is not None and elastic.leaves

    def batch(self, counted: int) -> int:
        """Return the batch at which to resume. It is not the count if ranks were lost in the epoch."""
        elastic = self.data_parallel.elastic
        found = elastic.data.batch() if elastic is not None and counted else None
        return counted if found is None else found

    def samples(self) -> float:
        """Return the samples that this rank has trained on."""
        return self.data_parallel.steps.train_counter.total()

    def samples_in(self, batch: Any) -> Any:
        """Return how many samples a batch of this rank has."""
        return self.data_parallel.steps.samples_in(batch)

    # --- Names -------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, Any]:
        """Return the variables that are equal on all ranks, by name."""
        own = {id(v) for v in self.data_parallel.own_weights()}
        slots = {id(v) for v in self.data_parallel.equal_slots()}
        found = {f"weights/{i}": v for i, v in enumerate(self.model.variables) if id(v) not in own}
        optimizer = enumerate(self.model.optimizer.variables)
        found |= {f"optimizer/{i}": v for i, v in optimizer if id(v) in slots}
        found |= {f"optimizer/{n}": v for n, v in unlisted_variables(self.model.optimizer).items()}
        for name, other in other_optimizers(self.model).items():
            found |= {f"{_OTHERS}{name}/{i}": v for i, v in enumerate(shared_slots(other))}
        return found

    def own(self) -> dict[str, Any]:
        """Return the variables that differ between ranks, by name."""
        shared = {id(v) for v in self.shared().values()}
        found = {f"{OWN}weights/{i}": v for i, v in enumerate(self.model.variables) if id(v) not in shared}
        optimizer = enumerate(self.model.optimizer.variables)
        found |= {f"{OWN}optimizer/{i}": v for i, v in optimizer if id(v) not in shared}
        for name, other in other_optimizers(self.model).items():
            slots = enumerate(other.variables)
            found |= {f"{OWN}{_OTHERS}{name}/{i}": v for i, v in slots if id(v) not in shared}
        return found | {f"{_RECURRENT}{i}": v for i, v in enumerate(_recurrent_states(self.model))}

    def metrics(self) -> dict[str, Any]:
        """Return the variables of metrics, by name."""
        return {f"{OWN}metrics/{i}": v for i, v in enumerate(self.model.metrics_variables)}

    # --- Writing -----------------------------------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """Return the variables and the optimizer that a model must have to resume, as JSON."""
        # Other optimizers may not exist yet, and a batch of another size begins with other recurrent states.
        left_out = (_OTHERS, f"{OWN}{_OTHERS}", _RECURRENT)
        every = {**self.shared(), **self.own()}
        listed = {name: v for name, v in every.items() if not name.startswith(left_out)}
        return {
            "name": self.model.name,
            "optimizer": type(self.model.optimizer).__name__,
            "variables": described(listed),
        }

    def to_write(self) -> dict[str, Any]:
        """Return the values that this rank writes, by name."""
        shared = self.shared() if self.session.world.rank == 0 else {}
        counted = np.array([self.data_parallel.steps.train_counter.since_restart()])
        values = readable({**shared, **self.own(), **self.metrics()})
        sums, steps = self._held
        if self.session.world.rank == 0:
            values |= {f"{_PENDING}{i}": total for i, total in enumerate(sums)}
        updates = self.data_parallel.updates
        values |= {f"{_ROUND}{name}": v for name, v in updates.mode.rounds.state().items()}
        # After the line above, which may collect sums: that changes how the next ones are compressed.
        compression = updates.compression_state()
        values |= readable({f"{_COMPRESSION}{name}": v for name, v in compression.items()})
        values |= {f"{OWN}{name}": v for name, v in random_state().items()}
        starts = {i: self.untrained.start_of(v) for i, v in enumerate(self.model.variables)}
        values |= {f"{_START}{i}": start for i, start in starts.items() if start is not None}
        return values | {_COUNTED: counted, _STEPS: np.array([steps])}

    def weight_names(self) -> None:
        """Return None: all ranks have the same weights."""

    # --- Reading -----------------------------------------------------------------------------------------

    def read(self, place: Path, manifest: Manifest) -> RestoredDataParallel:
        """Read this rank's values. Raises HvpipeError if they are of another training."""
        check_kind(manifest, self.kind)
        check_optimizer(manifest, self.model.optimizer)
        rank, size = self.session.world.rank, self.session.world.size
        shared: dict[str, Any] = {}
        if rank == 0:
            names = [name for name in manifest.parts[0].names if not name.startswith(OWN)]
            shared = read_arrays(place / manifest.parts[0].file.name, names)
        own = _own_values(place, manifest.parts[rank % manifest.ranks])
        different: set[str] = set()
        if manifest.ranks != size and rank == 0:
            different = _different_weights(place, manifest)
        if manifest.ranks != size and self.is_local:
            shared |= _mean_weights(place, manifest) if rank == 0 else {}
            own = _without_round(own)
        if manifest.ranks != size:
            own = self._redistributed(place, manifest, own)
        return RestoredDataParallel(self, manifest, shared, own, different)

    def _redistributed(self, place: Path, manifest: Manifest, own: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's own values on a different number of ranks than the checkpoint's.

        Accumulated gradients are sums, so rank 0 goes on with the sum over all ranks; those of "local" stay
        a rank's own. What ranks have added to a sum goes on with rank 0, too. Metrics and their samples start
        again, and so does compression. Ranks that are new keep their own random numbers.
        """
        rank = self.session.world.rank
        types = {str(row[0]): row[3] for row in manifest.model["variables"]}
        rows = () if self.is_local else manifest.model["variables"]
        sums = {str(row[0]) for row in rows if "gradient_accumulator" in row[1]}
        kept = {
            name: value
            for name, value in own.items()
            if not name.startswith((f"{OWN}metrics/", _COUNTED, _COMPRESSION))
            and (rank < manifest.ranks or not name.startswith((f"{OWN}random/", f"{OWN}{AT_EPOCH}")))
        }
        starts = {n.replace(_START, _OWN_WEIGHTS): v for n, v in kept.items() if n.startswith(_START)}
        summed = sums.union(starts) & kept.keys()
        if not summed:
            return kept
        parts = manifest.parts if rank == 0 else ()
        others = [read_arrays(place / part.file.name, summed) for part in parts]
        for name in summed:
            dtype = types[name]
            start = of_type(starts.get(name, np.zeros_like(kept[name])), dtype)
            kept[name] = sum((of_type(other[name], dtype) - start for other in others), start=start)
        return kept


class RestoredDataParallel:
    """The values of a checkpoint on this rank.

    Args:
        state: The state to set.
        manifest: The checkpoint.
        shared: On rank 0, what all ranks share, by name.
        own: What is this rank's own, by name.
        different: On rank 0 of a different number of ranks, the names of weights of which each rank had its
            own value.
    """

    def __init__(
        self,
        state: DataParallelState,
        manifest: Manifest,
        shared: dict[str, Any],
        own: dict[str, Any],
        different: Set[str] = frozenset(),
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._shared = shared
        self._own = own
        self._different = different
        self._averaged: dict[str, Any] = {}

    def set_shared(self) -> None:
        """Set what all ranks share from rank 0's values; collective."""
        state = self._state
        check_variables(state.description()["variables"], self._manifest.model["variables"])
        variables = state.shared()
        _check_others(state.model, variables, self._manifest)
        if state.is_local and self._manifest.ranks != state.session.world.size:
            # Averages of ranks that were there.
            kept = {id(v) for v, how in state.untrained.variables() if how != "mean"}
            own = state.own().items()
            self._averaged = {n: v for n, v in own if n.startswith(_OWN_WEIGHTS) and id(v) not in kept}
            variables |= self._averaged
        if state.session.world.rank == 0:
            _assign(variables, self._shared)
        broadcast_variables(list(variables.values()))
        settle(state.model)

    def set_own(self) -> None:
        """Set this rank's statistics, sums, metrics, counts and random numbers."""
        state = self._state
        # Keras resets metrics at the beginning of an epoch.
        metrics = state.metrics() if has_metrics(self._manifest) else {}
        own = {name: v for name, v in state.own().items() if name not in self._averaged}
        _assign({**own, **metrics}, self._own)
        settle(state.model)
        starts = {n.replace(_START, _OWN_WEIGHTS): v for n, v in self._own.items() if n.startswith(_START)}
        state.untrained.resume({id(own[n]): as_variable(v, own[n]) for n, v in starts.items() if n in own})
        self._tell_of_other_ranks(own)
        if _COUNTED in self._own:
            state.data_parallel.steps.train_counter.resume(float(self._own[_COUNTED][0]))
        pending = sum(name.startswith(_PENDING) for name in self._manifest.parts[0].names)
        # Rank 0 has the sums. The others must know how many there are.
        sums = [self._shared.get(f"{_PENDING}{i}") for i in range(pending)]
        rounds, compression = (
            {name.removeprefix(prefix): v for name, v in self._own.items() if name.startswith(prefix)}
            for prefix in (_ROUND, _COMPRESSION)
        )
        state.data_parallel.updates.resume(sums, int(self._own[_STEPS][0]), rounds, compression)
        set_random_state({name.removeprefix(OWN): value for name, value in self._own.items()})

    def _tell_of_other_ranks(self, own: Mapping[str, Any]) -> None:
        """Warn, once, of variables of which each rank had its own value, on a different number of ranks."""
        kept = {id(v) for v, how in self._state.untrained.variables() if how == "none"}
        names = [name_of(v) for name, v in own.items() if name in self._different and id(v) in kept]
        self._different = frozenset()
        if names:
            logger.warning(
                "hvpipe: each of the %d ranks that wrote the checkpoint had its own value of %s. Rank r of "
                "these %d ranks continues with that of rank r %% %d.",
                self._manifest.ranks,
                ", ".join(names[:3]) + (" ..." if len(names) > 3 else ""),
                self._state.session.world.size,
                self._manifest.ranks,
            )

    def own_arrays(self) -> dict[str, Any]:
        """Return what is this rank's own, by name."""
        return self._own

    def drop(self) -> None:
        """Free the values."""
        self._shared, self._own = {}, {}


def _recurrent_states(model: Any) -> list[Any]:
    recurrent = [layer for layer in layers_in(model) if isinstance(layer, keras.layers.RNN)]
    states = [keras.tree.flatten(layer.states) for layer in recurrent if layer.stateful and layer.built]
    return [state for each in states for state in each if state is not None]


def _check_others(model: Any, variables: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise HvpipeError if a checkpoint has the state of another optimizer, which does not exist yet."""
    there = {name for name in manifest.parts[0].names if name.startswith(_OTHERS)}
    if missing := sorted(there - set(variables)):
        place, _, name = missing[0].split("/")[1].partition(".")
        holders = [layer.name for layer in layers_in(model)]
        holder = holders[int(place)] if int(place) < len(holders) else "a layer that this model lacks"
        raise HvpipeError(
            "The checkpoint has the state of an optimizer beside the compiled one, in the attribute "
            f"{name!r} of {holder}: build it for the same variables before fit, by its build(variables). "
            "Received: one that is not built, or for fewer variables"
        )


def _own_values(place: Path, part: RankPart) -> dict[str, Any]:
    return read_arrays(place / part.file.name, _names(part, OWN))


def _different_weights(place: Path, manifest: Manifest) -> set[str]:
    """Return the names of weights of which ranks had different values."""
    found: set[str] = set()
    first: dict[str, Any] = {}
    for part in manifest.parts:
        values = read_arrays(place / part.file.name, _names(part, _OWN_WEIGHTS))
        first = first or values
        found |= {name for name, value in values.items() if not np.array_equal(value, first[name])}
    return found


def _mean_weights(place: Path, manifest: Manifest) -> dict[str, Any]:
    """Return each weight averaged over the ranks, or rank 0's value if it is not a float.

    So what was under way counts as in plain averaging.
    """
    parts = [read_arrays(place / part.file.name, _names(part, _OWN_WEIGHTS)) for part in manifest.parts]
    found = dict(parts[0])
    types = {row[0]: row[3] for row in manifest.model["variables"]}
    for name, first in parts[0].items():
        dtype = types.get(name, first.dtype)
        if tf.as_dtype(dtype).is_floating:
            values = [of_type(part[name], dtype) for part in parts]
            found[name] = np.mean([v.astype(np.float64) for v in values], axis=0).astype(values[0].dtype)
    return found


def _without_round(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without a round under way, which `_mean_weights` has."""
    left_out = (f"{_ROUND}anchor", f"{_ROUND}average")
    return {name: value for name, value in own.items() if not name.startswith(left_out)}


def _names(part: RankPart, prefix: str) -> list[str]:
    return [name for name in part.names if name.startswith(prefix)]


def _assign(variables: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for name, variable in variables.items():
        if name in values and values[name].shape == tuple(variable.shape):
            variable.assign(as_variable(values[name], variable))
