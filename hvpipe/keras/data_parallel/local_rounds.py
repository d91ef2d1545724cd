"""Rounds of local steps: every rank trains alone, and an outer step follows on the averaged differences.

    rank 0  | steps of round 1 | steps of round 2 | correct | steps of round 3 | correct |
                                 reduce round 1 ........      reduce round 2 ........

The arithmetic runs eagerly between calls of the train function, on tensors that nothing changes. What happens
after a step depends only on the number of steps, never on timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import learning_rate_variable
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions
from hvpipe.keras.data_parallel.overlap import Buckets, Overlap, RoundOptions, Rounds
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.variables import native
from hvpipe.log import logger

Tensors = list[Any]  # one for each variable of the plan


@dataclass
class _UnderWay:
    """A round that is being reduced.

    Args:
        tokens: A token for each bucket, to collect it by.
        average: The average, once it is collected.
    """

    tokens: Sequence[Any] = ()
    average: Tensors = field(default_factory=list)


class LocalRounds(Rounds):
    """The rounds of one model on this rank.

    The anchor is the last averaged model, equal on all ranks. While a round is being reduced, a rank's
    weights at the start of the next one are the anchor less this rank's own difference of that round.
    """

    def __init__(self, options: RoundOptions, reducer: BucketReducer) -> None:
        self._options = options
        self._reducer = reducer
        self._anchor: Tensors = []  # empty: the ranks have equal weights, and no round has begun
        self._start: Tensors = []  # this rank's weights at the start of the round
        self._momentum: Tensors = []  # empty: zeros
        self._under_way: _UnderWay | None = None
        self.steps = 0
        self._steps_before = 0  # in all rounds before it
        self._counted = 0.0  # samples of this rank before this round

    def check_length(self, steps: int) -> None:
        if self._options.every % steps:
            raise HvpipeError(
                "every should be a multiple of steps_per_execution. "
                f"Received: every={self._options.every} with steps_per_execution={steps}"
            )

    def check_readable(self) -> None:
        if self._anchor:
            raise HvpipeError(
                'With overlap="local" each rank has weights of its own between steps: read and set them when '
                "an epoch has ended, or call evaluate on all ranks first, which ends the round. "
                "Received: a call in the middle of a round"
            )

    def begin_steps(self, counted: Callable[[], float]) -> None:
        if not self._anchor:
            self._anchor = self._start = self._values()
            self._counted = counted()

    def end_steps(self, steps: int, counted: Callable[[], float]) -> None:
        self.steps += steps
        if self.steps >= self._options.every:
            waits = self._steps_before + self.steps <= self._options.waiting_steps
            self._end_round(counted(), waits)

    def complete(self, counted: Callable[[], float]) -> None:
        """End the round early, and wait for all averages: then all ranks have the anchor; collective."""
        if not self._anchor:
            return
        self._reducer.session.engine.agree(f"the end of a round after {self.steps} steps")
        if self.steps:
            self._end_round(counted(), waits=True)
        elif self._under_way is not None:
            self._take_outer_step()
            self._go_on_from_anchor()
        self._anchor, self._start = [], []  # a round that began at the end of the data has no step

    def drop(self) -> None:
        self._average()
        self._under_way = None
        self._anchor, self._start, self.steps = [], [], 0

    def _end_round(self, counted: float, waits: bool) -> None:
        weights = self._values()
        difference = [start - now for start, now in zip(self._start, weights, strict=True)]
        corrects = self._under_way is not None
        if corrects:
            self._take_outer_step()
        self._send(difference, counted - self._counted)
        self._steps_before += self.steps
        self.steps, self._counted = 0, counted
        if waits:
            self._take_outer_step()
            self._go_on_from_anchor()
            return
        if corrects:
            weights = [a - mine for a, mine in zip(self._anchor, difference, strict=True)]
            self._assign(weights)
        self._start = weights

    def _send(self, difference: Tensors, samples: float) -> None:
        share = self._reducer.announce(tf.constant(samples, tf.float64))
        self._under_way = _UnderWay(self._reducer.submit(share, difference))

    def _average(self) -> Tensors:
        """Return the average of the round under way, once it has come; no tensors if none is."""
        if self._under_way is not None and not self._under_way.average:
            self._under_way.average = self._reducer.collect_all(self._under_way.tokens)
        return [] if self._under_way is None else self._under_way.average

    def _take_outer_step(self) -> None:
        """Move the anchor by the average of the round under way: SGD with Nesterov momentum."""
        average = self._average()
        self._under_way = None
        rate, momentum = self._options.learning_rate, self._options.momentum
        steps = average
        if momentum:
            before = self._momentum or [tf.zeros_like(mean) for mean in average]
            self._momentum = [momentum * m + mean for m, mean in zip(before, average, strict=True)]
            steps = [mean + momentum * m for m, mean in zip(self._momentum, average, strict=True)]
        moved = [anchor - rate * step for anchor, step in zip(self._anchor, steps, strict=True)]
        variables = self._reducer.variables
        self._anchor = [_constrained(v, value) for v, value in zip(variables, moved, strict=True)]

    def _go_on_from_anchor(self) -> None:
        self._assign(self._anchor)
        self._anchor, self._start = [], []

    # --- Checkpoints -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        # The average, since sending a difference again would add what compression has left out once more.
        lists = {"momentum": self._momentum, "average": self._average()}
        if self._under_way is not None:
            lists["anchor"] = self._anchor
        with on_the_host():
            found = {
                f"{name}/{place}": tf.identity(tensor)
                for name, tensors in lists.items()
                for place, tensor in enumerate(tensors)
            }
            found["steps"] = tf.constant(self._steps_before, tf.int64)
        return found

    def resume(self, state: Mapping[str, Any], counted: Callable[[], float]) -> None:
        if not state:
            return
        self.drop()
        self._momentum = self._listed(state, "momentum")
        if self._momentum and not self._options.momentum:
            self._momentum = []
            if self._reducer.rank == 0:
                logger.warning(
                    "hvpipe: outer_momentum should be as in the training that wrote the checkpoint. "
                    "Received: outer_momentum=0 and a checkpoint with an outer momentum, which is not used"
                )
        self._steps_before = int(state["steps"])
        average = self._listed(state, "average")
        if average:
            self._anchor, self._start = self._listed(state, "anchor"), self._values()
            self._counted = counted()
            self._under_way = _UnderWay(average=average)

    def _listed(self, state: Mapping[str, Any], name: str) -> Tensors:
        """Return the saved tensors of this name; bfloat16 is saved as integers."""
        if f"{name}/0" not in state:
            return []
        variables = self._reducer.variables
        found = [tf.convert_to_tensor(state[f"{name}/{i}"]) for i in range(len(variables))]
        types = [tf.as_dtype(v.dtype) for v in variables]
        return [tf.bitcast(t, d) if t.dtype.is_integer else t for t, d in zip(found, types, strict=True)]

    # --- Weights ---------------------------------------------------------------------------------------

    def _values(self) -> Tensors:
        return [native(v).read_value() for v in self._reducer.variables]

    def _assign(self, values: Tensors) -> None:
        for variable, value in zip(self._reducer.variables, values, strict=True):
            native(variable).assign(value)


def _constrained(variable: Any, value: Any) -> Any:
    constraint = getattr(variable, "constraint", None)
    return value if constraint is None else constraint(value)


class LocalOverlap(Overlap):
    """Reduce once in a round of steps, "local": each rank updates with its own gradients.

    | step | step | step | step | correct | step | step | step | step | correct |
                          reduce ...................        reduce ..............

    The results differ from "none" (DaSGD: Zhou et al., 2020).

    Each rank's optimizer keeps its own state and its own `iterations`, which schedules follow. Nothing makes
    them equal: all ranks take the same number of steps, which `LocalRounds.complete` checks. A step that only
    one rank skips, because its loss scale overflows, stays missing in that rank's `iterations`.
    """

    exact = reduces_gradients = False
    to_readers = (
        'hvpipe: callback %s may read weights between steps. With overlap="local" these are the rank\'s own, '
        "and the model's methods refuse to read them within a round. Set reads_weights = False on it if it "
        "reads none."
    )

    @classmethod
    def rounds_from(
        cls, name: str, every: int | None, learning_rate: float, momentum: float, warmup_steps: int
    ) -> RoundOptions:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise HvpipeError(
                f'overlap="local" needs every, the steps of a round, at least 1. Received: every={every!r}'
            )
        if not 0 < learning_rate < math.inf:
            raise HvpipeError(
                f"outer_learning_rate should be positive. Received: outer_learning_rate={learning_rate}"
            )
        if not 0 <= momentum < 1:
            raise HvpipeError(
                f"outer_momentum should be from 0 to below 1. Received: outer_momentum={momentum}"
            )
        return RoundOptions(every, learning_rate, momentum, warmup_steps)

    @classmethod
    def check_options(cls, nonfinite: str, verify_every: int, sync_batch_norm: bool) -> None:
        """Raise HvpipeError for options that look at gradients or weights of all ranks at every step."""
        if nonfinite != "ignore":
            raise HvpipeError(
                'overlap="local" has no sum of gradients to look at: use nonfinite="ignore". '
                f"Received: nonfinite={nonfinite!r}"
            )
        if verify_every:
            raise HvpipeError(
                'overlap="local" lets weights differ between steps: leave verify_every and HVPIPE_VERIFY '
                f"out. Received: verify_every={verify_every}"
            )
        if sync_batch_norm:
            raise HvpipeError(
                'overlap="local" takes steps without communication. Received: sync_batch_norm=True, which '
                "communicates in every layer"
            )

    @classmethod
    def check_train_on_batch(cls) -> None:
        raise HvpipeError(
            'overlap="local" needs fit: train_on_batch averages logs over ranks at every call. '
            "Received: a call of train_on_batch"
        )

    @classmethod
    def equal_slots(cls, optimizer: Any) -> list[Any]:
        rate = learning_rate_variable(getattr(optimizer, "inner_optimizer", optimizer))
        return [v for v in optimizer.variables if v is rate]

    @classmethod
    def own_weights(cls, model: Any) -> list[Any]:
        return list(model.trainable_variables)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError if the optimizer averages weights (use_ema): each rank would average its own."""
        if any(part.use_ema for part in parts_of(optimizer)):
            raise HvpipeError(
                'overlap="local" needs an optimizer without use_ema: each rank would average its own '
                f"weights. Received: an optimizer {optimizer.name} with use_ema=True"
            )

    def reduce_options(self, options: ReduceOptions) -> ReduceOptions:
        return replace(options, slices=False)  # differences of weights are dense

    def attach(self, buckets: Buckets) -> None:
        super().attach(buckets)
        self.rounds = LocalRounds(self._options.rounds, buckets.reducer)

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce_and_update: Callable[[], None]
    ) -> None:
        optimizer = self.buckets.update.optimizer
        type(optimizer).apply(optimizer, gradients, variables)


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a MultiOptimizer, or the optimizer itself, without its loss scale."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", [inner]))
