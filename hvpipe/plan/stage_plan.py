"""A plan: each device's layers and their cost as a stage, and the model and cluster that it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hvpipe.config_file import Document, Table
from hvpipe.errors import PlanError
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.placement_cost import (
    Placement,
    StageCost,
    is_contiguous,
    missing_bytes,
    one_batch_s,
    stage_costs,
)
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

FORMAT, VERSION = "hvpipe-plan", 2

DATA_PARALLEL = "data_parallel"
"""The method of a plan with one stage, whose devices run their shares of the batch at once."""


@dataclass(frozen=True)
class Stage:
    """The layers that one device or several replicas run, and their cost for a micro-batch.

    Args:
        devices: Device names. Several are replicas: each runs these layers for some of the micro-batches.
        layers: Layer names in topological order.
        cost: Seconds and bytes for one micro-batch.
        shares: For each device a number above 0; replicas get micro-batches in proportion.
    """

    devices: tuple[str, ...]
    layers: tuple[str, ...]
    cost: StageCost
    shares: tuple[float, ...]

    @property
    def device(self) -> str:
        """The device, or the first of several."""
        return self.devices[0]


@dataclass(frozen=True)
class Plan(Document):
    """A cut of a model into stages, placed on the devices of a cluster.

    With the schedule "interleaved", a device has several stages: they go round the devices in a circle.

    Args:
        stages: The stages in the order of the pipeline.
        method: The algorithm that made the plan.
        pipelining: Schedule, micro-batches, recomputation, chunks.
        contiguous: Whether every stage is a run of consecutive layers, so that the plan is a pipeline. With
            some baselines it is not, and a micro-batch may come to a device more than once.
        one_batch_s: Seconds of a single micro-batch, forward and backward.
        model: The model's name, for people.
        profile_fingerprint: Identifies the model (`Profile.fingerprint`).
        cluster_fingerprint: Identifies the cluster (`Cluster.fingerprint`).

    Example:
        ```python
        plan = Plan.read("plan.json")
        [(stage.device, len(stage.layers)) for stage in plan.stages]
        ```
    """

    stages: tuple[Stage, ...]
    method: str
    pipelining: Pipelining
    contiguous: bool
    one_batch_s: float
    model: str = ""
    profile_fingerprint: str = ""
    cluster_fingerprint: str = ""

    @staticmethod
    def of(
        profile: Profile, cluster: Cluster, placement: Placement, pipelining: Pipelining, method: str
    ) -> Plan:
        """Make the plan of a placement, with its costs. Does not check memory: see `shortages`."""
        costs = stage_costs(profile, cluster, placement, pipelining)
        stages = (
            Stage(
                devices=devices,
                layers=tuple(profile.layers[place].name for place in layers),
                cost=cost,
                shares=tuple(profile.speed(cluster.device(device), layers) for device in devices),
            )
            for (devices, layers), cost in zip(placement, costs, strict=True)
        )
        return Plan(
            stages=tuple(stages),
            method=method,
            pipelining=pipelining,
            contiguous=is_contiguous(placement),
            one_batch_s=one_batch_s(profile, cluster, placement, pipelining),
            model=profile.model,
            profile_fingerprint=profile.fingerprint,
            cluster_fingerprint=cluster.fingerprint,
        )

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """The device of each rank: stage by stage, replica by replica."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that each device needs for all of its stages, in the order of the ranks.

        With chunks this is an estimate: each counts as many micro-batches in flight as the mean of its
        device's stages. `forecast` has the memory of the schedule.
        """
        return {
            name: sum(stage.cost.memory_bytes for stage in self.stages if name in stage.devices)
            for name in self.ranks
        }

    @cached_property
    def times_s(self) -> dict[str, float]:
        """Seconds that each device takes for a micro-batch in all of its stages."""
        return {
            name: sum(stage.cost.total_s for stage in self.stages if name in stage.devices)
            for name in self.ranks
        }

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the busiest device for a micro-batch. A pipeline finishes at best one in this time."""
        return max(self.times_s.values())

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step: one micro-batch all the way, then one more every `bottleneck_s`.

        `forecast` is more accurate. For a placement that is not a pipeline, this is a lower bound.
        """
        return self.one_batch_s + (self.pipelining.microbatches - 1) * self.bottleneck_s

    def shortages(self, cluster: Cluster) -> dict[str, int]:
        """Return the missing bytes of each device that lacks memory for its stages, by device name."""
        return missing_bytes(self.memory_bytes, cluster)

    def placement(self, profile: Profile) -> list[tuple[tuple[str, ...], list[int]]]:
        """Return the devices of each stage and the indices of its layers in the profile."""
        return [(stage.devices, [profile.place(name) for name in stage.layers]) for stage in self.stages]

    def check(self, profile: Profile | None = None, cluster: Cluster | None = None) -> None:
        """Check that the plan fits a profile, a cluster, or both.

        Args:
            profile: The profile; None to skip it.
            cluster: The cluster; None to skip it.

        Raises:
            PlanError: If the profile is of another model, the plan lacks one of its layers, or the cluster is
                not the one that the plan was made for.
        """
        if profile is not None and profile.fingerprint != self.profile_fingerprint:
            ours = [name for stage in self.stages for name in stage.layers]
            theirs = [layer.name for layer in profile.layers]
            what = odd_layers("plan", ours, "profile", theirs) or "weights or edges differ"
            raise PlanError(
                f"The profile should be of the model that was planned ({self.model or 'unnamed'}, "
                f"{len(ours)} layers). Received: {profile.model or 'unnamed'}, {len(theirs)} layers; {what}"
            )
        if profile is not None:
            self._check_cover(profile)
        if cluster is not None and cluster.fingerprint != self.cluster_fingerprint:
            names = [device.name for device in cluster.devices]
            lacking = [device for device in self.ranks if device not in names]
            what = f"no device {', '.join(lacking)}" if lacking else "speeds, memory, hosts or links differ"
            raise PlanError(
                "The cluster should be the one that was planned for; plan again for this one. "
                f"Received: devices={names}; {what}"
            )

    def _check_cover(self, profile: Profile) -> None:
        placement = self.placement(profile)
        covered = {place for _, places in placement for place in places}
        if lacking := [layer.name for place, layer in enumerate(profile.layers) if place not in covered]:
            raise PlanError(
                f"The stages should have every layer of the model. Received: {lacking[0]!r} in no stage"
            )
        if self.contiguous and not is_contiguous(placement):
            raise PlanError(
                "contiguous should be true only if stages are runs of consecutive layers, in the order of "
                f"the model. Received: contiguous=True, method={self.method!r}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {"format": FORMAT, "version": VERSION, **asdict(self), "bottleneck_s": self.bottleneck_s}

    @staticmethod
    def from_json(document: Mapping[str, Any] | Table, place: str = "The plan") -> Plan:
        """Return the plan that a JSON object of `to_json` describes.

        Args:
            document: The JSON object.
            place: The document's name in errors.

        Returns:
            The plan.

        Raises:
            HvpipeError: If a field is missing or out of range; the message names it.
            PlanError: If the stages contradict each other.
        """
        table = document if isinstance(document, Table) else Table(document, place)
        table.check_format(FORMAT, VERSION)
        how = table.table("pipelining")
        stages = tuple(_stage(row) for row in table.tables("stages"))
        if not stages:
            raise PlanError(f"{table.place}: stages should be at least one. Received: stages=[]")
        with how.named_in_errors():
            pipelining = Pipelining(
                how.text("schedule"),
                how.integer("microbatches", minimum=1),
                how.flag_or_integers("recompute"),
                how.integer("chunks", minimum=1),
            )
        _check_stages(stages, pipelining, table.place)
        return Plan(
            stages=stages,
            method=table.text("method"),
            pipelining=pipelining,
            contiguous=table.flag("contiguous"),
            one_batch_s=table.number("one_batch_s"),
            model=table.name_or_empty("model"),
            profile_fingerprint=table.text("profile_fingerprint"),
            cluster_fingerprint=table.text("cluster_fingerprint"),
        )


def odd_layers(one: str, its_layers: Sequence[str], other: str, others_layers: Sequence[str]) -> str:
    """Say which layers only one of two things has, such as a plan and a profile; "" if both have the same."""
    found = []
    for here, ours, there, theirs in (
        (one, its_layers, other, others_layers),
        (other, others_layers, one, its_layers),
    ):
        known = set(theirs)
        if odd := [name for name in dict.fromkeys(ours) if name not in known]:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            found.append(f"the {here} has layer {odd[0]!r}{more}, which the {there} lacks")
    return "; ".join(found)


def _check_stages(stages: Sequence[Stage], pipelining: Pipelining, place: str) -> None:
    """Refuse a layer in two stages, a device in two stages that are not its chunks, and unknown stages."""
    if len(stages) < pipelining.least_stages:
        raise PlanError(
            f"{place}: recompute should name stages from 0 to {len(stages) - 1}. "
            f"Received: recompute={pipelining.recompute}"
        )
    chunks = pipelining.chunks
    layers = [name for stage in stages for name in stage.layers]
    devices = [name for stage in stages[: len(stages) // chunks] for name in stage.devices]
    for what, given in (("layer", layers), ("device", devices)):
        if twice := [name for name, count in Counter(given).items() if count > 1]:
            raise PlanError(f"{place}: a {what} should be in one stage. Received: {twice[0]!r} in more")
    if chunks > 1 and [stage.devices for stage in stages] != [(name,) for name in devices] * chunks:
        raise PlanError(
            f"{place}: with chunks={chunks} the stages should go {chunks} times round the devices, one each. "
            f"Received: devices={[list(stage.devices) for stage in stages]}"
        )


def _stage(row: Table) -> Stage:
    devices, layers = tuple(row.texts("devices")), tuple(row.texts("layers"))
    shares = tuple(row.numbers("shares", above=0))
    if not layers:
        raise PlanError(f"{row.place} should have at least one layer. Received: layers=[]")
    if not devices or len(shares) != len(devices):
        raise PlanError(
            f"{row.place} should have devices, and a share for each. "
            f"Received: devices={list(devices)}, shares={list(shares)}"
        )
    return Stage(devices, layers, _cost(row.table("cost")), shares)


def _cost(row: Table) -> StageCost:
    return StageCost(
        compute_s=row.number("compute_s"),
        receive_s=row.number("receive_s"),
        send_s=row.number("send_s"),
        receive_bytes=row.integer("receive_bytes"),
        send_bytes=row.integer("send_bytes"),
        state_bytes=row.integer("state_bytes"),
        stash_bytes=row.integer("stash_bytes"),
    )
