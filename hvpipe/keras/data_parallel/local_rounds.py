"""Rounds of local steps: every rank trains alone, and an outer step follows on the averaged differences.

    rank 0  | steps of round 1 | steps of round 2 | correct | steps of round 3 | correct |
                                 reduce round 1 ........      reduce round 2 ........

With fragments, each has rounds of its own, which end in turn (Streaming DiLoCo: Douillard et al., 2025):

    rank 0  | steps | steps | correct 0 | steps | correct 1 | steps | correct 0 |
                      reduce 0 ......     reduce 1 ......     reduce 0 ......

The arithmetic runs between calls of the train function, on tensors that nothing changes. What happens after a
step depends only on the number of steps, never on timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import learning_rate_variable
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions
from hvpipe.keras.data_parallel.compressed_reduce import make_reducer
from hvpipe.keras.data_parallel.overlap import Buckets, Overlap, RoundOptions, Rounds
from hvpipe.keras.data_parallel.same_bits import same_bits
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.variables import native
from hvpipe.log import logger

Tensors = list[Any]  # one for each variable of the plan


class _Fragment:
    """Variables that are averaged together, and where this rank is with them.

    The anchor is their last averaged value, equal on all ranks. While an average is under way, weights are
    what this rank has made of its own value when it sent.

    Args:
        reducer: Of these variables.
        places: Their places among all variables of the model's plan.
        options: Of the rounds.
    """

    def __init__(self, reducer: BucketReducer, places: Sequence[int], options: RoundOptions) -> None:
        self.reducer = reducer
        self.places = tuple(places)
        self.anchor: Tensors = []
        self.start: Tensors = []  # less the weights: what this rank has changed and not sent
        self.momentum: Tensors = []  # empty: zeros
        self.sent = False
        """Whether an average is under way."""
        self.steps = 0
        """Steps since this rank sent last."""
        self.counted = 0.0
        """The samples of this rank when it sent last."""
        self._options = options
        self._tokens: Sequence[Any] = ()
        self._average: Tensors = []
        self._submitted = _graph(self._submit)
        self._collected = _graph(reducer.collect_all)
        self._corrected = _graph(self._correct)
        self._outer_step = same_bits(self._step_of) if options.momentum else self._step_of

    def begin(self, counted: float) -> None:
        """Begin where all ranks have equal weights."""
        self.anchor = self.start = self._values()
        self.steps, self.counted = 0, counted

    def send(self, counted: float) -> None:
        """Send what this rank has changed since it sent last; collective."""
        samples = tf.constant(counted - self.counted, tf.float64)
        self.start, self._tokens = self._submitted(samples, self.start)
        self.sent, self.steps, self.counted = True, 0, counted

    def average(self) -> Tensors:
        """Return the average that is under way, once it has come; no tensors if none is."""
        if self.sent and not self._average:
            self._average = self._collected(self._tokens)
        return self._average

    def correct(self) -> None:
        """Move the anchor by the average, and go on there with what this rank has changed since it sent."""
        since = self.start if self.steps else []
        self.anchor, self.momentum = self._corrected(self.average(), self.anchor, self.momentum, since)
        self.forget()
        self.start = self.anchor

    def forget(self) -> None:
        """Forget the average that is under way."""
        self.sent, self._tokens, self._average = False, (), []

    def resume(self, average: Tensors, anchor: Tensors, steps: int, counted: float) -> None:
        """Go on with the weights of that moment."""
        self.anchor, self.start = anchor, self._values() if average else anchor
        self.sent, self._average = bool(average), average
        self.steps, self.counted = steps, counted

    def _values(self) -> Tensors:
        return [native(v).read_value() for v in self.reducer.variables]

    # --- In graphs ------------------------------------------------------------------------------------

    def _submit(self, samples: Any, start: Tensors) -> tuple[Tensors, list[Any]]:
        """Return the weights, and tokens for the average of what has changed since `start`."""
        weights = self._values()
        share = self.reducer.announce(samples)
        return weights, self.reducer.submit(share, _differences(start, weights))

    def _correct(
        self, average: Tensors, anchor: Tensors, momentum: Tensors, since: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Assign weights; return the anchor and the momentum after an outer step.

        The weights are the anchor, and what this rank has changed since it had `since`, if there are any.
        """
        moved, momentum = self._outer_step(average, anchor, momentum)
        variables = self.reducer.variables
        anchor = [_constrained(v, value) for v, value in zip(variables, moved, strict=True)]
        weights = anchor
        if since:
            weights = _differences(anchor, _differences(since, self._values()))
        for variable, value in zip(variables, weights, strict=True):
            native(variable).assign(value)
        return anchor, momentum

    def _step_of(self, average: Tensors, anchor: Tensors, momentum: Tensors) -> tuple[Tensors, Tensors]:
        """Return the anchor and the momentum after a step of SGD with Nesterov momentum."""
        rate, decay = self._options.learning_rate, self._options.momentum
        steps = average
        if decay:
            before = momentum or [tf.zeros_like(mean) for mean in average]
            momentum = [decay * m + mean for m, mean in zip(before, average, strict=True)]
            steps = [mean + decay * m for m, mean in zip(momentum, average, strict=True)]
        if rate != 1:
            steps = [rate * step for step in steps]
        return _differences(anchor, steps), momentum


