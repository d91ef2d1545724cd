"""Which plan a pipeline follows: one that was given, or one made for this model on these ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.pipeline.state_names import together
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.keras.profiling.footprint import weight_bytes
from hvpipe.plan.exact import MOST_LAYERS, exact
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining, checked_recompute
from hvpipe.plan.stage_plan import Plan
from hvpipe.session import Session
from hvpipe.specs.cluster import Cluster, equal_cluster
from hvpipe.specs.profile import Profile


@dataclass(frozen=True)
class Wish:
    """What the user asked `pipeline_parallel` for; None where nothing was said."""

    stages: Any = "auto"
    replicas: Sequence[int] | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: bool | Sequence[int] | None = None
    profile: Profile | str | os.PathLike[str] | None = None
    cluster: Cluster | str | os.PathLike[str] | None = None

    @property
    def again(self) -> bool | tuple[int, ...] | None:
        """What `recompute` says, as plans have it."""
        return None if self.recompute is None else checked_recompute(self.recompute)

    @property
    def pipelining(self) -> Pipelining:
        """What holds where no plan says."""
        schedule = DEFAULT_PIPELINING.schedule if self.schedule is None else self.schedule
        return Pipelining(
            schedule,
            DEFAULT_PIPELINING.microbatches if self.microbatches is None else self.microbatches,
            self.again or False,
            (2 if self.chunks is None else self.chunks) if schedule == "interleaved" else 1,
        )


def plan_for(session: Session, graph: LayerGraph, wish: Wish) -> tuple[Plan, list[int]]:
    """The plan, and the world rank of each of its devices; the same on all ranks."""
    stages = wish.stages
    if isinstance(stages, (str, os.PathLike)) and stages != "auto":
        stages = Plan.read(stages)
    if isinstance(stages, Plan):
        _check_plan(graph, stages)
        _check_wish(wish, stages)
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
    given, cluster = _of_rank_0(session, wish)
    profile = _profile(graph, given)
    if cluster is None:
        return _replicate(balanced(profile, replicas, how), replicas), list(range(size))
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


def _of_rank_0(session: Session, wish: Wish) -> tuple[Profile | None, Cluster | None]:
    """Its profile and its cluster, for all: every rank has measured times of its own. Collective.

    Raises HvpipeError on all ranks where rank 0 cannot read them.
    """
    given = " and a ".join(name for name in ("profile", "cluster") if getattr(wish, name) is not None)
    if not given:
        return None, None
    session.engine.agree(f"pipeline_parallel with a {given}")

    def read() -> tuple[Profile | None, Cluster | None] | None:
        if session.world.rank > 0:
            return None
        return _read_profile(wish.profile), _read_cluster(wish.cluster)

    mine = together(session, f"reading a {given}", read)
    found: tuple[Profile | None, Cluster | None] = session.engine.broadcast_object(mine)
    return found


def _profile(graph: LayerGraph, profile: Profile | None) -> Profile:
    if profile is None:
        return estimate(graph, samples=1)
    names, theirs = {call.name for call in graph.calls}, {layer.name for layer in profile.layers}
    if names != theirs:
        raise PlanError(
            f"The profile should be of this model, {graph.name} ({len(names)} layer calls). Received: "
            f"{profile.model or 'unnamed'} ({len(theirs)} layers); layer {min(names ^ theirs)!r} is in "
            "only one of them"
        )
    _check_costs(graph, profile)
    return profile


def _read_profile(given: Profile | str | os.PathLike[str] | None) -> Profile | None:
    return Profile.read(given) if isinstance(given, (str, os.PathLike)) else given


def _read_cluster(given: Cluster | str | os.PathLike[str] | None) -> Cluster | None:
    return Cluster.read(given) if isinstance(given, (str, os.PathLike)) else given


def _check_costs(graph: LayerGraph, profile: Profile) -> None:
    """Layers of the same names may have other weights, or outputs of another size."""
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
    """What each call makes for so many samples, at least (what is used) and at most (and with masks).

    Of those whose size is known, and grows with the samples: profiles are scaled from one batch to another.
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
    """A plan knows its model by the profile's fingerprint; names are compared where it is laid out."""
    here = estimate(graph, samples=1)
    names = {name for stage in plan.stages for name in stage.layers}
    same_names = names == {layer.name for layer in here.layers}
    if same_names and plan.profile_fingerprint not in ("", here.fingerprint):
        raise PlanError(
            f"The plan should be of this model, {graph.name}, with the same trained weights and edges; "
            f"measure and plan again. Received: a plan of {plan.model or 'an unnamed model'}, whose layers "
            "have the same names and others"
        )


def _check_wish(wish: Wish, plan: Plan) -> None:
    """What is asked for beside a plan is not to be passed over."""
    how = plan.pipelining
    replicas = None if wish.replicas is None else tuple(wish.replicas)
    both: dict[str, tuple[Any, Any]] = {
        "microbatches": (wish.microbatches, how.microbatches),
        "schedule": (wish.schedule, how.schedule),
        "chunks": (wish.chunks, how.chunks),
        "recompute": (wish.again, how.recompute),
        "replicas": (replicas, tuple(len(stage.devices) for stage in plan.stages)),
    }
    for name, (asked, planned) in both.items():
        if asked is not None and asked != planned:
            raise HvpipeError(
                f"A plan brings its own {name}: leave it out, or plan again with it. "
                f"Received: {name}={asked!r} and a plan with {name}={planned!r}"
            )
    plan.check(_read_profile(wish.profile), _read_cluster(wish.cluster))


def balanced(profile: Profile, replicas: Sequence[int], how: Pipelining) -> Plan:
    """Stages on equal ranks; one with more replicas, which take turns, gets more of the model."""
    count = len(replicas)
    if len(set(replicas)) == 1 or how.chunks > 1 or len(profile.layers) > MOST_LAYERS:
        return partition(profile, equal_cluster(count), count * how.chunks, how)
    cluster = equal_cluster(count, speeds=tuple(map(float, replicas)))
    return exact(profile, cluster, count, how, [device.name for device in cluster.devices])


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
