"""Chooses the plan of a pipeline: the user's, or one made for this model on these ranks."""

from __future__ import annotations

import logging
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.pipeline.layout import positions_of
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.keras.profiling.footprint import weight_bytes
from hvpipe.plan.exact import exact
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining, checked_recompute
from hvpipe.plan.stage_plan import Plan, odd_layers
from hvpipe.search.choice import plan_for_every_device
from hvpipe.search.options import PipeliningChoice
from hvpipe.session import Session
from hvpipe.specs.cluster import Cluster, equal_cluster
from hvpipe.specs.profile import Profile
from hvpipe.world.world import World

logger = logging.getLogger("hvpipe")


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `pipeline_parallel`, as the user gave them; None stands for the default."""

    stages: Any = "auto"
    replicas: Sequence[int] | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: bool | Sequence[int] | None = None
    profile: Profile | str | os.PathLike[str] | None = None
    cluster: Cluster | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("microbatches", "chunks"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise HvpipeError(f"{name} should be a whole number. Received: {name}={value!r}")
        listed = isinstance(self.replicas, Sequence) and all(map(_is_count, self.replicas))
        if self.replicas is not None and not listed:
            raise HvpipeError(
                "replicas should be the number of ranks of each stage, such as (2, 1, 1). "
                f"Received: replicas={self.replicas!r}"
            )

    @property
    def checked_recompute(self) -> bool | tuple[int, ...] | None:
        """`recompute` in the form that plans have."""
        return None if self.recompute is None else checked_recompute(self.recompute)

    @property
    def pipelining(self) -> Pipelining:
        """The options with defaults filled in, for a pipeline without a plan."""
        schedule = DEFAULT_PIPELINING.schedule if self.schedule is None else self.schedule
        chunks = self.chunks
        if chunks is None or (self.schedule is None and self.cluster is not None):
            chunks = 2 if schedule == "interleaved" else 1  # the planner may choose another schedule
        return Pipelining(
            schedule,
            DEFAULT_PIPELINING.microbatches if self.microbatches is None else self.microbatches,
            self.checked_recompute or False,
            chunks,
        )

    @property
    def choice(self) -> PipeliningChoice:
        """What the options fix, and what they leave to the planner."""
        recompute = self.checked_recompute
        return PipeliningChoice(
            "auto" if self.schedule is None else self.schedule,
            self.pipelining.microbatches,
            "auto" if recompute is None else recompute,
            2 if self.chunks is None else self.chunks,
        )


def plan_for(session: Session, graph: LayerGraph, options: PipelineOptions) -> tuple[Plan, list[int]]:
    """Return the plan of a pipeline; collective.

    Args:
        session: The session.
        graph: The model.
        options: The arguments of `pipeline_parallel`.

    Returns:
        The plan, and the world rank of each of its devices; the same on all ranks.

    Raises:
        HvpipeError: Options that cannot be satisfied, or that contradict a plan.
        PlanError: A plan or profile of another model, or too little memory.
    """
    stages = options.stages
    if isinstance(stages, (str, os.PathLike)) and stages != "auto":
        if not os.path.exists(stages):
            raise HvpipeError(
                f"{_stages_may_be(session.world.size)}. Received: {os.fspath(stages)!r}, no file"
            )
        stages = Plan.read(stages)
    if session.settings.elastic:
        options = fitted(replace(options, stages=stages), session.world)
        stages = options.stages
    if isinstance(stages, Plan):
        _check_plan(graph, stages)
        _check_options(options, stages)
        return stages, _ranks_by_name(session, stages.ranks)
    size = session.world.size
    count, replicas = _stage_counts(stages, options.replicas, size)
    given, cluster = _read_on_rank_0(session, options)
    if cluster is not None and session.settings.elastic and len(cluster.devices) != session.world.size:
        cluster = cluster.only(_rank_names(session))
    if cluster is None or stages != "auto":
        _check_counts(graph, count, options.pipelining)
    profile = _checked_profile(graph, given)
    if cluster is None:
        return _replicate(balanced(profile, replicas, options.pipelining), replicas), list(range(size))
    if options.replicas is not None:
        raise HvpipeError(
            "Replicas on a given cluster need the planner: pass the plan of `hvpipe plan --mode hybrid`, or "
            f"leave them out. Received: replicas={replicas} and a cluster"
        )
    limited = any(device.memory_bytes is not None for device in cluster.devices)
    if given is None and limited and session.world.rank == 0:
        logger.warning(
            "hvpipe: without a profile, the plan counts the memory of micro-batches of one sample: pass the "
            "profile that `hvpipe profile` writes."
        )
    # Before the search, which may take a minute. The plan will have all devices.
    _ranks_by_name(session, [device.name for device in cluster.devices], "cluster")
    plan = _searched(session, profile, cluster, options, None if stages == "auto" else count)
    return plan, _ranks_by_name(session, plan.ranks)


def fitted(options: PipelineOptions, world: World) -> PipelineOptions:
    """Return options that fit the number of ranks: after a loss, there are fewer than they were made for."""
    stages, replicas, size = options.stages, options.replicas, world.size
    plan = stages if isinstance(stages, Plan) else None
    if plan is not None and len(plan.ranks) != size:
        how = plan.pipelining
        stages, replicas = len(plan.stages) // how.chunks, None
        options = replace(options, microbatches=how.microbatches)
        if options.cluster is None:  # with a cluster, the planner chooses the rest again
            options = replace(options, schedule=how.schedule, chunks=how.chunks, recompute=how.recompute)
    elif replicas is not None and sum(replicas) != size:
        stages, replicas = len(replicas), None
    elif not isinstance(stages, int) or (stages <= size and size % stages == 0) or replicas is not None:
        return options
    count = min(stages, size)
    if world.rank == 0:
        logger.warning(
            "hvpipe: the pipeline is planned anew for %d ranks, with %d stages. It was made for other ranks.",
            *(size, count),
        )
    # Stages of another cut have other numbers.
    if options.cluster is not None:
        named = isinstance(options.checked_recompute, tuple)
        recompute = None if named else options.recompute
        return replace(options, stages="auto", replicas=None, recompute=recompute)
    recompute = options.recompute if count == stages else options.recompute not in (None, False)
    spread = tuple(size // count + (stage < size % count) for stage in range(count))
    return replace(options, stages=count, replicas=spread, recompute=recompute)


def _searched(
    session: Session, profile: Profile, cluster: Cluster, options: PipelineOptions, count: int | None
) -> Plan:
    """Return the fastest plan that uses all ranks, as `hvpipe plan` would choose it; collective."""
    choice = options.choice

    def plan() -> Plan | None:
        if session.world.rank > 0:
            return None
        stages = None if count is None else count * choice.usual.chunks
        return plan_for_every_device(profile, cluster, choice, stages)

    found: Plan = session.engine.broadcast_object(on_all_ranks(session, "planning", plan), what="planning")
    return found


def _check_counts(graph: LayerGraph, count: int, how: Pipelining) -> None:
    """Raise HvpipeError if a number of stages is too large for the model."""
    if count * how.chunks > len(graph.calls):
        named = "".join(
            f" ({name!r} is a nested model that stays whole: {why})" for name, why in graph.whole[:1]
        )
        raise HvpipeError(
            f"There should be at most as many stages as layer calls in {graph.name}, {len(graph.calls)}"
            f"{named}. Received: {count * how.chunks} stages"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _stages_may_be(size: int) -> str:
    return f"stages should be 'auto', a plan or its file, or a number from 1 to {size}, the number of ranks"


def _stage_counts(stages: Any, replicas: Sequence[int] | None, size: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of stages that have their own ranks, and the number of ranks of each."""
    if replicas is not None and (not replicas or min(replicas) < 1 or sum(replicas) != size):
        raise HvpipeError(
            f"replicas should be the number of ranks of each stage, 1 or more, {size} in total. "
            f"Received: replicas={tuple(replicas)}"
        )
    if stages == "auto":
        stages = size if replicas is None else len(replicas)
    if not _is_count(stages) or not 1 <= stages <= size:
        raise HvpipeError(f"{_stages_may_be(size)}. Received: stages={stages!r}")
    if replicas is None:
        if size % stages:
            raise HvpipeError(
                "The number of ranks should be a multiple of the number of stages. Otherwise pass replicas, "
                f"the number of ranks of each stage. Received: stages={stages} on {size} ranks"
            )
        return stages, (size // stages,) * stages
    if len(replicas) != stages:
        raise HvpipeError(
            f"replicas should be {stages} numbers, one for each stage. Received: replicas={tuple(replicas)}"
        )
    return stages, tuple(replicas)


def _read_on_rank_0(session: Session, options: PipelineOptions) -> tuple[Profile | None, Cluster | None]:
    """Return the profile and the cluster of rank 0; collective.

    Ranks may have measured different times, but all must plan with the same.

    Raises:
        HvpipeError: Rank 0 cannot read them. Raised on all ranks.
    """
    given = " and a ".join(name for name in ("profile", "cluster") if getattr(options, name) is not None)
    if not given:
        return None, None
    session.engine.agree(f"pipeline_parallel with a {given}")

    def read() -> tuple[Profile | None, Cluster | None] | None:
        if session.world.rank > 0:
            return None
        return _read_profile(options.profile), _read_cluster(options.cluster)

    mine = on_all_ranks(session, f"reading a {given}", read)
    found: tuple[Profile | None, Cluster | None] = session.engine.broadcast_object(
        mine, what=f"reading a {given}"
    )
    return found


def _checked_profile(graph: LayerGraph, profile: Profile | None) -> Profile:
    """Return a profile that fits the model; without one, an estimate."""
    if profile is None:
        return estimate(graph, samples=1)
    names, theirs = [call.name for call in graph.calls], [layer.name for layer in profile.layers]
    if odd := odd_layers("profile", theirs, "model", names):
        raise PlanError(
            f"The profile should be of this model, {graph.name} ({len(names)} layer calls). Received: "
            f"{profile.model or 'unnamed'} ({len(theirs)} layers); {odd}"
        )
    _check_costs(graph, profile)
    return profile


def _read_profile(given: Profile | str | os.PathLike[str] | None) -> Profile | None:
    return Profile.read(given) if isinstance(given, (str, os.PathLike)) else given


def _read_cluster(given: Cluster | str | os.PathLike[str] | None) -> Cluster | None:
    return Cluster.read(given) if isinstance(given, (str, os.PathLike)) else given


def _check_costs(graph: LayerGraph, profile: Profile) -> None:
    """Raise PlanError if layers of the same names have other weights, or outputs of another size."""
    sizes_bytes = _output_bytes(graph, profile.batch_size)
    for call in graph.calls:
        layer = profile.layers[profile.place(call.name)]
        least_bytes, most_bytes = sizes_bytes.get(call.name, (layer.output_bytes, layer.output_bytes))
        wrong = None
        if layer.weight_bytes != weight_bytes(call.operation):
            wrong = f"{weight_bytes(call.operation)} bytes of trained weights", layer.weight_bytes
        elif not 0.99 * least_bytes - 8 <= layer.output_bytes <= 1.01 * most_bytes + 8:
            wrong = f"{least_bytes} bytes of output for {profile.batch_size} samples", layer.output_bytes
        if wrong is not None:
            raise PlanError(
                f"The profile should be of this model, {graph.name}, where layer {call.name!r} has "
                f"{wrong[0]}; measure again. Received: {profile.model or 'unnamed'}, where it has {wrong[1]}"
            )


def _output_bytes(graph: LayerGraph, samples: int) -> dict[str, tuple[int, int]]:
    """Return the least and most bytes that each call makes: used tensors only, and all tensors with masks.

    It only has calls whose sizes are known and grow with the samples, because profiles are scaled from one
    batch size to another.
    """
    known = [
        graph.sized([(count, *graph.tensors[number].shape[1:]) for number in graph.inputs])
        for count in (samples, 2 * samples)
    ]
    once, twice = known
    if once is None or twice is None:
        return {}
    used = {number for call in graph.calls for number, _ in call.reads} | set(graph.outputs)
    found = {}
    for call in graph.calls:
        made = [number for number, _ in call.writes]
        if all(None not in once[n].shape and twice[n].nbytes(1) == 2 * once[n].nbytes(1) for n in made):
            # A mask has at most a byte for each of the tensor's elements.
            masks_bytes = sum(once[n].nbytes(1) for n in made if once[n].mask_shape is not None)
            least_bytes = sum(once[n].nbytes(1) for n in made if n in used)
            found[call.name] = least_bytes, masks_bytes + sum(once[n].nbytes(1) for n in made)
    return found


def _check_plan(graph: LayerGraph, plan: Plan) -> None:
    """Raise PlanError for a plan of another model: other layer names, or other sizes.

    A plan holds the fingerprint of its profile.
    """
    positions_of(graph, plan)
    if plan.profile_fingerprint not in ("", estimate(graph, samples=1).fingerprint):
        raise PlanError(
            f"The plan should be of this model, {graph.name}, with the same trained weights and edges; "
            f"measure and plan again. Received: a plan of {plan.model or 'an unnamed model'}, with layers of "
            "the same names and other weights or edges"
        )


def _check_options(options: PipelineOptions, plan: Plan) -> None:
    """Raise HvpipeError if an option contradicts the plan, or PlanError if profile or cluster do."""
    how = plan.pipelining
    replicas = None if options.replicas is None else tuple(options.replicas)
    both: dict[str, tuple[Any, Any]] = {
        "microbatches": (options.microbatches, how.microbatches),
        "schedule": (options.schedule, how.schedule),
        "chunks": (options.chunks, how.chunks),
        "recompute": (options.checked_recompute, how.recompute),
        "replicas": (replicas, tuple(len(stage.devices) for stage in plan.stages)),
    }
    for name, (asked, planned) in both.items():
        if asked is not None and asked != planned:
            raise HvpipeError(
                f"A plan brings its own {name}: leave it out, or plan again with it. "
                f"Received: {name}={asked!r} and a plan with {name}={planned!r}"
            )
    plan.check(_read_profile(options.profile), _read_cluster(options.cluster))


def balanced(profile: Profile, replicas: Sequence[int], how: Pipelining) -> Plan:
    """Return a plan on equal devices. A stage with more replicas gets more of the model.

    Args:
        profile: The costs of the layers.
        replicas: The number of ranks of each stage; they take micro-batches in turn.
        how: Schedule and micro-batches.
    """
    count = len(replicas)
    if len(set(replicas)) == 1 or how.chunks > 1:
        return partition(profile, equal_cluster(count), count * how.chunks, how)
    cluster = equal_cluster(count, speeds=tuple(map(float, replicas)))
    return exact(profile, cluster, count, how, [device.name for device in cluster.devices])


def _replicate(plan: Plan, replicas: Sequence[int]) -> Plan:
    """Return the plan with each stage on its number of equal devices."""
    if max(replicas) == 1:
        return plan
    if plan.pipelining.chunks > 1:
        raise HvpipeError(
            "Several ranks for a stage need one of the schedules gpipe, 1f1b, eager-1f1b, zb-h1. "
            f"Received: schedule='interleaved', replicas={tuple(replicas)}"
        )
    stages = tuple(
        replace(stage, devices=tuple(f"{stage.device}/{k}" for k in range(count)), shares=(1.0,) * count)
        for stage, count in zip(plan.stages, replicas, strict=True)
    )
    return replace(plan, stages=stages)


def _ranks_by_name(session: Session, devices: Sequence[str], of: str = "plan") -> list[int]:
    """Return the world rank of each device; collective.

    A device is named HOST:LOCAL_RANK (as by `hvpipe profile`), HOST if it has one rank, or rank3. A plan may
    leave devices of a host idle. Its other devices then go to the host's ranks in their order.
    """
    world, table = session.world, _rank_names(session)
    renumbered = _in_order(devices, table)
    if len(renumbered) == len(devices) == world.size and renumbered.keys() - table.keys():
        if world.rank == 0:
            logger.warning(
                "hvpipe: the %s leaves devices idle, so each host's ranks take its other devices in order: "
                "%s. With GPUs, CUDA_VISIBLE_DEVICES should name those of the %s.",
                *(of, ", ".join(f"{name} is rank {rank}" for name, rank in renumbered.items()), of),
            )
        table |= renumbered
    lacking = [device for device in devices if device not in table]
    here = ", ".join(name for name in table if ":" in name)
    if lacking:
        again = "plan again for this cluster, with" if of == "plan" else "use"
        raise PlanError(
            f"The {of}'s devices should be the ranks of this run ({here}); {again} the file that "
            f"`hvpipe profile` writes. Received: devices={list(devices)}"
        )
    if len(devices) != world.size:
        raise PlanError(
            f"The {of} should have a device for every rank: run on {len(devices)} ranks. "
            f"Received: {world.size} ranks ({here}), devices={list(devices)}"
        )
    return [table[device] for device in devices]


def _in_order(devices: Sequence[str], table: Mapping[str, int]) -> dict[str, int]:
    """Return the ranks of devices named HOST:NUMBER, if the devices of a host are numbered from 0 again."""
    of_host: dict[str, list[tuple[int, str]]] = {}
    for device in devices:
        host, _, number = device.rpartition(":")
        if number.isdecimal():
            of_host.setdefault(host, []).append((int(number), device))
    found = {
        device: table.get(f"{host}:{place}")
        for host, named in of_host.items()
        for place, (_, device) in enumerate(sorted(named))
    }
    return {device: rank for device, rank in found.items() if rank is not None}


def _rank_names(session: Session) -> dict[str, int]:
    """Return the ranks by the names that devices have in plans and clusters; collective."""
    world = session.world
    table: dict[str, int] = {}
    places = session.engine.allgather_object(
        (world.host, world.local_rank, world.local_size), "pipeline_parallel"
    )
    for rank, (host, local_rank, local_size) in enumerate(places):
        table |= {f"{host}:{local_rank}": rank, f"rank{rank}": rank}
        if local_size == 1:
            table[host] = rank
    return table
