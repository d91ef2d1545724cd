"""The state that layers keep and no gradient trains: every rank changes its own, and ranks combine it.

a step       each rank computes the variables from its own batch
`combine`    after an epoch, before `evaluate` and before a later `fit`; what `untrained_in` says:
             mean                 of the ranks' values, weighted by samples; whole numbers are rounded
             sum                  the value that all ranks had, plus what each of them has added to it
             only_first_replica   rank 0's value
             none                 each rank keeps its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import layers_in
from hvpipe.keras.data_parallel.verify import checksum
from hvpipe.keras.variables import broadcast_variables, name_of, untrained_in
from hvpipe.log import logger
from hvpipe.session import Session

_MOST_NAMES = 10  # in a warning


class UntrainedState:
    """The variables of one model that no gradient trains.

    Args:
        session: The ranks that train together.
        model: The model.
    """

    def __init__(self, session: Session, model: Any) -> None:
        self._session = session
        self._model = model
        self._starts: dict[int, Any] = {}  # by `id`: the values that sums had when all ranks' were equal
        self._combined = 0  # how often; if a rank is lost meanwhile, others may have done it once less
        self._told: set[int] = set()

    def variables(self) -> list[tuple[Any, str]]:
        """Return the variables, and how ranks combine each."""
        return untrained_in(layers_in(self._model))

    def check(self) -> None:
        """Raise HvpipeError for a variable that cannot be combined as it asks for."""
        for variable, how in self.variables():
            if how in ("mean", "sum") and str(variable.dtype) == "bool":
                raise HvpipeError(
                    'The aggregation "mean" or "sum" needs numbers: use an integer, "only_first_replica" or '
                    f'"none". Received: variable {name_of(variable)} of bool with aggregation="{how}"'
                )

    def start(self) -> None:
        """Let ranks add to the values that sums have now. All ranks' are equal, or soon will be."""
        self._starts = {id(v): np.array(v.numpy()) for v, how in self.variables() if how == "sum"}

    def start_of(self, variable: Any) -> Any:
        """Return the value to which ranks add, or None if this variable is no sum."""
        return self._starts.get(id(variable))

    def resume(self, starts: Mapping[int, Any]) -> None:
        """Let ranks go on adding to these values, by `id` of the variable."""
        self.start()
        self._starts |= starts

    def combine(self, weight: float) -> None:
        """Combine the ranks' values; collective. `weight` is this rank's in means, its number of samples."""
        listed, engine = self.variables(), self._session.engine
        weights = engine.agree(f"combining {len(listed)} variables that are not trained", weight)
        if not listed:
            return
        mine = np.array([[self._combined, *(checksum(v) for v, _ in listed)]], np.float64)
        combined, *sums = engine.allgather(mine).T
        if len(set(combined)) > 1:  # a rank was lost, and some ranks do this again
            self.take_over(int(np.argmax(combined)))
            return
        different = [pair for pair, each in zip(listed, sums, strict=True) if len(set(each)) > 1]
        self._warn([v for v, how in different if how == "none"])
        broadcast_variables([v for v, how in different if how == "only_first_replica"])
        total = sum(weights)
        shares = np.array(weights) / total if total else np.full(len(weights), 1 / len(weights))
        means = [pair for pair in different if pair[1] == "mean"]
        # A sum that is equal on all ranks may have changed, too.
        self._add_up([*means, *(pair for pair in listed if pair[1] == "sum")], shares)
        self._combined += 1
        self.start()

    def take_over(self, source: int) -> None:
        """Take what rank `source` has combined; collective."""
        broadcast_variables([v for v, how in self.variables() if how != "none"], source)
        self._combined = int(self._session.engine.allgather(np.array([self._combined]))[source])
        self.start()

    def _add_up(self, listed: Sequence[tuple[Any, str]], shares: Any) -> None:
        """Set means, by the ranks' shares, and sums; collective."""
        engine, rank = self._session.engine, self._session.world.rank
        parts = [self._part(variable, how, shares[rank]) for variable, how in listed]
        results: dict[int, Any] = {}
        for kind in (np.float64, np.int64):
            places = [place for place, part in enumerate(parts) if part.dtype == kind]
            if not places:
                continue
            packed = np.concatenate([parts[place] for place in places])
            ends = np.cumsum([parts[place].size for place in places])[:-1]
            if kind is np.float64:
                found = np.split(engine.allreduce(packed, op="sum"), ends)
            else:
                rows = np.split(engine.allgather(packed[np.newaxis]), ends, axis=1)
                found = [
                    _whole(row, listed[place][1], shares) for row, place in zip(rows, places, strict=True)
                ]
            results |= zip(places, found, strict=True)
        for place, numbers in results.items():
            variable = listed[place][0]
            variable.assign(_as_value(numbers, variable))

    def _part(self, variable: Any, how: str, share: float) -> Any:
        """Return what this rank gives to the sum over ranks."""
        value = _numbers(variable.numpy())
        if how == "mean":
            return value if value.dtype == np.int64 else value * share
        if self._session.world.rank == 0:
            return value  # with the start of all ranks in it, so the result is equal on all of them
        return value - _numbers(self._starts.get(id(variable), variable.numpy()))

    def _warn(self, variables: Sequence[Any]) -> None:
        new = [v for v in variables if id(v) not in self._told]
        self._told |= set(map(id, new))
        if not new or self._session.world.rank != 0:
            return
        more = f" and {len(new) - _MOST_NAMES} more" if len(new) > _MOST_NAMES else ""
        logger.warning(
            "hvpipe: each rank keeps its own value of %s%s in model %s: no gradient trains it, and its "
            'aggregation is "none", the default. To combine the values after each epoch, make it with '
            'aggregation="mean", "sum" or "only_first_replica" in add_weight or keras.Variable.',
            ", ".join(map(name_of, new[:_MOST_NAMES])),
            more,
            self._model.name,
        )


def _whole(rows: Any, how: str, shares: Any) -> Any:
    """Return the sum or the rounded mean of int64[ranks, n], also of numbers that float64 cannot hold."""
    return rows.sum(0) if how == "sum" else rows[0] + np.rint(shares @ (rows - rows[0])).astype(np.int64)


def _numbers(value: Any) -> Any:
    """Return an array's numbers as int64[n] or float64[n]; of complex ones both parts."""
    if np.iscomplexobj(value):
        return value.astype(np.complex128).reshape(-1).view(np.float64)
    whole = keras.backend.is_int_dtype(keras.backend.standardize_dtype(value.dtype))
    return value.reshape(-1).astype(np.int64 if whole else np.float64)


def _as_value(numbers: Any, variable: Any) -> Any:
    """Return what `_numbers` made of a variable's value in its type and shape again."""
    dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
    if np.issubdtype(dtype, np.complexfloating):
        numbers = numbers.view(np.complex128)
    return numbers.reshape(variable.shape).astype(dtype)
