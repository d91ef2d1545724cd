"""The interface of overlap modes: what one does in the graph of a step, and between steps.

overlap_modes.py has the modes, with a picture of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions
from hvpipe.keras.data_parallel.bucket_update import BucketUpdate
from hvpipe.keras.data_parallel.step_findings import StepFindings
from hvpipe.keras.initial_state import shared_slots


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of one list of variables: they are reduced, then updated."""

    reducer: BucketReducer
    update: BucketUpdate

    def submit(self, gradients: Sequence[Any], share: Any, **options: Any) -> list[Any]:
        """Submit this step's gradients to be reduced; return a token for each bucket."""
        self.update.note_own(gradients)
        return self.reducer.submit(share, gradients, **options)


@dataclass(frozen=True)
class RoundOptions:
    """How long rounds are, and what the outer step does.

    Args:
        every: Steps of a round; None in a mode without rounds.
        learning_rate: Of the outer step.
        momentum: Nesterov momentum of the outer step.
        waiting_steps: Rounds that end within so many steps wait for their average.
        fragments: Parts of the model whose rounds end in turn.
    """

    every: int | None = None
    learning_rate: float = 1.0
    momentum: float = 0.0
    waiting_steps: int = 0
    fragments: int = 1

    @property
    def turn(self) -> int:
        """Steps between the ends of two fragments' rounds."""
        return 1 if self.every is None else self.every // self.fragments


@dataclass(frozen=True)
class OverlapOptions:
    """What only some modes use.

    Args:
        warmup_steps: Steps at the start of "stale" that update with their own gradients, and steps before
            "int8" and "powersgd" compress.
        rounds: Of "local".
        elastic: Whether ranks may be lost, so that no update may be left half applied.
    """

    warmup_steps: int = 0
    rounds: RoundOptions = field(default_factory=RoundOptions)
    elastic: bool = False


class Rounds:
    """The rounds of a mode that reduces in every step: none, so nothing happens between steps."""

    steps = 0
    """The steps of this round so far."""

    def check_length(self, steps: int) -> None:
        """Raise HvpipeError if a round would end within `steps` that are taken together."""

    def check_readable(self) -> None:
        """Raise HvpipeError if the ranks' weights may differ."""

    def begin_steps(self, counted: Callable[[], float]) -> None:
        """Begin a round, if none has begun; `counted` returns the samples that this rank has trained on."""

    def end_steps(self, steps: int, counted: Callable[[], float]) -> None:
        """Count steps that have run, and end the round if it is complete; collective then."""

    def complete(self, counted: Callable[[], float]) -> None:
        """Let all ranks have equal weights; collective."""

    def drop(self) -> None:
        """Forget the round, and what is under way, which all ranks have sent. Weights stay as they are."""

    def state(self) -> dict[str, Any]:
        """Return this rank's tensors by name, between two rounds: what `resume` needs to go on alike.

        If a round is being reduced, this waits for its sums.
        """
        return {}

    def resume(self, state: Mapping[str, Any], counted: Callable[[], float]) -> None:
        """Go on from a `state`, with the weights of that moment."""


