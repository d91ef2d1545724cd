"""Lets `fit` go on in the same process without ranks that are lost.

    a rank is lost        every call of the engine raises; what runs in TensorFlow ends with an error
    go_on_without_lost    the remaining ranks get a new engine with the same plans: graphs stay valid
    agree                 on the most advanced state that one of them has complete
    restore               that state on all ranks: kept references, else a broadcast
    repeat                the steps after it, with their batches divided anew

docs/engine.md has the reasons.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvpipe.environment.job_folder import TOO_FEW
from hvpipe.errors import HvpipeError, name_lost
from hvpipe.keras.data_parallel.elastic_data import ElasticData
from hvpipe.keras.data_parallel.planned_updates import PlannedUpdates
from hvpipe.keras.data_parallel.samples import SampleCounter
from hvpipe.keras.data_parallel.untrained_state import UntrainedState
from hvpipe.keras.initial_state import settle, shared_slots
from hvpipe.keras.resize import joined, scale_learning_rate, tell_resize
from hvpipe.keras.variables import broadcast_variables, identity, native
from hvpipe.session import Resize, Session, run_directly

logger = logging.getLogger("hvpipe")


@dataclass(frozen=True)
class _Kept:
    """The state before a call of the train function or a flush, by reference.

    TensorFlow never changes a tensor that somebody holds: an update of its variable writes to a new buffer.

    Attributes:
        version: The step whose update is the last in `shared`.
        updates: How many deferred updates were complete (scalar tensor); None if none is left to a next step.
        own: Variables that may change before the update, and their values.
        shared: Variables that change in the update, and their values; empty if they change all or none.
    """

    version: int
    updates: Any
    own: list[tuple[Any, Any]]
    shared: list[tuple[Any, Any]]


@dataclass(frozen=True)
class _State:
    """What this rank can provide, from the first attempt to recover until all ranks have agreed.

    Attributes:
        version: The last step whose state it is.
        values: Variables, and their values after that step.
        scaled: The numbers of ranks that the learning rate has followed, up to that step.
    """

    version: int
    values: list[tuple[Any, Any]]
    scaled: tuple[int, ...]


@dataclass(frozen=True)
class _Standing:
    """Where a rank was when it learned of the loss; all ranks exchange theirs.

    Attributes:
        version: The last step whose state it can provide.
        sections: How many sections it has finished.
        ready: Whether it has prepared its model for the train function.
        result: The result of the last section.
        ended: Whether it has read an epoch's data to the end, but not finished the epoch.
        begun: The last step that it has begun, and goes on to.
        scaled: The numbers of ranks that its learning rate has followed.
    """

    version: int
    sections: int
    ready: bool
    result: Any
    ended: bool
    begun: int
    scaled: tuple[int, ...]


class Elastic:
    """Survives the loss of ranks in the steps of one model.

    Args:
        session: The ranks that train together.
        model: The model.
        updates: The updates of its steps.
        untrained: What its layers keep and no gradient trains.
        counter: Counts the samples that it trains on.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        updates: PlannedUpdates,
        untrained: UntrainedState,
        counter: SampleCounter,
    ) -> None:
        self._session = session
        self._model = model
        self._updates = updates
        self._untrained = untrained
        self._counter = counter
        updates.run_flush, updates.on_ran = self._flush, self._note_run
        self.data = ElasticData(session, None, None)
        self._begun = 0  # steps, in the order that all ranks share
        self._ran = 0  # of them, those whose train function has returned
        self._sections = 0
        self._result: Any = None
        self._kept: dict[int, _Kept] = {}  # by step
        self._before_flush: _Kept | None = None
        self._state: _State | None = None  # within a recovery, because a first attempt changes variables
        self._target = 0  # within a recovery: the last step to repeat
        self._change: Resize | None = None  # that on_resize was not told yet
        self._scaled: tuple[int, ...] = (session.world.size,)
        self._inner: Callable[[Any], Any] | None = None
        self._iterator: Any = None
        self._logs: Any = None
        self._recovering = False
        self._callbacks: Sequence[Any] = ()
        self._saves = False
        self._leaves_after: int | None = None
        self._section_before: Callable[[Callable[[], Any]], Any] = run_directly
        self.has_fitted = False
        """Whether a `fit` has begun."""

    @property
    def leaves(self) -> bool:
        """Whether too few ranks are left, and this is the step boundary at which all of them exit."""
        return self._leaves_after is not None and self._begun >= self._leaves_after

    def begin_fit(self, source: Any, steps_per_epoch: int | None, callbacks: Sequence[Any]) -> None:
        """Begin a `fit`.

        Args:
            source: The batches of all ranks; None: each rank has its own data.
            steps_per_epoch: As given to `fit`.
            callbacks: The user's. If hk.Checkpoint is one of them, it saves when too few ranks are left.
        """
        self._callbacks = callbacks
        self._saves = any(hasattr(callback, "at_epoch_ends") for callback in callbacks)
        self.data = ElasticData(self._session, source, steps_per_epoch)
        self._section_before = self._session.run_section
        self._session.run_section = self.section
        self.has_fitted = True

    def end_fit(self) -> None:
        """End a `fit`: what another model does next is none of this model's sections."""
        self._session.run_section = self._section_before

    # --- What runs under its protection -------------------------------------------------------------------

    def around(self, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a train function that repeats its step on the remaining ranks."""

        def train_function(iterator: Any) -> Any:
            self._inner, self._iterator = inner, iterator
            batch = self.data.take(self._begun + 1, iterator)  # no step begins at the end of the data
            self._begun += 1
            try:
                self._run(batch)
            except Exception as error:
                self._recover_from(error)
            return self._model.get_metrics_result() if self._logs is None else self._logs

        return train_function

    def section(self, call: Callable[[], Any]) -> Any:
        """Run a part of `fit` that all ranks run together, between steps; return its result.

        If a rank is lost, ranks that have not finished it run it again, or take the result of one that has.
        """
        if self._recovering:
            return call()
        number = self._sections
        while self._sections == number:
            try:
                result = call()
            except Exception as error:
                self._recover_from(error)
            else:
                self._sections, self._result = number + 1, result
        return self._result

    def _flush(self, call: Callable[[], None]) -> None:
        """Run the updates that wait for the next step."""
        while self._updates.mode.waits:
            self._before_flush = self._keep(self._ran - 1, own=False)
            try:
                call()
            except Exception as error:
                self._updates.mode.waits = True
                if self._recovering:
                    raise
                self._recover_from(error)
        self._before_flush = None

    def _run(self, batch: Any) -> None:
        if self._updates.ready:
            self._kept[self._begun] = self._keep(self._ran - int(self._updates.mode.waits))
            self._kept.pop(self._begun - 2, None)
        assert self._inner is not None
        self._logs = self._inner([batch])

    def _note_run(self) -> None:
        """Note that TensorFlow has run the step."""
        self._ran = self._begun

    # --- State ----------------------------------------------------------------------------------------------

    def _keep(self, version: int, own: bool = True) -> _Kept:
        shared = self._shared() if self._updates.mode.updates_piecewise else []
        values = [
            [(v, native(v).read_value()) for v in some] for some in (self._own() if own else [], shared)
        ]
        return _Kept(version, self._updates.mode.completed_updates(), *values)

    def _shared(self) -> list[Any]:
        """Return the variables that are equal on all ranks after a step, and change in its update."""
        return [*self._model.trainable_variables, *shared_slots(self._model.optimizer)]

    def _own(self) -> list[Any]:
        """Return the variables that may change before the update, such as statistics and seeds."""
        shared = set(map(identity, self._shared()))
        every = [*self._model.variables, *self._model.metrics_variables, *self._model.optimizer.variables]
        own = {identity(v): v for v in every if identity(v) not in shared}
        counts = (self._counter.variable, self._updates.mode.reducer.step)
        return [*own.values(), *counts]

    def _stands_at(self) -> tuple[int, _Kept | None]:
        """Return the last step whose state is complete here, and what holds it; None: the variables."""
        if self._ran == self._begun:
            return (self._ran - 1, self._before_flush) if self._updates.mode.waits else (self._ran, None)
        kept = self._kept.get(self._begun)
        if kept is None:
            return self._ran, None
        # A call that failed may have completed its first part, the update of the step before.
        if kept.updates is not None and int(self._updates.mode.completed_updates()) > int(kept.updates):
            return kept.version + 1, None
        return kept.version, kept

    def _state_here(self) -> _State:
        """Return the last state that is complete here, by reference."""
        version, holder = self._stands_at()
        if not self._updates.ready:
            return _State(version, [], self._scaled)
        held = {identity(v): (v, value) for v, value in (holder.shared if holder is not None else ())}
        now = {identity(v): (v, native(v).read_value()) for v in (*self._shared(), *self._own())}
        return _State(version, [*(now | held).values()], self._scaled)

    # --- Recovery -------------------------------------------------------------------------------------------

    def _recover_from(self, error: Exception) -> None:
        """Go on without the ranks that are lost. Raises `error` if none is."""
        while True:
            if not self._session.has_lost_ranks():
                raise error
            self._recovering = True
            try:
                return self._recover()
            except Exception as again:
                error = again
            finally:
                self._recovering = False

    def _recover(self) -> None:
        """Agree on a state, restore it, and repeat the steps after it; again if a rank is lost meanwhile."""
        begun_s = time.monotonic()
        if self._state is None:
            self._state = self._state_here()
        self._target = max(self._target, self._begun)
        now = self._session.go_on_without_lost()
        self._change = change = now if self._change is None else joined(self._change, now)
        self._updates.mode.forget()
        mine = _Standing(
            *(self._state.version, self._sections, self._updates.ready, self._result),
            *(self.data.ended, self._target, self._state.scaled),
        )
        everyone: list[_Standing] = self._session.engine.allgather_object(mine, "going on without lost ranks")
        agreed = max(standing.version for standing in everyone)
        scaled = self._state.scaled
        if all(standing.ready for standing in everyone):
            source = self._restore(agreed, self._state, [standing.version for standing in everyone])
            scaled = scaled if source is None else everyone[source].scaled
        else:
            self._updates.ready = False  # all ranks take rank 0's state at the step that is repeated
        self._finish_sections(everyone)
        self._begun = self._ran = agreed
        self._kept, self._before_flush, self._state = {}, None, None
        self.data.rewind(agreed)
        self._updates.count_from(agreed)
        self._scale_rate(scaled, max((standing.scaled for standing in everyone), key=len))
        self._tell(change, agreed, time.monotonic() - begun_s)
        tell_resize(change)
        self._change = None
        self._leave_if_too_few(change, max(standing.begun for standing in everyone))
        while self._begun < self._target or (self.data.ended and self.data.has_more()):
            batch = self.data.take(self._begun + 1, self._iterator)
            self._begun += 1
            self._run(batch)
        self._target = 0

    def _restore(self, agreed: int, state: _State, versions: Sequence[int]) -> int | None:
        """Set the state after step `agreed` on all ranks; collective. Return the rank that it came from."""
        before_next = self._kept.get(agreed + 1)
        for variable, value in [*state.values, *(before_next.own if before_next else ())]:
            variable.assign(value)
        source = versions.index(agreed) if min(versions) < agreed else None
        if source is not None:
            broadcast_variables(self._shared(), source)
        settle(self._model)
        return source

    def _finish_sections(self, everyone: Sequence[_Standing]) -> None:
        """Let ranks that are behind take the result of a section that another has finished; collective."""
        sections = [standing.sections for standing in everyone]
        furthest = sections.index(max(sections))
        # If one rank has read an epoch to its end, all train on the batches that are left in `_recover`, so
        # that all of them count the same steps.
        self.data.ended = any(one.ended for one in everyone if one.sections == sections[furthest])
        if min(sections) == max(sections):
            return
        untrained = self._untrained
        others = set(map(identity, [*self._shared(), *(v for v, _ in untrained.variables())]))
        broadcast_variables([v for v in self._model.variables if identity(v) not in others], furthest)
        untrained.take_over(furthest)
        if self._sections < sections[furthest]:
            self._sections, self._result = sections[furthest], everyone[furthest].result

    # --- What else changes ------------------------------------------------------------------------------

    def _scale_rate(self, scaled: tuple[int, ...], furthest: tuple[int, ...]) -> None:
        """Scale the learning rate for each number of ranks since those that it has followed.

        If another rank is lost in a recovery, some ranks may have scaled, and others not yet. All do the same
        multiplications, one after the other, so their rates have the same bits.
        """
        self._scaled = (*furthest, self._session.world.size)
        for before, after in itertools.pairwise(self._scaled[len(scaled) - 1 :]):
            scale_learning_rate(self._session, self._model.optimizer, before, after, self._callbacks)

    def _tell(self, change: Resize, agreed: int, took_s: float) -> None:
        if change.rank == 0:
            logger.warning(
                "hvpipe: %s. %d ranks go on after step %d, %.2f s after they noticed. %s",
                name_lost(change.lost, change.old_size),
                change.size,
                agreed,
                took_s,
                "The data is divided anew."
                if self.data.shares_source
                else "The data of a lost rank is not trained on.",
            )

    def _leave_if_too_few(self, change: Resize, begun: int) -> None:
        least = self._session.settings.min_ranks
        if change.size >= least:
            return
        if change.rank == 0:
            logger.warning(
                "hvpipe: %d ranks are left, and --min-np asks for %d: all ranks exit with code %d.",
                *(change.size, least, TOO_FEW),
            )
        if not self._saves:
            sys.exit(TOO_FEW)
        self._leaves_after = begun  # a step boundary, at which all ranks can write


def check_elastic(session: Session, overlap: str, exact: bool, sync_batch_norm: bool) -> None:
    """Raise HvpipeError for what an elastic job cannot train with."""
    if not session.settings.elastic:
        return
    if not exact:
        raise HvpipeError(
            '--elastic needs overlap="none", "backward" or "step": what "stale" leaves to the next step, and '
            f'"local" to the end of a round, is lost with a rank. Received: overlap={overlap!r}'
        )
    if sync_batch_norm:
        raise HvpipeError(
            "--elastic cannot end collectives that ranks call by name. Received: sync_batch_norm=True"
        )
