"""Findings about a training step's graph: which variables get gradients, and what follows the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import learning_rate_variable
from hvpipe.keras.variables import identity, name_of, native


@dataclass(frozen=True)
class StepFindings:
    """Facts about a step's update, found while the step's graph is traced.

    Args:
        trained: The variables that have a gradient.
        used_after_update: Names of weights and optimizer variables that the step uses after its update.
        update_is_hidden: Whether the update is in a nested graph (a tf.function, a branch), which hides what
            the step uses after it.
        dense_tables: The tables, by `identity`, whose rows should go through the host, but whose gradients
            are dense.
    """

    trained: tuple[Any, ...]
    used_after_update: tuple[str, ...] = ()
    update_is_hidden: bool = False
    dense_tables: frozenset[int] = frozenset()

    @property
    def must_update_at_once(self) -> bool:
        """Whether the update must not move to the next step."""
        return self.update_is_hidden or bool(self.used_after_update)

    def trains(self, variables: Sequence[Any]) -> bool:
        """Return whether exactly these variables have a gradient."""
        return set(map(identity, self.trained)) == set(map(identity, variables))

    def fit(self, variables: Sequence[Any]) -> bool:
        """Return whether a plan for these variables fits the step."""
        return not self.must_update_at_once and not self.dense_tables and self.trains(variables)

    def __str__(self) -> str:
        if self.update_is_hidden:
            return "an update in a tf.function or branch of its own"
        if self.dense_tables:
            return f"dense gradients of {len(self.dense_tables)} tables"
        if self.used_after_update:
            more = " ..." if len(self.used_after_update) > 3 else ""
            return f"{', '.join(self.used_after_update[:3])}{more} used after the optimizer's update"
        return f"gradients of {len(self.trained)} variables: {', '.join(map(name_of, self.trained[:3]))} ..."


class GraphInspection:
    """Finds out whether the graphs of steps fit the plan that they begin with.

    Args:
        update_is_last: Whether the update comes after the step's graph.
    """

    def __init__(self, update_is_last: bool) -> None:
        self._update_is_last = update_is_last
        self._graph: Any = None  # of the step
        self._optimizer: Any = None
        self._planned: Sequence[Any] = ()  # the variables of the plan
        self._update: StepFindings | None = None  # of the step so far
        self._operations_before: int | None = None  # the end of the update
        self._found: list[StepFindings] | None = None  # set while a step is traced without being run
        self._ended_trace = False

    def begin(self) -> None:
        """Begin the graph of a step."""
        self._graph, self._update = tf.compat.v1.get_default_graph(), None

    def update_begins(
        self, optimizer: Any, planned: Sequence[Any], trained: Sequence[Any], dense_tables: frozenset[int]
    ) -> bool:
        """Return whether the graph may update by the plan.

        Args:
            optimizer: The optimizer that updates.
            planned: The variables of the plan.
            trained: The variables that have a gradient.
            dense_tables: As in StepFindings.
        """
        nested = tf.compat.v1.get_default_graph() is not self._graph
        hidden = self._update_is_last and nested
        found = StepFindings(tuple(trained), update_is_hidden=hidden, dense_tables=dense_tables)
        self._update, self._optimizer, self._planned = found, optimizer, planned
        if found.fit(planned):
            return True
        if nested:
            # The user's tf.function would keep this graph, which has no update: end its trace.
            if self._found is not None:
                self._found.append(found)
                self._ended_trace = True
            raise _misfit(found)
        return False

    def update_ends(self) -> None:
        """Note that whatever the graph gets from now on comes after the update."""
        self._operations_before = len(self._graph.get_operations())

    def end(self) -> None:
        """End the graph. Raises HvpipeError if the plan does not fit, unless the graph is only inspected."""
        found, self._update = self._update, None
        graph, self._graph = self._graph, None
        if found is None:
            return
        if self._update_is_last and not found.update_is_hidden:
            found = replace(found, used_after_update=self._used_after_update(graph, found.trained))
        if self._found is not None:
            self._found.append(found)
        elif not found.fit(self._planned):
            raise _misfit(found)

    def _used_after_update(self, graph: Any, trained: Sequence[Any]) -> tuple[str, ...]:
        later = graph.get_operations()[self._operations_before :]
        taken = {id(tensor) for operation in later for tensor in operation.inputs}
        touched = {id(outside) for outside, inside in graph.captures if id(inside) in taken}
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        rate = learning_rate_variable(inner)  # no update changes it
        watched = [*trained, *(v for v in self._optimizer.variables if v is not rate)]
        return tuple(name_of(v) for v in watched if id(native(v).handle) in touched)

    def inspect_trace(self, trace: Callable[[], None]) -> list[StepFindings]:
        """Call `trace`, which traces steps without running them; return the findings about each graph.

        If they do not fit, the graph must not run, because it lacks the update.
        """
        found: list[StepFindings] = []
        self._found, self._ended_trace = found, False
        try:
            trace()
        except Exception:
            # `update_begins` may have ended the trace of a nested graph that must not be kept. AutoGraph
            # replaces errors that pass through it, so their type does not tell.
            if not self._ended_trace:
                raise
        finally:
            self._found = None
        return found


def _misfit(findings: StepFindings) -> HvpipeError:
    return HvpipeError(
        "hvpipe plans a step from its graph before the step runs. This graph was traced while it ran (by a "
        "custom make_train_function, or in another device scope than before), and does not fit the plan. "
        'Use overlap="backward", which needs no plan beforehand. '
        f"Received: {findings}"
    )
