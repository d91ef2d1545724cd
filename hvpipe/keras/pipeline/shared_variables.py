"""Variables that several ranks of a pipeline hold: replicas of a stage, and layers that stages share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from hvpipe.keras.graph.deferred_build import variables_of, weights_of
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.seeds import own_seed, seeds_of
from hvpipe.session import Session


class Sharing:
    """Who holds which variable, and the groups of ranks that sum among themselves; made by all ranks.

    `holders` has the world ranks, ascending, of each variable (by id) that several hold, this one among them;
    `groups` the engine's number for each such set of ranks.
    """

    def __init__(self, session: Session, layout: Layout) -> None:
        self._session = session
        ranks_of: dict[int, set[int]] = {}
        of_all: dict[int, Any] = {}
        for stage in range(len(layout.stages.cuts)):
            for variable in variables_of(layout.stages.layers(stage)):
                ranks_of.setdefault(id(variable), set()).update(layout.ranks_of(stage))
                of_all[id(variable)] = variable
        rank = session.world.rank
        self.holders = {
            key: tuple(sorted(ranks)) for key, ranks in ranks_of.items() if len(ranks) > 1 and rank in ranks
        }
        self.variables = [of_all[key] for key in self.holders]
        every = [layout.stages.layers(stage) for stage in range(len(layout.stages.cuts))]
        self._seeds = [state for state in seeds_of(chain(*every)) if id(state) in self.holders]
        weights = {id(v) for v in weights_of(chain(*every))}
        self._statistics = [v for v in self.variables if id(v) not in weights]
        self._apart = False
        # In one order on all ranks, so that none waits for one that waits for it.
        self.groups = {ranks: session.engine.add_group(ranks) for ranks in sorted(set(self.holders.values()))}

    def equalise(self) -> None:
        """Give shared variables the values of their first holder."""
        rank = self._session.world.rank
        self._sum(self.variables, lambda value, ranks: value if ranks[0] == rank else np.zeros_like(value))

    def separate_seeds(self) -> None:
        """Let every holder of a seed draw random numbers of its own; the first goes on with the seed's."""
        rank = self._session.world.rank
        for state in self._seeds:
            state.assign(own_seed(state.numpy(), self.holders[id(state)].index(rank)))

    def note_apart(self) -> None:
        """The holders' statistics may differ from now on."""
        self._apart = True

    def average_statistics(self) -> None:
        """Give shared statistics (moving averages) their mean over the holders.

        Nothing where they are so already. Summed in float64, so that a value that is equal on all keeps its
        bits.
        """
        if self._apart:
            self._sum(self._statistics, lambda value, ranks: value.astype(np.float64) / len(ranks))
        self._apart = False

    def _sum(self, variables: Sequence[Any], part: Callable[[Any, tuple[int, ...]], Any]) -> None:
        under_way = []
        for variable in _floating(variables):
            ranks = self.holders[id(variable)]
            value = np.asarray(variable.numpy())
            buffer = np.ascontiguousarray(part(value.astype(_wide(value.dtype)), ranks))
            request = self._session.engine.group_allreduce(self.groups[ranks], buffer, variable.path)
            under_way.append((variable, value.dtype, buffer, request))
        for variable, dtype, buffer, request in under_way:
            request.wait()
            variable.assign(buffer.astype(dtype).reshape(variable.shape))


def _wide(dtype: Any) -> Any:
    """What sums are made in."""
    return np.float64 if dtype == np.float64 else np.float32


def _floating(variables: Iterable[Any]) -> Sequence[Any]:
    return [v for v in variables if "float" in str(v.dtype)]
