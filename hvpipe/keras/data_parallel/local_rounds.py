"""Rounds of local steps: every rank trains alone, and an outer step follows on the averaged differences.

    rank 0  | steps of round 1 | steps of round 2 | correct | steps of round 3 | correct |
                                 reduce round 1 ........      reduce round 2 ........

The arithmetic runs eagerly between calls of the train function, on tensors that nothing changes. What happens
after a step depends only on the number of steps, never on timing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.variables import native
from hvpipe.log import logger

Tensors = list[Any]  # one for each variable of the plan


@dataclass(frozen=True)
class RoundOptions:
    """How long rounds are, and what the outer step does.

    Args:
        every: Steps of a round.
        learning_rate: Of the outer step.
        momentum: Nesterov momentum of the outer step.
        waiting_steps: Rounds that end within these steps wait for their average.
    """

    every: int = 1
    learning_rate: float = 1.0
    momentum: float = 0.0
    waiting_steps: int = 0


def check_no_rounds(overlap: str, every: int | None, learning_rate: float, momentum: float) -> None:
    """Raise HvpipeError for arguments of rounds in a mode that has none."""
    if every is not None or (learning_rate, momentum) != (1.0, 0.0):
        raise HvpipeError(
            'every, outer_learning_rate and outer_momentum are for overlap="local". Received: '
            f"every={every}, outer_learning_rate={learning_rate} and outer_momentum={momentum} with "
            f"overlap={overlap!r}"
        )


def round_options(
    every: int | None, learning_rate: float, momentum: float, warmup_steps: int
) -> RoundOptions:
    """Return the rounds of "local". Raises HvpipeError for wrong arguments."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise HvpipeError(
            f'overlap="local" needs every, the steps of a round, at least 1. Received: every={every!r}'
        )
    if not 0 < learning_rate < math.inf:
        raise HvpipeError(
            f"outer_learning_rate should be positive. Received: outer_learning_rate={learning_rate}"
        )
    if not 0 <= momentum < 1:
        raise HvpipeError(f"outer_momentum should be from 0 to below 1. Received: outer_momentum={momentum}")
    return RoundOptions(every, learning_rate, momentum, warmup_steps)


def check_local(nonfinite: str, verify_every: int, sync_batch_norm: bool) -> None:
    """Raise HvpipeError for options that look at gradients or weights of all ranks at every step."""
    if nonfinite != "ignore":
        raise HvpipeError(
            'overlap="local" has no sum of gradients to look at: use nonfinite="ignore". '
            f"Received: nonfinite={nonfinite!r}"
        )
    if verify_every:
        raise HvpipeError(
            'overlap="local" lets weights differ between steps: leave verify_every and HVPIPE_VERIFY out. '
            f"Received: verify_every={verify_every}"
        )
    if sync_batch_norm:
        raise HvpipeError(
            'overlap="local" takes steps without communication. Received: sync_batch_norm=True, which '
            "communicates in every layer"
        )


@dataclass(frozen=True)
class _UnderWay:
    """A round that is being reduced.

    Args:
        difference: What this rank's steps took off its weights.
        samples: This rank's samples in the round.
        tokens: A token for each bucket, to collect it by.
    """

    difference: Tensors
    samples: float
    tokens: Sequence[Any]


