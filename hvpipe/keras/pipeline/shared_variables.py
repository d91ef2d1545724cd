"""Variables that several ranks of a pipeline hold, in replicas of a stage or in layers that stages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import tensorflow as tf

from hvpipe.keras.graph.deferred_build import variables_of, weights_of
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.keras.seeds import own_seed, seeds_of
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
        weights = {id(v) for v in weights_of(chain(*layers))}
        self._statistics = [v for v in self.variables if id(v) not in weights]
        self._diverged = False
        # In one order on all ranks, so that they do not deadlock.
        self.groups = {ranks: channel.add_group(ranks) for ranks in sorted(set(self.holders.values()))}

    def broadcast(self) -> None:
        """Give shared variables the values of their first holder."""
        rank = self._session.world.rank
        self._sum(self.variables, lambda value, ranks: value if ranks[0] == rank else tf.zeros_like(value))

    def separate_seeds(self) -> None:
        """Let each holder of a seed generator draw its own random numbers; the first keeps the seed."""
        rank = self._session.world.rank
        for state in self._seeds:
            state.assign(own_seed(state.numpy(), self.holders[id(state)].index(rank)))

    def mark_diverged(self) -> None:
        """Note that the holders' statistics may differ from now on."""
        self._diverged = True

    def average_statistics(self) -> None:
        """Give shared statistics (moving averages) their mean over the holders, if they may differ.

        Called at the end of each epoch, and before evaluate, predict and saving. Sums are
        float64, so a value that is equal on all ranks keeps its bits.
        """
        if self._diverged:
            self._sum(self._statistics, lambda value, ranks: tf.cast(value, tf.float64) / len(ranks))
        self._diverged = False

    def _sum(self, variables: Sequence[Any], term: Callable[[Any, tuple[int, ...]], Any]) -> None:
        """Assign the sum over the holders of `term(value, holders)` to each floating variable.

        One bucket after another: on a GPU the engine keeps the memory of sums that are under way together.
        """
        floating = _floating(variables)
        for ranks, group in self.groups.items():
            held = [variable for variable in floating if self.holders[id(variable)] == ranks]
            sizes_bytes = [8 * math.prod(variable.shape) for variable in held]
            for members in cut_buckets(sizes_bytes, _SUM_BYTES):
                bucket = [held[member] for member in members]
                widest = widest_sum(bucket)
                terms = [term(tf.cast(variable.value, widest), ranks) for variable in bucket]
                found = self._channel.start_sum(group, terms, terms[0].dtype, bucket[0].path).wait()
                for variable, value in zip(bucket, found, strict=True):
                    variable.assign(tf.cast(value, variable.dtype))


def dtype_of_sum(variable: Any) -> Any:
    """Return the dtype in which ranks sum a floating variable's values or gradients."""
    return tf.float64 if variable.dtype == "float64" else tf.float32


def widest_sum(variables: Sequence[Any]) -> Any:
    """Return the dtype in which ranks sum these variables in one vector."""
    return max(map(dtype_of_sum, variables), key=lambda dtype: int(dtype.size))


def _floating(variables: Iterable[Any]) -> Sequence[Any]:
    return [v for v in variables if "float" in str(v.dtype)]
