"""Checks of a pipeline's steps, decided alike on all ranks: NaN and Inf in gradients, copies that differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hvpipe.keras.data_parallel.nonfinite import SkippedSteps, check_no_loss_scaling, chosen_policy
from hvpipe.keras.data_parallel.verify import checksum, chosen_interval, difference
from hvpipe.keras.pipeline.state_names import RankState, number_in
from hvpipe.keras.variables import name_of
from hvpipe.session import Session


def step_checks(session: Session, nonfinite: str | None, verify_every: int | None) -> StepChecks:
    """Return the checks that the arguments of `pipeline_parallel`, or else the settings, ask for."""
    policy, every = chosen_policy(session, nonfinite), chosen_interval(session, verify_every)
    return StepChecks(session, policy, every)


class StepChecks:
    """Counts the steps of a pipeline, and checks them.

    Args:
        session: The session.
        nonfinite: "raise", "skip" or "ignore" steps with NaN or Inf in the gradients of any rank.
        verify_every: After how many steps to compare what several ranks hold; 0: never.
    """

    def __init__(self, session: Session, nonfinite: str, verify_every: int) -> None:
        self.looks_at_gradients = nonfinite != "ignore"
        """Whether a step is only applied if the gradients of all ranks are finite."""
        self._session = session
        self._nonfinite = nonfinite
        self._skipped = SkippedSteps(nonfinite)
        self._verify_every = verify_every
        self._steps = 0

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError if the optimizer skips steps itself."""
        check_no_loss_scaling(self._nonfinite, optimizer)

    def tell_nonfinite(self, names: Sequence[str]) -> None:
        """Raise an error for the step that runs, or warn that it is skipped; collective.

        Args:
            names: This rank's variables whose gradients are not finite.
        """
        what = f"gradients of step {self._steps + 1} that are not finite"
        everyone = self._session.engine.allgather_object(list(names), what)
        every = [name for of_rank in everyone for name in of_rank]
        ranks = [rank for rank, of_rank in enumerate(everyone) if of_rank]
        self._skipped.tell(list(dict.fromkeys(every)), self._steps + 1, self._session.world.rank, ranks)

    def end_step(self) -> bool:
        """Count a step; return whether it is time to call `verify`."""
        self._steps += 1
        return self._verify_every > 0 and self._steps % self._verify_every == 0

    def verify(self, state: RankState) -> None:
        """Raise MismatchError, on all ranks, if copies of a variable differ between ranks; collective.

        Only what several ranks hold can be compared: the weights and slots of replicas and of layers that
        stages share, and what every optimizer has once.
        """
        mine = {name: checksum(v) for name, v in state.named.items() if name not in state.may_differ}
        engine = self._session.engine
        what = f"verifying copies of variables after step {self._steps}"
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for rank, sums in enumerate(engine.allgather_object(mine, what)):
            for name, value in sums.items():
                found[name][rank] = value
        copies = {name: sums for name, sums in found.items() if len(sums) > 1}
        different = [name for name, sums in copies.items() if len(set(sums.values())) > 1]
        if different:
            first = _described(different[0], state)
            raise difference(self._steps, first, copies[different[0]], len(different), len(copies))


def _described(name: str, state: RankState) -> str:
    """Return the name of a variable, or what an optimizer keeps for it."""
    number = number_in(name)
    if number is None:
        return name
    variable = name_of(state.variables[number].variable)
    return variable if name.startswith("weights/") else f"{name.split('/')[-2]} of {variable}"
