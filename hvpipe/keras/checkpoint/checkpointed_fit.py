"""One `fit` with checkpoints: finds where to resume, decides when to save, and hands values to the writer."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.every import Every
from hvpipe.checkpoints.manifest import Manifest, Position
from hvpipe.checkpoints.usable import newest_usable
from hvpipe.checkpoints.writer import Snapshot, Writer, WriterOptions
from hvpipe.environment.job_folder import STOPPED, TOO_FEW, tell_checkpoints
from hvpipe.environment.settings import job_name
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.boundary_requests import BUSY, FAILED, STOP, CheckpointTimer
from hvpipe.keras.checkpoint.callback_state import callback_arrays, callback_notes
from hvpipe.keras.checkpoint.data_position import FIRST_EPOCH, WITHIN, ResumedReading, epochs_read
from hvpipe.keras.checkpoint.pipeline_state import PipelineState
from hvpipe.keras.checkpoint.preemption import StopRequest, tell_launcher
from hvpipe.keras.checkpoint.random_state import AT_EPOCH, python_state
from hvpipe.keras.checkpoint.resume import Resume
from hvpipe.keras.checkpoint.state_of import training_state
from hvpipe.keras.checkpoint.training_state import OWN
from hvpipe.keras.compat import set_initial_epoch
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")

# Where ranks meet, as errors say it.
_OPENING, _CHECKING = "opening the checkpoints", "checking the checkpoint"


@dataclass(frozen=True)
class CheckpointOptions:
    """Where, how often and how many checkpoints to keep."""

    folder: Path
    every: Every
    keep: int


class CheckpointedFit:
    """One `fit` with checkpoints: from `begin` to `end`.

    Args:
        options: What the user wants.
        model: The model.
        others: The other callbacks.
    """

    def __init__(self, options: CheckpointOptions, model: Any, others: Sequence[Any]) -> None:
        self._options = options
        self._state = training_state(model)
        self._session: Session = self._state.session
        self._model = model
        self._others = others
        self._resume: Resume | None = None
        self._writer: Writer | None = None  # until `begin` has agreed where to begin
        self._saved_step = self._step = 0
        self._epoch = self._batch = 0
        self._first_epoch: int | None = None  # of the first `fit`, once it is known
        # Of this epoch; whether a callback has stopped before its end; whether the rest of it can be resumed.
        self._data_ended = self._early = self._within = False
        # Samples that no running rank counts: those before this process began, and those of lost ranks.
        self._earlier_samples = 0.0
        self._epoch_samples = 0.0
        # What `save_replicas` needs of a pipeline whose stages have replicas.
        self._replicas = self._state if isinstance(self._state, PipelineState) else None
        self._updates_before: int | None = None  # in a step: the updates when it began
        self._in_steps = False
        self._random_at_epoch: dict[str, Any] = {}
        self._ranks_before: int | None = None
        self._inner: Any = None
        self._description: dict[str, Any] | None = None
        self._reading, self._resumed_step = ResumedReading(None, 0), 0
        self._open = contextlib.ExitStack()

    # --- Beginning and end -------------------------------------------------------------------------------

    def begin(self, params: Mapping[str, Any]) -> None:
        """Find the checkpoint to resume from; collective. `params` are those of the callback."""
        session, options, world = self._session, self._options, self._session.world
        newly_locked = self._check_folder()
        run = session.engine.broadcast_object(secrets.token_hex(3), _OPENING)
        found = newest_usable(options.folder, _Agreement(session))
        if newly_locked:  # what a killed job was writing takes room that the next checkpoint may need
            folders.abandon(options.folder, [left.name for left in folders.incomplete(options.folder)])
        if found is not None:
            self._resume = Resume(*found, self._state, self._others, self._model)
            self._resume.begin(params)
            position = found[1].position
            self._saved_step = self._step = position.step
            self._epoch, self._batch = position.epoch, position.batch
            self._first_epoch = position.epoch - epochs_read(found[1])
            self._earlier_samples, self._epoch_samples = position.samples, position.epoch_samples
            self._announce(found[0], position)
        elif self._replicas is not None and self._replicas.counts_updates:
            self._replicas.named()  # collective: too late after a loss
        self._run = self._first_run = run
        self._length = params.get("steps")
        self._timer = CheckpointTimer(options.every, session.engine, world.rank, self._step)
        self._count_ranks()
        if session.settings.job_folder is not None:
            tell_checkpoints(session.settings.job_folder, options.folder)
        session.checkpoints = options.folder
        self._stop = StopRequest(session.settings.job_folder, world.rank, job_name())
        self._open.enter_context(self._stop.listening())
        self._samples_at_begin = self._samples_at_epoch = self._state.samples()
        self._inner, self._model.train_function = self._model.train_function, self._train

    def begin_callbacks(self) -> None:
        """Let the other callbacks continue from what they remembered; after all of them have begun.

        Also if no epoch is left: EarlyStopping sets its best weights when `fit` ends.
        """
        if self._resume is not None:
            self._resume.begin_callbacks()

    def _count_ranks(self, gives_up: Callable[[], bool] | None = None) -> None:
        """Write as one of the ranks that there are now. What lost ranks were writing stays incomplete."""
        session, options, world = self._session, self._options, self._session.world
        self._world = world
        if world.rank == 0:
            folders.claim(options.folder)  # also if the rank that had locked it was lost
        if gives_up is None:
            # A pipeline that loses ranks completes what is under way, with the parts of those that are left.
            gives_up = self._loses if self._state.shares_data else lambda: False
        self._writer = Writer(
            WriterOptions(
                options.folder,
                world.rank,
                world.size,
                options.keep,
                timeout_s=session.settings.timeout_s,
                on_change=lambda busy: session.engine.request(BUSY, busy),
                on_complete=tell_launcher(session.settings.job_folder),
                on_failure=lambda: session.engine.request(FAILED),
                gives_up=gives_up,
            )
        )

    def _loses(self) -> bool:
        return self._session.lost is not None or self._world is not self._session.world

    def _follow_ranks(self) -> None:
        """Go on as one of the remaining ranks, if some were lost.

        Not collective: ranks may come here at different boundaries. A checkpoint under way may never be
        complete. So nothing counts as saved, and the next one is another run's, without parts of this one.
        """
        if self._world is self._session.world:
            return
        if self._writer is not None:
            self._writer.wait()  # it gives up
        self._saved_step = -1
        world = self._session.world
        if self._state.shares_data:
            self._count_lost(self._world.size - world.size)
        self._run = hashlib.sha256(f"{self._first_run} {world.size}".encode()).hexdigest()[:6]
        self._timer.follow(world.rank)
        self._count_ranks()

    def _count_lost(self, lost: int) -> None:
        """Count the samples of lost ranks, each with as many as this rank has had before this step."""
        steps = max(1, self._batch - self._reading.skipped)
        in_epoch = (self._state.samples() - self._samples_at_epoch) * (1 - 1 / steps)
        self._earlier_samples += lost * (self._samples_at_epoch - self._samples_at_begin + in_epoch)
        self._epoch_samples += lost * in_epoch

    def end(self) -> None:
        """Write the final checkpoint, unless it is written; collective.

        A rank that is asked to stop meanwhile stops the ranks afterwards, as at any other boundary.
        """
        try:
            asked = self._session.run_section(self._write_last)
            self._stop.too_late = not asked
        finally:
            self.leave_model()
        self._session.engine.request(STOP, False)
        if asked:
            self._exit(STOPPED)

    def _write_last(self) -> bool:
        """Write a checkpoint unless it is written, and wait until it is complete; collective.

        Returns:
            Whether some rank has been asked to stop.
        """
        self._follow_ranks()
        unsaved = self._session.engine.agree("the last checkpoint", float(self._step > self._saved_step))
        if any(unsaved):
            self._wait_for_parts("the checkpoint before the last one")
            self._write()
        self._wait_for_all()
        return any(self._session.engine.agree("whether to stop", float(self._stop.arrived())))

    def lose(self, ranks: Iterable[int]) -> int:
        """Wait for the checkpoint under way, unless it needs parts of lost ranks; return the steps done."""
        if self._writer is not None:
            self._writer.lose(ranks)
            self._writer.wait()
        return self._step

    def save_replicas(self) -> int | None:
        """Write a checkpoint of a pipeline on the remaining ranks, if they have all stages; collective.

        Only between two batches of an epoch: its end and validation have no position of their own.

        Returns:
            The step of the checkpoint. None if the ranks do not have the whole state, are at different
            places, or could not write it.
        """
        session, replicas = self._session, self._replicas
        if replicas is None:
            return None
        if self._updates_before is not None:
            done, self._updates_before = replicas.updates - self._updates_before, None
            self._step, self._batch = self._step + done, self._batch + done
        usable = self._in_steps and self._batch != self._length and int(self._model.steps_per_execution) == 1
        usable = usable and not self._model.stop_training and (self._resume is None or self._resume.done)
        if not replicas.inherit((self._step, self._epoch, self._batch) if usable else None):
            return None
        if self._ranks_before is None:
            self._ranks_before = self._world.size
        # Lost ranks may have written parts of a checkpoint of this step.
        self._run = session.engine.broadcast_object(secrets.token_hex(3), "saving what is left")
        self._count_ranks(gives_up=lambda: session.lost is not None)
        self._write()
        try:
            self._wait_for_all()
        except HvpipeError as error:
            if session.has_lost_ranks():
                raise
            logger.warning("hvpipe: the state of the remaining ranks was not saved. %s", error)
            return None
        return self._step

    def leave_steps(self) -> None:
        """The steps of the epoch are over, or validation has begun."""
        self._in_steps = False

    def leave_model(self) -> None:
        """Undo what `begin` has done to the model, the other callbacks and the process."""
        if self._inner is not None:
            self._model.train_function, self._inner = self._inner, None
        set_initial_epoch(self._model, 0)
        if self._resume is not None:
            self._resume.end_epoch()
        self._open.close()

    def _check_folder(self) -> bool:
        """Raise HvpipeError, on all ranks, unless all ranks see the same folder and can write to it.

        Return, on rank 0, whether this process has locked it now, so nobody writes there.
        """
        session, folder = self._session, self._options.folder
        probe = f".seen-{session.engine.broadcast_object(secrets.token_hex(6), _OPENING)}"

        def make() -> bool:
            claimed = ""
            if session.world.rank == 0:
                folders.check_folder(folder)
                claimed = folders.claim_or_refuse(folder)
                (folder / probe).touch(exist_ok=False)
            return claimed == "locked"

        def see() -> None:
            deadline_s = time.monotonic() + 10.0  # NFS shows new files after some seconds
            while not (folder / probe).exists():
                if time.monotonic() > deadline_s:
                    raise HvpipeError(
                        "All ranks must see the folder of Checkpoint, so hosts must share it. "
                        f"Received: {str(folder)!r}, where this rank does not see rank 0's file"
                    )
                time.sleep(0.05)
                with contextlib.suppress(OSError):
                    os.listdir(folder.parent)  # asks an NFS server for folders that were missing before
            mine = folder / f"{probe}-{session.world.rank}"
            mine.touch(exist_ok=False)
            mine.unlink()

        what = f"opening the checkpoints in {folder}"
        newly_locked = on_all_ranks(session, what, make, patiently=True)  # it may wait for another job's end
        try:
            on_all_ranks(session, what, see)
        finally:
            if session.world.rank == 0:
                with contextlib.suppress(OSError):
                    (folder / probe).unlink()
        return newly_locked

    def _announce(self, place: Path, position: Position) -> None:
        if self._session.world.rank == 0:
            logger.warning(
                "hvpipe: training resumes from %s: step %d, epoch %d, after %d of its batches.",
                place,
                position.step,
                position.epoch + 1,
                position.batch,
            )

    # --- Epochs and steps --------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, before the other callbacks do."""
        if self._resume is None:
            self._epoch_samples = 0.0
            self._batch = 0
            self._samples_at_epoch = self._state.samples()
        else:
            self._resume.begin_epoch()
        self._random_at_epoch = python_state()
        self._epoch = epoch
        if self._first_epoch is None:
            self._first_epoch = epoch
        self._in_steps = True

    def _train(self, iterator: Any) -> Any:
        """Stand in for the model's train function: skip what was trained on, and count."""
        steps = int(self._model.steps_per_execution)
        if self._resume is not None:
            if not self._resume.begun:
                self._resume.restore(iterator)
                # From here on as the ranks of today count, who may be more or fewer than before.
                self._reading, self._resumed_step = self._resume.reading, self._step
                self._batch = self._reading.skipped
                self._samples_at_epoch = self._state.samples()
            if self._resume.skips(steps):
                return {}
            iterator = self._resume.iterator_for(iterator)
        self._updates_before = None if self._replicas is None else self._replicas.updates
        try:
            logs = self._inner(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self._data_ended = True
            self._length = self._length or self._batch
            self.leave_steps()
            raise
        self._updates_before = None
        self._step += steps
        self._batch += steps
        return logs

    def at_boundary(self, epochs: int | None = None) -> None:
        """Write a checkpoint if one is due, or stop if that was asked for. Between two steps."""
        if self._resume is not None and not self._resume.done:
            return
        self._follow_ranks()
        engine = self._session.engine
        if self._stop.arrived():
            engine.request(STOP)
        if engine.requests() & FAILED:
            self._session.run_section(self._share_failure)
        if not self._state.can_write():
            return
        if self._state.too_few():
            self._leave(TOO_FEW)
        due = self._timer.due(self._step, epochs)
        if engine.requests() & STOP:
            self._leave(STOPPED)
        if due:
            self._write()

    def end_epoch(self, epoch: int) -> None:
        """End an epoch, after the other callbacks have."""
        if self._resume is not None:
            self._resume.end_epoch()
            self._resume = None
        # A callback that stops within an epoch, before a time limit, leaves the rest of it to the next start.
        stopped = self._model.stop_training and not self._data_ended
        self._early = stopped and self._batch > 0 and (self._length is None or self._batch < self._length)
        within = self._early and not self._session.settings.elastic
        self._within, self._data_ended = within, False
        if not within:
            self._reading = replace(self._reading, skipped=0, source=None)
            self._epoch, self._batch, self._epoch_samples = epoch + 1, 0, 0.0
            self._samples_at_epoch = self._state.samples()
        self.at_boundary(None if within else epoch + 1)

    # --- Writing -----------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Copy the state, and let the thread write it. On all ranks at the same boundary."""
        self._state.finish_step()
        self._follow_ranks()  # it may have lost some
        self._timer.written()
        best_weights = callback_arrays(self._others, self._state.weight_names())
        values = {**self._state.to_write(), **best_weights}
        values |= {f"{OWN}{AT_EPOCH}{name}": value for name, value in self._random_at_epoch.items()}
        now = self._state.samples()
        first = self._world.rank == 0
        # A pipeline's samples are those of all ranks, so only rank 0 writes them.
        total, in_epoch = now - self._samples_at_begin, now - self._samples_at_epoch
        if not (self._state.shares_data or first):
            total = in_epoch = 0.0
        manifest = Manifest(
            self._run,
            self._state.kind,
            Position(self._step, self._epoch, self._state.batch(self._batch)),
            self._describe(),
            (),
        )
        assert self._writer is not None
        self._writer.start(
            Snapshot(
                values,
                manifest,
                samples=round(total + (self._earlier_samples if first else 0)),
                epoch_samples=round(in_epoch + (self._epoch_samples if first else 0)),
                notes={
                    "callbacks": callback_notes(self._others),
                    "stopped": self._batch == 0 and bool(self._model.stop_training) and not self._early,
                    "ranks": self._ranks_before or self._world.size,
                    FIRST_EPOCH: self._first_epoch or 0,
                    WITHIN: self._within,
                    **self._reading.notes(self._step - self._resumed_step, self._world.size),
                    **self._state.notes(self._batch),
                },
            )
        )
        self._saved_step = self._step

    def _describe(self) -> dict[str, Any]:
        if self._description is None:
            self._description = self._state.description()
        return self._description

    def _leave(self, code: int) -> None:
        """Write a checkpoint, and exit; on all ranks at the same boundary."""
        self._session.run_section(self._write_last)
        self._session.engine.request(STOP, False)  # for a later `fit` of this process
        self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        """Say why all ranks exit, and exit."""
        if self._session.world.rank == 0:
            logger.warning(
                "hvpipe: %s. The checkpoint of step %d is complete in %s; all ranks "
                "exit with code %d. Start the script again to continue.",
                "too few ranks are left" if code == TOO_FEW else "a rank was asked to stop",
                self._step,
                self._options.folder,
                code,
            )
        sys.exit(code)

    def _wait_for_parts(self, what: str) -> None:
        """Wait until no rank writes its part any more; collective."""
        assert self._writer is not None
        self._writer.wait_for_part()
        self._session.agree_patiently(f"{what} (a rank may still write)")
        self._share_failure()

    def _share_failure(self) -> None:
        """Let rank 0 know which rank could not write its part, and why; collective."""
        engine = self._session.engine
        engine.request(FAILED, False)
        assert self._writer is not None
        self._writer.share_failure(
            lambda failure: engine.allgather_object(failure, "whether all ranks have written their part")
        )

    def _wait_for_all(self) -> None:
        """Wait until the last checkpoint is complete. Raises HvpipeError, on all ranks, if it failed."""
        engine, what = self._session.engine, f"the checkpoint of step {self._step}"
        self._wait_for_parts(what)
        assert self._writer is not None
        failure = self._writer.wait()
        if any(engine.agree(what, float(failure is not None))):
            causes = engine.allgather_object(failure, what)
            rank, cause = next((rank, cause) for rank, cause in enumerate(causes) if cause is not None)
            raise HvpipeError(
                f"Rank {rank} could not write {what} to {self._options.folder}: {cause}. "
                "The checkpoint before it is still there."
            )


class _Agreement:
    """The ranks of a session, as `newest_usable` asks them."""

    def __init__(self, session: Session) -> None:
        self.rank, self.size = session.world.rank, session.world.size
        self._session = session

    def broadcast(self, value: str | None) -> str | None:
        """Return rank 0's value on every rank."""
        found: str | None = self._session.engine.broadcast_object(value, _CHECKING)
        return found

    def gather(self, value: str | None) -> list[str | None]:
        """Return the values of all ranks, in rank order. Some may be reading large files until now."""
        self._session.agree_patiently(_CHECKING, self._session.settings.timeout_s)
        return self._session.engine.allgather_object(value, _CHECKING)
