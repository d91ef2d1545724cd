"""Who runs what in a pipeline: stages to calls, ranks to stages, and the courses of its schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from zlib import crc32

from hvpipe.errors import PlanError
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.graph.stage import Stages, cut_stages
from hvpipe.keras.pipeline.step import Course
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.action import Action
from hvpipe.schedule.plan_schedule import check_is_pipeline, schedule_of
from hvpipe.schedule.schedule import Schedule
from hvpipe.schedule.verify import verify


@dataclass(frozen=True)
class Layout:
    """A model's stages on the ranks of this run. `ranks[k]` is the world rank at place k of the schedule.

    `make_schedule(m)` is the schedule of m micro-batches, for any m up to `microbatches` where no stage has
    replicas.
    """

    stages: Stages
    microbatches: int
    ranks: tuple[int, ...]
    make_schedule: Callable[[int], Schedule]
    _courses: dict[tuple[int, bool], Course] = field(default_factory=dict, repr=False, compare=False)

    def course(self, samples: int, world_rank: int, training: bool) -> Course:
        """The schedule for a batch of so many samples, verified, with this rank's program.

        A batch smaller than the number of micro-batches has a micro-batch for each sample. Where a stage has
        replicas they are dealt as the first ones of a whole batch, and some replicas may get none.
        """
        count = min(self.microbatches, samples)
        key = (count, training)
        if key not in self._courses:
            place = self.ranks.index(world_rank)
            if training:
                replicated = any(len(self.ranks_of(stage)) > 1 for stage in range(len(self.stages.cuts)))
                schedule = self._whole if replicated else self.make_schedule(count)
                verified = verify(schedule, self.stages.dataflow)
                self._courses[key] = Course.beginning(schedule, verified.programs, place, count)
            else:
                self._courses[key] = Course.forward_only(self._whole, self.stages, place, count)
        return self._courses[key]

    @cached_property
    def _whole(self) -> Schedule:
        return self.make_schedule(self.microbatches)

    @property
    def summary(self) -> str:
        """One line about the model's shapes and who runs what, for ranks to compare."""
        graph, schedule = self.stages.graph, self._whole
        weights = [[v.shape for v in layer.variables] for layer in graph.all_layers()]
        cuts = [cut.calls for cut in self.stages.cuts]
        everything = repr((graph.tensors, weights, cuts, schedule.actions, self.ranks))
        return (
            f"pipeline_parallel with {len(self.stages.cuts)} stages of {len(graph.calls)} layer calls, "
            f"{schedule.microbatches} micro-batches, {schedule.name}, "
            f"checksum {crc32(everything.encode()):08x}"
        )

    @property
    def feeder(self) -> int:
        """The world rank whose batches count: the one that begins with the first micro-batch."""
        return self.ranks[self._whole.rank_of(Action("F", 0, 0))]

    def stages_of(self, world_rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return self._whole.stages_of(self.ranks.index(world_rank))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The world ranks that hold a stage, ascending."""
        return tuple(sorted(self.ranks[place] for place in self._whole.ranks_of(stage)))


def layout_of(graph: LayerGraph, plan: Plan, ranks: Sequence[int]) -> Layout:
    """The layout that a plan says, its devices being these world ranks in the order of `plan.ranks`.

    A plan whose stages are no runs of layers (of a baseline such as random) runs as the native mode would:
    each run of layers that are on one device is a stage, and the whole batch goes from one to the next.
    """
    places = _places(graph, plan)
    if not plan.contiguous:
        runs, homes = _runs(plan, places)
        return Layout(cut_stages(graph, runs), 1, tuple(ranks), functools.partial(_one_by_one, homes))
    check_is_pipeline(plan)
    stages = cut_stages(graph, [[places[name] for name in stage.layers] for stage in plan.stages])
    return Layout(stages, plan.pipelining.microbatches, tuple(ranks), functools.partial(_schedule, plan))


def _places(graph: LayerGraph, plan: Plan) -> dict[str, int]:
    places = {call.name: place for place, call in enumerate(graph.calls)}
    planned = [name for stage in plan.stages for name in stage.layers]
    odd = sorted(set(planned) ^ set(places))
    if odd:
        raise PlanError(
            f"The plan should be of this model, {graph.name} ({len(places)} layer calls). "
            f"Received: a plan of {plan.model or 'an unnamed model'} ({len(planned)} layers); "
            f"layer {odd[0]!r} is in only one of them"
        )
    return places


def _runs(plan: Plan, places: dict[str, int]) -> tuple[list[list[int]], list[int]]:
    """Runs of consecutive layers on one device, and each run's device by its place in `plan.ranks`."""
    home_of = {places[name]: plan.ranks.index(stage.device) for stage in plan.stages for name in stage.layers}
    runs: list[list[int]] = []
    homes: list[int] = []
    for place in sorted(home_of):
        if not homes or homes[-1] != home_of[place]:
            runs.append([])
            homes.append(home_of[place])
        runs[-1].append(place)
    return runs, homes


def _one_by_one(homes: Sequence[int], microbatches: int) -> Schedule:
    """Each micro-batch through all stages and back before the next one."""
    actions: list[list[Action]] = [[] for _ in range(max(homes) + 1)]
    for i in range(microbatches):
        for stage, home in enumerate(homes):
            actions[home].append(Action("F", i, stage))
        for stage, home in reversed(list(enumerate(homes))):
            actions[home].append(Action("B", i, stage))
    return Schedule("one by one", len(homes), microbatches, tuple(map(tuple, actions)))


def _schedule(plan: Plan, microbatches: int) -> Schedule:
    """The plan's schedule for a batch that may be too small for all of its micro-batches."""
    chunks = plan.pipelining.chunks
    if chunks > 1 and microbatches < len(plan.ranks):
        return _few_interleaved(len(plan.ranks), microbatches, chunks)
    return schedule_of(plan, microbatches)


def _few_interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Fewer micro-batches than ranks: one chunk after the other, there and back."""
    actions = [
        [Action("F", i, chunk * ranks + rank) for chunk in range(chunks) for i in range(microbatches)]
        + [
            Action("B", i, chunk * ranks + rank)
            for chunk in reversed(range(chunks))
            for i in range(microbatches)
        ]
        for rank in range(ranks)
    ]
    return Schedule("interleaved", ranks * chunks, microbatches, tuple(map(tuple, actions)))
