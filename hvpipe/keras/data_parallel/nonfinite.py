"""A guard against NaN and Inf: it looks at reduced gradients, which are the same on all ranks.

    sum of all ranks -> any NaN or Inf? --- no ---> update
                                  |
                                 yes --> no update, a flag that Python reads after the step

A NaN or Inf on one rank makes the sum NaN or Inf on all of them, so all ranks decide alike without a message.
Which rank it came from is asked for later, where all ranks meet: one of them may update earlier than others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError, listed
from hvpipe.keras.compat import gradient_accumulators, is_last_micro_step, step_count, trained_variables
from hvpipe.keras.variables import name_of, native
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")

POLICIES = ("raise", "skip", "ignore")


def chosen_policy(session: Session, nonfinite: str | None) -> str:
    """Return the policy: the argument's value, else the setting's. Raises HvpipeError for an unknown one."""
    policy = session.settings.nonfinite if nonfinite is None else nonfinite
    if policy not in POLICIES:
        wanted = ", ".join(map(repr, POLICIES))
        raise HvpipeError(f"nonfinite should be one of {wanted}. Received: nonfinite={policy!r}")
    return policy


def check_no_loss_scaling(policy: str, optimizer: Any) -> None:
    """Raise HvpipeError if the optimizer has a policy of its own."""
    if policy != "ignore" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise HvpipeError(
            "A LossScaleOptimizer skips steps with NaN or Inf itself: use nonfinite='ignore'. "
            f"Received: nonfinite={policy!r} with optimizer {optimizer.name}"
        )


class SkippedSteps:
    """Raises an error for a step whose gradients were not finite, or counts it and warns.

    Args:
        policy: "raise" or "skip".
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._skipped = 0

    def tell(self, names: Sequence[str], step: int, rank: int, ranks: Sequence[int] = ()) -> None:
        """Report a step. All ranks call this, with the same arguments but `rank`.

        Args:
            names: The variables whose gradients were not finite.
            step: The number of the step, from 1; with steps_per_execution, the last one of that call.
            rank: This rank.
            ranks: The ranks that the NaN or Inf came from, if that is known.

        Raises:
            HvpipeError: With "raise".
        """
        others = len(names) - 1
        found = f"NaN or Inf in the sum of all ranks' gradients of {names[0]}" + (
            f" and {others} other variable{'s' if others > 1 else ''}" if others else ""
        )
        if ranks:
            found += f", from rank{'s' if len(ranks) > 1 else ''} {listed(map(str, ranks))}"
        if self._policy == "raise":
            raise HvpipeError(
                f"Gradients should be finite. Received: {found}, at step {step}. These variables were not "
                "updated. Look at this step's batch and at the learning rate, or continue from a checkpoint"
            )
        self._skipped += 1
        if rank == 0 and self._skipped & (self._skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th time
            logger.warning(
                "hvpipe: skipped step %d on all ranks (skipped so far: %d). Received: %s",
                step,
                self._skipped,
                found,
            )


class NonfiniteGuard:
    """Keeps updates with NaN or Inf from one optimizer's variables.

    Args:
        policy: "raise" or "skip".
        optimizer: The optimizer.
    """

    def __init__(self, policy: str, optimizer: Any) -> None:
        check_no_loss_scaling(policy, optimizer)
        self.waits_for_all = policy == "skip"
        """Whether an update needs all gradients: a step is skipped as a whole."""
        self._skipped_steps = SkippedSteps(policy)
        # A flag for each variable, and one: it came from this rank, too. One tensor for each update, so that
        # updates do not wait for each other.
        self._flags: dict[int, tuple[Any, list[Any]]] = {}
        self._any: Any = None
        self._own: Any = None  # whether this rank's gradients of the last step that reduced were not finite
        self._found: tuple[list[str], bool, int] | None = None  # names, whether from here, step: not yet told

    def note_own(self, gradients: Sequence[Any]) -> None:
        """Note, in the graph of a step, whether this rank's gradients are finite before they are reduced.

        By then the graph has updated with those of the step before, if it does.
        """
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
        self._own_flag().assign(tf.logical_not(finite))

    def _own_flag(self) -> Any:
        if self._own is None:
            with tf.init_scope():
                self._own = tf.Variable(False, trainable=False, name="hvpipe_own_bad")
        return self._own

    def if_finite(
        self,
        number: int,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        update: Callable[[], None],
        otherwise: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `update` in a branch of the graph that runs if all gradients are finite; else `otherwise`.

        Args:
            number: The number of the update: of its bucket, or one for all.
            variables: What it updates.
            gradients: Their reduced gradients.
            update: Updates the variables.
            otherwise: Runs in the other branch.
        """
        bad = tf.stack([tf.logical_not(tf.reduce_all(tf.math.is_finite(g))) for g in gradients])
        if number not in self._flags or len(self._flags[number][1]) != len(variables):
            with tf.init_scope():
                empty = tf.zeros([len(variables) + 1], tf.bool)
                flags = tf.Variable(empty, trainable=False, name="hvpipe_bad")
            self._flags[number] = flags, list(variables)
            self._any = None
        flags, any_bad = self._flags[number][0], tf.reduce_any(bad)
        mine = tf.concat([bad, [tf.logical_and(any_bad, self._own_flag().read_value())]], 0)
        flags.assign(tf.logical_or(flags.read_value(), mine))  # a call may run several steps before `look`
        tf.cond(any_bad, _branch(otherwise), _branch(update))

    def look(self, step: int) -> None:
        """Look at the flags after a call of the train function, whose last step is the `step`-th from 1."""
        if not self._flags or not bool(self._any_flag().numpy()):
            return
        values = [(flags.numpy(), variables) for flags, variables in self._flags.values()]
        names = [
            name_of(variable)
            for value, variables in values
            for bad, variable in zip(value[:-1], variables, strict=True)
            if bad
        ]
        self._found = names, any(value[-1] for value, _ in values), step
        for flags, _ in self._flags.values():
            flags.assign(tf.zeros_like(flags))

    def tell(self, session: Session) -> None:
        """Report what `look` has found; collective if that is something.

        Raises:
            HvpipeError: With "raise", if a gradient was not finite; on all ranks alike.
        """
        if self._found is None:
            return
        (names, mine, step), self._found = self._found, None
        everyone = session.engine.agree(f"gradients of step {step} that are not finite", float(mine))
        ranks = [rank for rank, bad in enumerate(everyone) if bad]
        self._skipped_steps.tell(names, step, session.world.rank, ranks)

    def _any_flag(self) -> Any:
        if self._any is None:
            every = [flags for flags, _ in self._flags.values()]
            self._any = tf.function(
                lambda: tf.reduce_any([tf.reduce_any(flags) for flags in every]), autograph=False
            )
        return self._any()


def guarded_alone(policy: str, model: Any, inner: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Return the train function of a single rank with a guard around its optimizer's `apply`."""
    optimizer = model.optimizer
    guard = NonfiniteGuard(policy, optimizer)

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        known = trained_variables(optimizer) if trainable_variables is None else list(trainable_variables)
        trained = [v for g, v in zip(grads, known, strict=True) if g is not None]
        gradients = [tf.convert_to_tensor(g) for g in grads if g is not None]

        def update() -> None:
            type(optimizer).apply(optimizer, grads, trainable_variables)

        accumulators: list[Any] = []

        def skip() -> None:
            for each in accumulators:
                each.assign(tf.zeros_like(each))
            if accumulators:
                step_count(optimizer).assign_add(1)

        if not optimizer.built:
            with tf.init_scope():
                optimizer.build(known)
        if optimizer.gradient_accumulation_steps:  # look at the sum that updates, as several ranks do
            accumulators = [native(found) for found in gradient_accumulators(optimizer, trained)]
            updates = is_last_micro_step(optimizer)
            sums = [g + a.read_value() for g, a in zip(gradients, accumulators, strict=True)]
            gradients = [tf.where(updates, total, tf.zeros_like(total)) for total in sums]
        guard.if_finite(0, trained, gradients, update, skip)

    optimizer.apply = apply
    steps = 0

    def train_function(iterator: Any) -> Any:
        nonlocal steps
        logs = inner(iterator)
        steps += int(model.steps_per_execution)
        guard.look(steps)
        guard.tell(session)
        return logs

    return train_function


def _branch(call: Callable[[], None]) -> Callable[[], Any]:
    def branch() -> Any:
        call()
        return tf.constant(0)

    return branch
