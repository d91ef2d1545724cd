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


class UpdateInGraph:
    """Notes where the update is in a step's graph, and returns the findings once the graph is complete.

    Args:
        graph: The graph of the step.
        trained: The variables that have a gradient.
        hidden: Whether the update is in another graph inside the step's.
        dense_tables: As in StepFindings.
    """

    def __init__(
        self,
        graph: Any,
        trained: Sequence[Any],
        hidden: bool,
        dense_tables: frozenset[int] = frozenset(),
    ) -> None:
        self._graph = graph
        self._found = StepFindings(tuple(trained), update_is_hidden=hidden, dense_tables=dense_tables)
        self._operations_before: int | None = None

    def ends(self) -> None:
        """Note that whatever the graph gets from now on comes after the update."""
        self._operations_before = len(self._graph.get_operations())

    def findings(self, optimizer: Any) -> StepFindings:
        """Return the findings of the complete graph; without `ends`, none about what follows the update."""
        if self._operations_before is None or self._found.update_is_hidden:
            return self._found
        later = self._graph.get_operations()[self._operations_before :]
        taken = {id(tensor) for operation in later for tensor in operation.inputs}
        touched = {id(outside) for outside, inside in self._graph.captures if id(inside) in taken}
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        rate = learning_rate_variable(inner)  # no update changes it
        watched = [*self._found.trained, *(v for v in optimizer.variables if v is not rate)]
        used = tuple(name_of(v) for v in watched if id(native(v).handle) in touched)
        return replace(self._found, used_after_update=used)


class GraphInspection:
    """Finds out whether the graphs of steps fit the plan that they begin with.

    Args:
        update_is_last: Whether the update comes after the step's graph.
    """

    def __init__(self, update_is_last: bool) -> None:
        self._update_is_last = update_is_last
        self._graph: Any = None  # of the step
        self._update: UpdateInGraph | None = None  # of the step
        self._planned: tuple[Any, Sequence[Any]] = None, ()  # the optimizer and the variables of the plan
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
        self._update = UpdateInGraph(self._graph, trained, hidden, dense_tables)
        self._planned = optimizer, planned
        findings = self._update.findings(optimizer)
        if findings.fit(planned):
            return True
        if nested:
            # The user's tf.function would keep this graph, which has no update: end its trace.
            if self._found is not None:
                self._found.append(findings)
                self._ended_trace = True
            raise _misfit(findings)
        return False

    def update_ends(self) -> None:
        """Note that whatever the graph gets from now on comes after the update."""
        if self._update_is_last and self._update is not None:
            self._update.ends()

    def end(self) -> None:
        """End the graph. Raises HvpipeError if the plan does not fit, unless the graph is only inspected."""
        update, self._graph, self._update = self._update, None, None
        if update is None:
            return
        optimizer, planned = self._planned
        findings = update.findings(optimizer)
        if self._found is not None:
            self._found.append(findings)
        elif not findings.fit(planned):
            raise _misfit(findings)

    def inspect_trace(self, trace: Callable[[], None]) -> list[StepFindings]:
        """Call `trace`, which traces steps without running them; return the findings about each graph."""
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
