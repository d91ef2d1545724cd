"""The layout of a pipeline: which calls form a stage, which ranks run it, and each rank's program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hvpipe.errors import PlanError
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.graph.stage_cuts import Stages, cut_stages
from hvpipe.plan.stage_plan import Plan, odd_layers
from hvpipe.schedule.action import Action
from hvpipe.schedule.plan_schedule import check_is_pipeline
from hvpipe.schedule.program import RankProgram
from hvpipe.schedule.schedule import Schedule
from hvpipe.schedule.training_schedule import one_at_a_time, training_schedule
from hvpipe.schedule.verify import verify


@dataclass(frozen=True)
class Layout:
    """A model's stages on the ranks of this run.

    Attributes:
        stages: The model, cut into stages.
        microbatches: The micro-batches of a batch that has enough samples for them.
        ranks: `ranks[k]` is the world rank that runs rank k of the schedule.
        make_schedule: Returns the schedule of m micro-batches. Without replicas it takes any m up to
            `microbatches`; with replicas only `microbatches`.
    """

    stages: Stages
    microbatches: int
    ranks: tuple[int, ...]
    make_schedule: Callable[[int], Schedule]
    _programs: dict[tuple[int, bool], RankProgram] = field(default_factory=dict, repr=False, compare=False)

    def program(self, samples: int, world_rank: int, training: bool) -> RankProgram:
        """Return a rank's program for a batch; its schedule is verified.

        A batch with fewer samples than micro-batches gets one micro-batch for each sample. If a stage has
        replicas, these are dealt like the first micro-batches of a whole batch, so some replicas may get
        none.
        """
        count = min(self.microbatches, samples)
        key = (count, training)
        if key not in self._programs:
            schedule_rank = self.ranks.index(world_rank)
            if training:
                schedule = self.whole_schedule if self.has_replicas else self.make_schedule(count)
                verified = verify(schedule, self.stages.dataflow)
                self._programs[key] = RankProgram.first(schedule, verified.programs, schedule_rank, count)
            else:
                self._programs[key] = RankProgram.forward_only(
                    self.whole_schedule, self.stages.dataflow, schedule_rank, count
                )
        return self._programs[key]

    @cached_property
    def whole_schedule(self) -> Schedule:
        """The schedule of `microbatches` micro-batches."""
        return self.make_schedule(self.microbatches)

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold one stage."""
        return any(len(self.ranks_of(stage)) > 1 for stage in range(len(self.stages.cuts)))

    @property
    def data_rank(self) -> int:
        """The world rank whose batches the pipeline trains on: it runs the first stage's micro-batch 0."""
        return self.ranks[self.whole_schedule.rank_of(Action("F", 0, 0))]

    def stages_of(self, world_rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return self.whole_schedule.stages_of(self.ranks.index(world_rank))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the world ranks that hold a stage, ascending."""
        return tuple(sorted(self.ranks[rank] for rank in self.whole_schedule.ranks_of(stage)))

    def peers_of(self, world_rank: int) -> tuple[int, ...]:
        """Return the world ranks with which a rank exchanges tensors in training, ascending."""
        program = self.program(self.microbatches, world_rank, True)
        messages = [step.message for step in program.steps if not isinstance(step, Action)]
        ends = {end for message in messages for end in (message.source, message.target)}
        return tuple(sorted(self.ranks[rank] for rank in ends - {program.rank}))


def layout_of(graph: LayerGraph, plan: Plan, ranks: Sequence[int]) -> Layout:
    """Lay a model out on the ranks according to a plan.

    The stages of some baselines (such as random) are not runs of consecutive layers. Such a plan runs
    without pipelining: each run of layers on one device becomes a stage, and the whole batch goes from one
    stage to the next.

    Args:
        graph: The model.
        plan: The plan.
        ranks: The world rank of each device of `plan.ranks`.

    Returns:
        The layout.

    Raises:
        PlanError: The plan is of another model, or data parallel.
    """
    positions = positions_of(graph, plan)
    if not plan.contiguous:
        runs, rank_of_run = _runs(plan, positions)
        return Layout(cut_stages(graph, runs), 1, tuple(ranks), functools.partial(one_at_a_time, rank_of_run))
    check_is_pipeline(plan)
    stages = cut_stages(graph, [[positions[name] for name in stage.layers] for stage in plan.stages])
    make_schedule = functools.partial(training_schedule, plan)
    return Layout(stages, plan.pipelining.microbatches, tuple(ranks), make_schedule)


def positions_of(graph: LayerGraph, plan: Plan) -> dict[str, int]:
    """Return the index of each layer call by name; PlanError unless the plan has the same names."""
    positions = {call.name: position for position, call in enumerate(graph.calls)}
    planned = [name for stage in plan.stages for name in stage.layers]
    if odd := odd_layers("plan", planned, "model", list(positions)):
        raise PlanError(
            f"The plan should be of this model, {graph.name} ({len(positions)} layer calls). "
            f"Received: a plan of {plan.model or 'an unnamed model'} ({len(planned)} layers); {odd}"
        )
    return positions


def _runs(plan: Plan, positions: dict[str, int]) -> tuple[list[list[int]], list[int]]:
    """Return the runs of consecutive calls on one device, and the index of that device in `plan.ranks`."""
    rank_of = {
        positions[name]: plan.ranks.index(stage.device) for stage in plan.stages for name in stage.layers
    }
    runs: list[list[int]] = []
    rank_of_run: list[int] = []
    for position in sorted(rank_of):
        if not rank_of_run or rank_of_run[-1] != rank_of[position]:
            runs.append([])
            rank_of_run.append(rank_of[position])
        runs[-1].append(position)
    return runs, rank_of_run
