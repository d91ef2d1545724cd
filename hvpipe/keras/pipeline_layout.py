"""Who runs what in a pipeline: stages to calls, ranks to stages, and the courses of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvpipe.action import Action
from hvpipe.errors import HvpipeError, PlanError
from hvpipe.keras.layer_graph import LayerGraph
from hvpipe.keras.pipeline_step import Course
from hvpipe.keras.stage import Stages, cut_stages
from hvpipe.plan.stages import Plan
from hvpipe.schedule import NAMES, Schedule, make
from hvpipe.verify import verify


@dataclass(frozen=True)
class Layout:
    """A model's stages on the ranks of this run. `ranks[k]` is the world rank at place k of the schedule."""

    stages: Stages
    schedule: str
    microbatches: int
    chunks: int
    replicas: tuple[int, ...]
    ranks: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...] | None = None
    _courses: dict[tuple[int, bool], Course] = field(default_factory=dict, repr=False, compare=False)

    def place_of(self, world_rank: int) -> int:
        """This rank's place in the schedule."""
        return self.ranks.index(world_rank)

    def course(self, samples: int, world_rank: int, training: bool) -> Course:
        """The schedule for a batch of so many samples, verified, with this rank's program.

        A batch smaller than the number of micro-batches has a micro-batch for each sample.
        """
        count = min(self.microbatches, samples)
        key = (count, training)
        if key not in self._courses:
            schedule = self._schedule_of(count)
            place = self.place_of(world_rank)
            if training:
                verified = verify(schedule, self.stages.dataflow)
                self._courses[key] = Course(schedule, verified.programs, place)
            else:
                self._courses[key] = Course.forward_only(schedule, self.stages, place)
        return self._courses[key]

    def _schedule_of(self, microbatches: int) -> Schedule:
        if microbatches < max(self.replicas):
            raise HvpipeError(
                f"A batch should have a sample for each of {max(self.replicas)} replicas of a stage; drop the "
                f"remainder of the dataset. Received: a batch of {microbatches}"
            )
        if self.schedule == "interleaved":
            ranks = len(self.ranks)
            if microbatches < ranks:
                return _few_interleaved(ranks, microbatches, self.chunks)
            return make("interleaved", ranks, microbatches, self.chunks)
        return make(self.schedule, self.replicas, microbatches, shares=self.shares)

    def stages_of(self, world_rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        place = self.place_of(world_rank)
        if self.schedule == "interleaved":
            return tuple(place + chunk * len(self.ranks) for chunk in range(self.chunks))
        return (self._stage_at(place),)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The world ranks that hold a stage, ascending."""
        if self.schedule == "interleaved":
            return (self.ranks[stage % len(self.ranks)],)
        return tuple(sorted(r for k, r in enumerate(self.ranks) if self._stage_at(k) == stage))

    def _stage_at(self, place: int) -> int:
        return next(s for s in range(len(self.replicas)) if place < sum(self.replicas[: s + 1]))


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


def check_schedule(schedule: str, microbatches: int, ranks: int, chunks: int) -> None:
    """Refuse what cannot be a pipeline: an unknown schedule, fewer micro-batches than stages."""
    if schedule not in NAMES:
        raise HvpipeError(f"schedule should be one of {', '.join(NAMES)}. Received: schedule={schedule!r}")
    if microbatches < ranks:
        raise HvpipeError(
            f"microbatches should be at least the number of stages, {ranks}, or some would always be idle. "
            f"Received: microbatches={microbatches}"
        )
    if schedule == "interleaved" and chunks < 2:
        raise HvpipeError(
            f"schedule='interleaved' wants 2 or more chunks on each rank. Received: chunks={chunks}"
        )


def replicas_of(stages: int, replicas: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """How many ranks each stage has: as told, or all the same."""
    if replicas is None:
        if world_size % stages:
            raise HvpipeError(
                f"The number of ranks should be a multiple of the stages, or replicas say how many ranks "
                f"each stage has. Received: stages={stages} on {world_size} ranks"
            )
        return (world_size // stages,) * stages
    if len(replicas) != stages or min(replicas, default=0) < 1 or sum(replicas) != world_size:
        raise HvpipeError(
            f"replicas should be {stages} numbers, one or more ranks for each stage, {world_size} together. "
            f"Received: replicas={tuple(replicas)}"
        )
    return tuple(replicas)


def stages_of_plan(graph: LayerGraph, plan: Plan) -> Stages:
    """Cut the graph as the plan says; PlanError for the plan of another model."""
    places = {call.name: place for place, call in enumerate(graph.calls)}
    planned = [name for stage in plan.stages for name in stage.layers]
    odd = sorted(set(planned) ^ set(places))
    if odd:
        raise PlanError(
            f"The plan should be of this model, {graph.name} ({len(places)} layer calls). "
            f"Received: a plan of {plan.model or 'an unnamed model'} ({len(planned)} layers); "
            f"layer {odd[0]!r} is in only one of them"
        )
    return cut_stages(graph, [[places[name] for name in stage.layers] for stage in plan.stages])
