"""The program that one rank of a pipeline runs in a step, made from a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hvpipe.keras.graph.stage_cuts import Stages
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import Program, Step, needs_of, programs
from hvpipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class RankProgram:
    """One rank's actions, sends and receives for the first `microbatches` micro-batches of a schedule.

    Attributes:
        schedule: The schedule, which may have more micro-batches.
        program: What this rank runs, in order.
        rank: This rank's number in the schedule.
        microbatches: The micro-batches that run.
    """

    schedule: Schedule
    program: Program
    rank: int
    microbatches: int

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages that this rank runs in the step."""
        return frozenset(step.stage for step in self.program if isinstance(step, Action))

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages, on any rank, that run the backward in two parts (I and W)."""
        return frozenset(a.stage for actions in self.schedule.actions for a in actions if a.kind == "I")

    @staticmethod
    def forward_only(schedule: Schedule, stages: Stages, rank: int, microbatches: int) -> RankProgram:
        """Return the program of a schedule's forwards, in its order, for evaluate and predict."""
        actions = tuple(tuple(a for a in of_rank if a.kind == "F") for of_rank in schedule.actions)
        forward = Schedule("forward", schedule.stages, schedule.microbatches, actions)
        of_ranks = programs(forward, needs_of(forward, stages.dataflow))
        return RankProgram(forward, _first(of_ranks[rank], microbatches), rank, microbatches)

    @staticmethod
    def training(
        schedule: Schedule, of_ranks: tuple[Program, ...], rank: int, microbatches: int
    ) -> RankProgram:
        """Return one rank's training program out of all ranks' programs; it may be empty."""
        return RankProgram(schedule, _first(of_ranks[rank], microbatches), rank, microbatches)


def _first(program: Program, microbatches: int) -> Program:
    """Return the steps of the first micro-batches.

    All ranks leave out the rest, so none can deadlock: no remaining step waits for one that is left out.
    """
    return tuple(step for step in program if _microbatch_of(step) < microbatches)


def _microbatch_of(step: Step) -> int:
    return step.microbatch if isinstance(step, Action) else step.message.producer.microbatch