class LocalRounds(Rounds):
    """The rounds of one model on this rank.

    Fragments take turns: at the end of a turn one sends, and the one before it is corrected.

    Args:
        options: How long they are, and the outer step.
        parts: For each fragment its reducer, and its variables' places among all.
    """

    def __init__(self, options: RoundOptions, parts: Sequence[tuple[BucketReducer, Sequence[int]]]) -> None:
        self._options = options
        self._fragments = [_Fragment(reducer, places, options) for reducer, places in parts]
        self._session = parts[0][0].session
        self._begun = False  # if not, the ranks have equal weights
        self._turns = 0  # that have ended since
        self.steps = 0
        self._steps_before = 0  # in all turns before this one
        self._counted = 0.0  # samples of this rank when the last turn ended

    @property
    def _last(self) -> _Fragment:
        return self._fragments[(self._turns - 1) % len(self._fragments)]

    def check_length(self, steps: int) -> None:
        if self._options.turn % steps:
            every, fragments = self._options.every, self._options.fragments
            turn = "every" if fragments == 1 else "every / fragments"
            received = f"every={every}" + (f", fragments={fragments}" if fragments > 1 else "")
            raise HvpipeError(
                f"{turn} should be a multiple of steps_per_execution. "
                f"Received: {received} with steps_per_execution={steps}"
            )

    def check_readable(self) -> None:
        if self._begun:
            raise HvpipeError(
                'With overlap="local" each rank has weights of its own between steps: read and set them when '
                "an epoch has ended, or call evaluate on all ranks first, which ends the round. "
                "Received: a call in the middle of a round"
            )

    def begin_steps(self, counted: Callable[[], float]) -> None:
        if not self._begun:
            samples = counted()
            for fragment in self._fragments:
                fragment.begin(samples)
            self._begun, self._turns = True, 0

    def end_steps(self, steps: int, counted: Callable[[], float]) -> None:
        self.steps += steps
        for fragment in self._fragments:
            fragment.steps += steps
        if self.steps >= self._options.turn:
            self._end_turn(counted())

    def _end_turn(self, counted: float) -> None:
        if self._last.sent:
            self._last.correct()
        self._steps_before += self.steps
        self._counted = counted
        self.steps = 0
        self._turns += 1
        self._last.send(counted)
        if self._steps_before <= self._options.waiting_steps:
            self._last.correct()
            if len(self._fragments) == 1:
                self._forget()  # the ranks have equal weights

    def complete(self, counted: Callable[[], float]) -> None:
        """End the round early, and wait for all averages: then all ranks have the anchors; collective."""
        if not self._begun:
            return
        turn = f"turn {self._turns} of a round" if len(self._fragments) > 1 else "a round"
        self._session.engine.agree(f"the end of {turn} after {self.steps} steps")
        if self._last.sent:
            self._last.correct()
        samples = counted()
        unsent = [fragment for fragment in self._fragments if fragment.steps]
        for fragment in unsent:
            fragment.send(samples)
        for fragment in self._fragments:
            if fragment.sent:
                fragment.correct()
        self._steps_before += self.steps
        self._forget()

    def drop(self) -> None:
        for fragment in self._fragments:
            fragment.average()
        self._forget()

    def _forget(self) -> None:
        """Begin again with the weights as they are."""
        for fragment in self._fragments:
            fragment.forget()
            fragment.anchor, fragment.start = [], []
        self._begun, self.steps = False, 0

    # --- Checkpoints -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        # Averages, since sending again would add what compression has left out once more. They are computed
        # where `correct` would compute them.
        averages = [fragment.average() for fragment in self._fragments]
        with on_the_host():
            for fragment, average in zip(self._fragments, averages, strict=True):
                lists = {"momentum": fragment.momentum, "average": average}
                if fragment.sent or len(self._fragments) > 1:
                    lists["anchor"] = fragment.anchor
                for name, tensors in lists.items():
                    each = zip(fragment.places, tensors, strict=False)
                    found |= {f"{name}/{place}": tf.identity(tensor) for place, tensor in each}
            found["steps"] = tf.constant(self._steps_before, tf.int64)
            found["turns"] = tf.constant(self._turns, tf.int64)
            found["steps_since"] = tf.constant([f.steps for f in self._fragments], tf.int64)
            samples = [self._counted - fragment.counted for fragment in self._fragments]
            found["samples_since"] = tf.constant(samples, tf.float64)
        return found

    def resume(self, state: Mapping[str, Any], counted: Callable[[], float]) -> None:
        if not state:
            return
        self.drop()
        for fragment in self._fragments:
            fragment.momentum = self._listed(state, "momentum", fragment)
        self._check_momentum()
        self._steps_before = int(state["steps"])
        if not any(name.startswith("anchor/") for name in state):
            return  # the ranks had equal weights
        if len(state["steps_since"]) != len(self._fragments):
            raise HvpipeError(
                "fragments should be as in the training that wrote the checkpoint, which was within a round: "
                f"{len(state['steps_since'])}. Received: fragments={len(self._fragments)}"
            )
        self._begun, self._turns, self._counted = True, int(state["turns"]), counted()
        since = zip(state["steps_since"], state["samples_since"], strict=True)
        for fragment, (steps, samples) in zip(self._fragments, since, strict=True):
            average, anchor = (self._listed(state, name, fragment) for name in ("average", "anchor"))
            fragment.resume(average, anchor, int(steps), self._counted - float(samples))

    def _check_momentum(self) -> None:
        if self._options.momentum or not self._fragments[0].momentum:
            return
        for fragment in self._fragments:
            fragment.momentum = []
        if self._session.world.rank == 0:
            logger.warning(
                "hvpipe: outer_momentum should be as in the training that wrote the checkpoint. "
                "Received: outer_momentum=0 and a checkpoint with an outer momentum, which is not used"
            )

    def _listed(self, state: Mapping[str, Any], name: str, fragment: _Fragment) -> Tensors:
        """Return the saved tensors of this name, zeros for missing ones; bfloat16 is saved as integers."""
        saved = [state.get(f"{name}/{place}") for place in fragment.places]
        if all(value is None for value in saved):
            return []
        found = []
        for value, variable in zip(saved, fragment.reducer.variables, strict=True):
            dtype = tf.as_dtype(variable.dtype)
            tensor = tf.zeros(variable.shape, dtype) if value is None else tf.convert_to_tensor(value)
            found.append(tf.bitcast(tensor, dtype) if tensor.dtype.is_integer else tensor)
        return found


