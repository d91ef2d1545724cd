"""Which plan a pipeline follows: one that was given, or one made for this model on these ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.keras.estimate import estimate
from hvpipe.keras.layer_graph import LayerGraph
from hvpipe.plan.partition import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stages import Plan
from hvpipe.profile import Profile
from hvpipe.session import Session
from hvpipe.topology import Cluster, equal_cluster


@dataclass(frozen=True)
class Wish:
    """What the user asked `pipeline_parallel` for."""

    stages: Any
    replicas: Sequence[int] | None
    pipelining: Pipelining
    profile: Profile | str | os.PathLike[str] | None
    cluster: Cluster | str | os.PathLike[str] | None


def plan_for(session: Session, graph: LayerGraph, wish: Wish) -> tuple[Plan, list[int]]:
    """The plan, and the world rank of each of its devices; the same on all ranks."""
    stages = wish.stages
    if isinstance(stages, (str, os.PathLike)) and stages != "auto":
        stages = Plan.read(stages)
    if isinstance(stages, Plan):
        return stages, _ranks_by_name(session, stages.ranks)
    size = session.world.size
    count, replicas = _counts(stages, wish.replicas, size)
    how = wish.pipelining
    if how.microbatches < count:
        raise HvpipeError(
            f"microbatches should be at least the number of stages, {count}, or some would always be idle. "
            f"Received: microbatches={how.microbatches}"
        )
    if count * how.chunks > len(graph.calls):
        whole = graph.whole_models()
        named = f" ({whole[0]!r} is a nested model that cannot be opened)" if whole else ""
        raise HvpipeError(
            f"There should be at most as many stages as layer calls in {graph.name}, {len(graph.calls)}"
            f"{named}. Received: {count * how.chunks} stages"
        )
    profile = _profile(graph, wish.profile)
    cluster = Cluster.read(wish.cluster) if isinstance(wish.cluster, (str, os.PathLike)) else wish.cluster
    if cluster is None:
        plan = partition(profile, equal_cluster(count), count * how.chunks, how)
        return _replicate(plan, replicas), list(range(size))
    if max(replicas) > 1:
        raise HvpipeError(
            "Replicas on a cluster are for the planner: pass the plan of `hvpipe plan --mode hybrid`. "
            f"Received: replicas={replicas} and a cluster"
        )
    plan = partition(profile, cluster, count * how.chunks, how)
    return plan, _ranks_by_name(session, plan.ranks)


def _counts(stages: Any, replicas: Sequence[int] | None, size: int) -> tuple[int, tuple[int, ...]]:
    """The number of stages on ranks of their own, and how many ranks each has."""
    if replicas is not None and (not replicas or min(replicas) < 1 or sum(replicas) != size):
        raise HvpipeError(
            f"replicas should be one or more ranks for each stage, {size} together. "
            f"Received: replicas={tuple(replicas)}"
        )
    if stages == "auto":
        stages = size if replicas is None else len(replicas)
    if not isinstance(stages, int) or not 1 <= stages <= size:
        raise HvpipeError(
            f"stages should be 'auto', a plan, or a number from 1 to that of the ranks, {size}. "
            f"Received: stages={stages!r}"
        )
    if replicas is None:
        if size % stages:
            raise HvpipeError(
                "The number of ranks should be a multiple of the stages, or replicas say how many ranks "
                f"each stage has. Received: stages={stages} on {size} ranks"
            )
        return stages, (size // stages,) * stages
    if len(replicas) != stages:
        raise HvpipeError(
            f"replicas should be {stages} numbers, one for each stage. Received: replicas={tuple(replicas)}"
        )
    return stages, tuple(replicas)


def _profile(graph: LayerGraph, given: Profile | str | os.PathLike[str] | None) -> Profile:
    if given is None:
        return estimate(graph, samples=1)
    profile = Profile.read(given) if isinstance(given, (str, os.PathLike)) else given
    names, theirs = {call.name for call in graph.calls}, {layer.name for layer in profile.layers}
    if names != theirs:
        raise PlanError(
            f"The profile should be of this model, {graph.name} ({len(names)} layer calls). Received: "
            f"{profile.model or 'unnamed'} ({len(theirs)} layers); layer {min(names ^ theirs)!r} is in "
            "only one of them"
        )
    return profile


def _replicate(plan: Plan, replicas: Sequence[int]) -> Plan:
    """The same stages, each on so many equal devices."""
    if max(replicas) == 1:
        return plan
    if plan.pipelining.chunks > 1:
        raise HvpipeError(
            "Several ranks for a stage need a schedule of gpipe, 1f1b, zb-h1. "
            f"Received: schedule='interleaved', replicas={tuple(replicas)}"
        )
    stages = tuple(
        replace(stage, devices=tuple(f"{stage.device}/{k}" for k in range(count)), shares=(1.0,) * count)
        for stage, count in zip(plan.stages, replicas, strict=True)
    )
    return replace(plan, stages=stages)


def _ranks_by_name(session: Session, devices: Sequence[str]) -> list[int]:
    """The world rank of each device: HOST:LOCAL_RANK (as `hvpipe profile` names them), HOST, or rank3."""
    world = session.world
    names = session.engine.allgather_object((world.host, world.local_rank, world.local_size))
    table: dict[str, int] = {}
    for rank, (host, local_rank, local_size) in enumerate(names):
        table |= {f"{host}:{local_rank}": rank, f"rank{rank}": rank}
        if local_size == 1:
            table[host] = rank
    lacking = [device for device in devices if device not in table]
    here = ", ".join(f"{host}:{local_rank}" for host, local_rank, _ in names)
    if lacking:
        raise PlanError(
            f"The plan's devices should be the ranks of this run ({here}); plan again for this cluster, with "
            f"the file that `hvpipe profile` writes. Received: devices={list(devices)}"
        )
    if len(devices) != world.size:
        raise PlanError(
            f"The plan should give every rank a stage: run on {len(devices)} ranks. "
            f"Received: {world.size} ranks ({here}), devices={list(devices)}"
        )
    return [table[device] for device in devices]