class LocalRounds:
    """The rounds of one model on this rank.

    The anchor is the last averaged model, equal on all ranks. While a round is being reduced, a rank's
    weights at the start of the next one are the anchor less this rank's own difference of that round.
    """

    def __init__(self, options: RoundOptions) -> None:
        self._options = options
        self._anchor: Tensors = []  # empty: the ranks have equal weights, and no round has begun
        self._start: Tensors = []  # this rank's weights at the start of the round
        self._momentum: Tensors = []  # empty: zeros
        self._under_way: _UnderWay | None = None
        self._steps = 0  # in this round
        self._steps_before = 0  # in all rounds before it
        self._counted = 0.0  # samples of this rank before this round

    @property
    def open(self) -> bool:
        """Whether the ranks' weights may differ."""
        return bool(self._anchor)

    @property
    def steps(self) -> int:
        """The steps of this round so far."""
        return self._steps

    def begin_steps(self, reducer: BucketReducer, counted: float) -> None:
        """Begin a round, if none has begun; `counted` is how many samples this rank has trained on."""
        if not self._anchor:
            self._anchor = self._start = _values(reducer)
            self._counted = counted

    def end_steps(self, reducer: BucketReducer, steps: int, counted: float) -> None:
        """Count steps, and end the round if it is complete; collective then."""
        self._steps += steps
        if self._steps >= self._options.every:
            waits = self._steps_before + self._steps <= self._options.waiting_steps
            self._end_round(reducer, counted, waits)

    def complete(self, reducer: BucketReducer, counted: float) -> None:
        """End the round early, and wait for all averages: then all ranks have the anchor; collective."""
        if self._steps:
            self._end_round(reducer, counted, waits=True)
        elif self._under_way is not None:
            self._take_outer_step(reducer)
            self._go_on_from_anchor(reducer)
        self._anchor, self._start = [], []  # a round that began at the end of the data has no step

    def drop(self, reducer: BucketReducer) -> None:
        """Forget the round, and what is under way, which all ranks have sent. Weights stay as they are."""
        if self._under_way is not None:
            reducer.collect_all(self._under_way.tokens)
        self._under_way = None
        self._anchor, self._start, self._steps = [], [], 0

    def _end_round(self, reducer: BucketReducer, counted: float, waits: bool) -> None:
        weights = _values(reducer)
        difference = [start - now for start, now in zip(self._start, weights, strict=True)]
        corrects = self._under_way is not None
        if corrects:
            self._take_outer_step(reducer)
        self._send(reducer, difference, counted - self._counted)
        self._steps_before += self._steps
        self._steps, self._counted = 0, counted
        if waits:
            self._take_outer_step(reducer)
            self._go_on_from_anchor(reducer)
            return
        if corrects:
            weights = [a - mine for a, mine in zip(self._anchor, difference, strict=True)]
            _assign(reducer, weights)
        self._start = weights

    def _send(self, reducer: BucketReducer, difference: Tensors, samples: float) -> None:
        share = reducer.announce(tf.constant(samples, tf.float64))
        self._under_way = _UnderWay(difference, samples, reducer.submit(share, difference))

    def _take_outer_step(self, reducer: BucketReducer) -> None:
        """Move the anchor by the average of the round under way: SGD with Nesterov momentum."""
        assert self._under_way is not None
        average = reducer.collect_all(self._under_way.tokens)
        self._under_way = None
        rate, momentum = self._options.learning_rate, self._options.momentum
        steps = average
        if momentum:
            before = self._momentum or [tf.zeros_like(mean) for mean in average]
            self._momentum = [momentum * m + mean for m, mean in zip(before, average, strict=True)]
            steps = [mean + momentum * m for m, mean in zip(self._momentum, average, strict=True)]
        moved = [anchor - rate * step for anchor, step in zip(self._anchor, steps, strict=True)]
        self._anchor = [_constrained(v, value) for v, value in zip(reducer.variables, moved, strict=True)]

    def _go_on_from_anchor(self, reducer: BucketReducer) -> None:
        _assign(reducer, self._anchor)
        self._anchor, self._start = [], []

    # --- Checkpoints -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return this rank's tensors by name, between two rounds: what `resume` needs to go on alike."""
        lists = {"momentum": self._momentum}
        if self._under_way is not None:
            lists |= {"anchor": self._anchor, "difference": self._under_way.difference}
        with on_the_host():
            found = {
                f"{name}/{place}": tf.identity(tensor)
                for name, tensors in lists.items()
                for place, tensor in enumerate(tensors)
            }
            found["steps"] = tf.constant(self._steps_before, tf.int64)
            if self._under_way is not None:
                found["samples"] = tf.constant(self._under_way.samples, tf.float64)
        return found

    def resume(self, reducer: BucketReducer, state: Mapping[str, Any], counted: float) -> None:
        """Go on from a `state`, with the weights of that moment; collective if a round was under way."""
        self.drop(reducer)
        self._momentum = _listed(reducer, state, "momentum")
        if self._momentum and not self._options.momentum:
            self._momentum = []
            if reducer.rank == 0:
                logger.warning(
                    "hvpipe: outer_momentum should be as in the training that wrote the checkpoint. "
                    "Received: outer_momentum=0 and a checkpoint with an outer momentum, which is not used"
                )
        self._steps_before = int(state["steps"])
        difference = _listed(reducer, state, "difference")
        if difference:
            self._anchor, self._start = _listed(reducer, state, "anchor"), _values(reducer)
            self._counted = counted
            # The same numbers in the same order give the same sums.
            self._send(reducer, difference, float(state["samples"]))


def _values(reducer: BucketReducer) -> Tensors:
    return [native(v).read_value() for v in reducer.variables]


def _assign(reducer: BucketReducer, values: Tensors) -> None:
    for variable, value in zip(reducer.variables, values, strict=True):
        native(variable).assign(value)


def _constrained(variable: Any, value: Any) -> Any:
    constraint = getattr(variable, "constraint", None)
    return value if constraint is None else constraint(value)


def _listed(reducer: BucketReducer, state: Mapping[str, Any], name: str) -> Tensors:
    """Return the saved tensors of this name; bfloat16 is saved as integers."""
    if f"{name}/0" not in state:
        return []
    found = [tf.convert_to_tensor(state[f"{name}/{i}"]) for i in range(len(reducer.variables))]
    types = [tf.as_dtype(v.dtype) for v in reducer.variables]
    return [tf.bitcast(t, d) if t.dtype.is_integer else t for t, d in zip(found, types, strict=True)]