def _graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as graphs, one for each choice of lists that are empty.

    A turn may end with every step. tf.function would look at all tensors at each call for such a choice.
    """
    graphs: dict[tuple[bool, ...], Any] = {}

    def call(*arguments: Any) -> Any:
        choice = tuple(isinstance(each, list) and not each for each in arguments)
        if choice not in graphs:
            graphs[choice] = tf.function(function, autograph=False).get_concrete_function(*arguments)
        return graphs[choice](*arguments)

    return call


def _cut(variables: Sequence[Any], fragments: int) -> list[list[int]]:
    """Return the places of each fragment's variables, so that fragments have about equally many bytes."""
    sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables]
    found: list[list[int]] = [[] for _ in range(fragments)]
    filled = [0] * fragments
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = filled.index(min(filled))
        found[least].append(place)
        filled[least] += sizes[place]
    return [sorted(places) for places in found]


def _differences(these: Sequence[Any], those: Sequence[Any]) -> Tensors:
    return [this - that for this, that in zip(these, those, strict=True)]


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
    def check_rounds(cls, name: str, rounds: RoundOptions) -> None:
        every, fragments = rounds.every, rounds.fragments
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise HvpipeError(
                f'overlap="local" needs every, the steps of a round, at least 1. Received: every={every!r}'
            )
        if every % fragments:
            raise HvpipeError(
                f"every should be a multiple of fragments. Received: every={every} with fragments={fragments}"
            )
        if not 0 < rounds.learning_rate < math.inf:
            raise HvpipeError(
                "outer_learning_rate should be positive. "
                f"Received: outer_learning_rate={rounds.learning_rate}"
            )
        if not 0 <= rounds.momentum < 1:
            raise HvpipeError(
                f"outer_momentum should be from 0 to below 1. Received: outer_momentum={rounds.momentum}"
            )

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
        self._compression = options.compression
        in_fragments = self._options.rounds.fragments > 1
        # Differences of weights are dense. What reduces all variables together does not run with fragments.
        return replace(options, slices=False, compression=None if in_fragments else options.compression)

    def attach(self, buckets: Buckets) -> None:
        super().attach(buckets)
        rounds, whole = self._options.rounds, buckets.reducer
        if rounds.fragments == 1:
            self._parts = [(whole, list(range(len(whole.variables))))]
        else:
            self._parts = self._cut(whole)
        self.rounds = LocalRounds(rounds, self._parts)

    def _cut(self, whole: BucketReducer) -> list[tuple[BucketReducer, list[int]]]:
        fragments, most = self._options.rounds.fragments, len(whole.variables)
        if fragments > most:
            raise HvpipeError(
                f"fragments should be at most {most}, the trained variables. Received: fragments={fragments}"
            )
        whole.end()  # its buffers are as large as those of all fragments
        found = []
        for number, places in enumerate(_cut(whole.variables, fragments)):
            among_all = tuple(whole.options.places[place] for place in places)
            options = replace(whole.options, compression=self._compression, places=among_all)
            variables = [whole.variables[place] for place in places]
            name = f"{whole.name}, fragment {number}"
            found.append((make_reducer(whole.session, name, variables, options), places))
        return found

    def free(self) -> None:
        for reducer, _ in self._parts:
            reducer.end()

    def compression_state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for reducer, places in self._parts:
            for name, variable in reducer.state().items():
                kind, _, place = name.rpartition("/")
                found[f"{kind}/{places[int(place)]}"] = variable
        return found

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce_and_update: Callable[[], None]
    ) -> None:
        optimizer = self.buckets.update.optimizer
        type(optimizer).apply(optimizer, gradients, variables)


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a MultiOptimizer, or the optimizer itself, without its loss scale."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", [inner]))