class Overlap:
    """Says what starts when in a training step. One object serves one hook in an optimizer."""

    exact: ClassVar[bool] = True
    """Whether weights are, bit for bit, those of "none"."""
    reduces_gradients: ClassVar[bool] = True
    """Whether gradients are reduced. If not, each rank updates with its own, and weights differ."""
    update_is_last: ClassVar[bool] = False
    """Whether the update comes after the step's graph, which therefore must not use weights after `apply`."""
    defers: ClassVar[bool] = False
    """Whether an update may wait for the next step."""
    compresses: ClassVar[bool] = True
    """Whether "int8" and "powersgd:R" can compress what it reduces."""
    to_readers: ClassVar[str] = ""
    """What to tell of callbacks (%s) that may read weights at batches."""

    buckets: Buckets
    """What is reduced and updated; set by `attach`."""

    def __init__(self, options: OverlapOptions) -> None:
        self._options = options
        self.rounds = Rounds()
        """What is reduced between steps."""
        self.waits = False
        """Whether an update waits for the next step: `finish` must run before weights are read outside."""

    @property
    def reducer(self) -> BucketReducer:
        """What reduces the buckets."""
        return self.buckets.reducer

    # --- What the mode can be used for ------------------------------------------------------------------

    @classmethod
    def check_rounds(cls, name: str, rounds: RoundOptions) -> None:
        """Raise HvpipeError if the mode of this name cannot have these rounds."""
        if rounds != RoundOptions(waiting_steps=rounds.waiting_steps):
            raise HvpipeError(
                'every, fragments, outer_learning_rate and outer_momentum are for overlap="local". Received: '
                f"every={rounds.every}, fragments={rounds.fragments}, "
                f"outer_learning_rate={rounds.learning_rate} and outer_momentum={rounds.momentum} with "
                f"overlap={name!r}"
            )

    @classmethod
    def check_options(cls, nonfinite: str, verify_every: int, sync_batch_norm: bool) -> None:
        """Raise HvpipeError for options that this mode rules out."""

    @classmethod
    def check_train_on_batch(cls) -> None:
        """Raise HvpipeError if this mode needs `fit`."""

    @classmethod
    def within_step(cls) -> type[Overlap]:
        """Return the mode with the same results that updates within the graph of the step."""
        return cls

    @classmethod
    def equal_slots(cls, optimizer: Any) -> list[Any]:
        """Return the optimizer's variables that are equal on all ranks."""
        return shared_slots(optimizer)

    @classmethod
    def own_weights(cls, model: Any) -> list[Any]:
        """Return the trainable weights that may differ between ranks at the end of a step."""
        return []

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError if this mode cannot train with the optimizer."""

    def reduce_options(self, options: ReduceOptions) -> ReduceOptions:
        """Return how this mode cuts and sends gradients."""
        return options

    @property
    def updates_piecewise(self) -> bool:
        """Whether a step may update one bucket after the other. If a rank is lost, some are left out."""
        return not self._options.elastic

    def attach(self, buckets: Buckets) -> None:
        """Reduce and update these buckets from now on."""
        self.buckets = buckets

    def free(self) -> None:
        """Free what `attach` has made."""

    # --- In the graph of a step ---------------------------------------------------------------------------

    def begin(self, samples: Any) -> None:
        """Start a step's graph, before the forward. `samples` (scalar) is computed from the step's batch."""

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce_and_update: Callable[[], None]
    ) -> None:
        """Take the gradients of a call of the optimizer.

        Args:
            gradients: A gradient or None for each variable.
            variables: The variables.
            reduce_and_update: Puts the gradients in the order of the plan, and calls the method below.
        """
        reduce_and_update()

    def reduce_and_update(self, gradients: Sequence[Any], share: Any) -> None:
        """Reduce this step's gradients and update as the mode says.

        Args:
            gradients: One for each variable of the buckets, from `BucketReducer.as_submitted`.
            share: The factor for this rank's gradients, from `BucketReducer.announce`.
        """
        raise NotImplementedError

    def end(self) -> None:
        """End a step's graph. Raises HvpipeError if it does not fit the plan, unless it is only inspected."""

    def inspect_trace(self, trace: Callable[[], None]) -> list[StepFindings]:
        """As `GraphInspection.inspect_trace`; an empty list if the mode needs no plan beforehand."""
        return []

    # --- Between steps ------------------------------------------------------------------------------------

    def ran(self) -> None:
        """Note that a step has run."""

    def finish(self) -> None:
        """Run the update that waits for the next step, eagerly. Weights are then as after the last step."""

    def hold(self) -> list[Any]:
        """Return the sums that wait because they belong to the next step; collective if there may be any."""
        return []

    def resume(self, steps: int, sums: Sequence[Any]) -> None:
        """Continue after this many steps, with the sums that `hold` returned; collective if there are any."""
        self.reducer.step.assign(steps)

    def forget(self) -> None:
        """Forget the gradients that are under way, which are lost with a rank."""

    def compression_state(self) -> dict[str, Any]:
        """Return the variables of compression that a resumed training needs, by name."""
        return self.reducer.state()

    def completed_updates(self) -> Any:
        """Return how many deferred updates are complete (scalar); None if none are deferred."""
