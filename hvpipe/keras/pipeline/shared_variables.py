"""Variables that several ranks of a pipeline hold, in replicas of a stage or in layers that stages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from hvpipe.errors import listed
from hvpipe.keras import compat
from hvpipe.keras.data_parallel.verify import checksum
from hvpipe.keras.graph.deferred_build import variables_of, weights_of
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.keras.seeds import own_seed, seeds_of
from hvpipe.keras.variables import name_of, untrained_in
from hvpipe.log import logger
from hvpipe.plan.buckets import cut_buckets
from hvpipe.session import Session

_SUM_BYTES = 16 << 20


class SharedVariables:
    """Knows which ranks hold which variable, and keeps the copies equal. Every method is collective.

    Attributes:
        holders: By the id of a variable that this rank shares with others: the world ranks that hold it,
            ascending.
        variables: These variables, in the order of the model.
        groups: The channel's number of each such set of ranks.
    """

    def __init__(self, session: Session, layout: Layout, channel: TensorChannel) -> None:
        self._session = session
        self._channel = channel
        ranks_of: dict[int, set[int]] = {}
        variable_of: dict[int, Any] = {}
        for stage in range(len(layout.stages.cuts)):
            for variable in variables_of(layout.stages.layers(stage)):
                ranks_of.setdefault(id(variable), set()).update(layout.ranks_of(stage))
                variable_of[id(variable)] = variable
        rank = session.world.rank
        self.holders = {
            key: tuple(sorted(ranks)) for key, ranks in ranks_of.items() if len(ranks) > 1 and rank in ranks
        }
        self.variables = [variable_of[key] for key in self.holders]
        layers = [layout.stages.layers(stage) for stage in range(len(layout.stages.cuts))]
        self._seeds = [state for state in seeds_of(chain(*layers)) if id(state) in self.holders]
        inner = [one for layer in chain(*layers) for one in compat.layers_in(layer)]
        rules = {id(v): how for v, how in untrained_in(inner)}
        no_rule = {id(v) for v in weights_of(chain(*layers))} | {id(s) for s in seeds_of(chain(*layers))}

        def ruled(rule: str) -> list[Any]:
            rest = [v for v in self.variables if id(v) not in no_rule]
            return [v for v in rest if rules.get(id(v), str(v.aggregation)) == rule]

        self.sums = ruled("sum")
        """The variables to which the ranks add (`aggregation="sum"`)."""
        self._means, self._firsts, self._own = ruled("mean"), ruled("only_first_replica"), ruled("none")
        self._numbers = {key: number for number, key in enumerate(ranks_of)}
        shared = (key for key, ranks in ranks_of.items() if len(ranks) > 1 and key not in no_rule)
        self._some_keep_own = any(rules.get(key) == "none" for key in shared)  # on any rank
        self._diverged = False
        # In one order on all ranks, so that they do not deadlock.
        self.groups = {ranks: channel.add_group(ranks) for ranks in sorted(set(self.holders.values()))}

    def broadcast(self) -> None:
        """Give shared variables the values of their first holder."""
        self._take_firsts([v for v in self.variables if tf.as_dtype(v.dtype).is_floating])

    def separate_seeds(self) -> None:
        """Let each holder of a seed generator draw its own random numbers; the first keeps the seed."""
        rank = self._session.world.rank
        for state in self._seeds:
            state.assign(own_seed(state.numpy(), self.holders[id(state)].index(rank)))

    def mark_diverged(self) -> None:
        """Note that the holders' state may differ from now on."""
        self._diverged = True

    def combine_state(self) -> None:
        """Combine what the holders have of state that is not trained, if they may differ.

        A variable's `aggregation` in Keras says how. "mean", also for BatchNormalization: the mean over the
        holders. "only_first_replica": the first one's. "none": each keeps its own, which rank 0 says once.
        "sum" was done in every step (StepState). Called at the end of each epoch, and before evaluate,
        predict and saving. Sums are float64, so a value that is equal on all ranks keeps its bits.
        """
        if self._diverged:
            self.sum(self._means, lambda v, first: tf.cast(v.value, tf.float64) / len(self.holders[id(v)]))
            self._take_firsts(self._firsts)
            self._tell_own()
        self._diverged = False

    def _take_firsts(self, variables: Sequence[Any]) -> None:
        self.sum(variables, lambda v, first: v.value if first else tf.zeros_like(v.value))

    def _tell_own(self) -> None:
        """Say once which variables differ between their holders, because nothing says how to combine them."""
        if not self._some_keep_own:
            return
        mine = {(self._numbers[id(v)], name_of(v)): checksum(v) for v in self._own}
        values: dict[tuple[int, str], set[int]] = {}
        for of_rank in self._session.engine.allgather_object(mine, "comparing shared variables"):
            for key, value in of_rank.items():
                values.setdefault(key, set()).add(value)
        differ = [name for (_, name), found in sorted(values.items()) if len(found) > 1]
        if not differ:
            return
        self._some_keep_own = False
        if self._session.world.rank == 0:
            logger.warning(
                "hvpipe: each rank that holds %s keeps its own value, a saved file gets the first rank's: "
                'no gradient trains it, and its aggregation is "none", the default. To combine the values, '
                'make it with aggregation="mean", "sum" or "only_first_replica" in add_weight or '
                "keras.Variable.",
                listed(differ),
            )

    def sum(
        self,
        variables: Sequence[Any],
        term: Callable[[Any, bool], Any],
        start: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        """Assign the sum over the holders of `term(variable, is_first_holder)` to each variable.

        One bucket after another: on a GPU the engine keeps the memory of sums that are under way together.

        Args:
            variables: Variables of numbers that this rank shares.
            term: Returns what this rank adds.
            start: Values that are added to the sum, by the id of the variable.
        """
        rank = self._session.world.rank
        numbers = [v for v in variables if str(v.dtype) != "bool"]
        for ranks, group in self.groups.items():
            held = [variable for variable in numbers if self.holders[id(variable)] == ranks]
            sizes_bytes = [8 * math.prod(variable.shape) for variable in held]
            for members in cut_buckets(sizes_bytes, _SUM_BYTES):
                bucket = [held[member] for member in members]
                terms = [term(variable, ranks[0] == rank) for variable in bucket]
                widest = tf.float64 if any(t.dtype == tf.float64 for t in terms) else widest_sum(bucket)
                terms = [tf.cast(each, widest) for each in terms]
                found = self._channel.start_sum(group, terms, widest, bucket[0].path).wait()
                for variable, value in zip(bucket, found, strict=True):
                    whole = not tf.as_dtype(variable.dtype).is_floating
                    value = tf.cast(tf.round(value) if whole else value, variable.dtype)
                    variable.assign(start[id(variable)] + value if id(variable) in start else value)


def dtype_of_sum(variable: Any) -> Any:
    """Return the dtype in which ranks sum a floating variable's values or gradients."""
    exact = variable.dtype == "float64" or not tf.as_dtype(variable.dtype).is_floating
    return tf.float64 if exact else tf.float32


def widest_sum(variables: Sequence[Any]) -> Any:
    """Return the dtype in which ranks sum these variables in one vector."""
    return max(map(dtype_of_sum, variables), key=lambda dtype: int(dtype.size))
