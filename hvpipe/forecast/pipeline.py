"""Forecasts the training step of a plan: its schedule, simulated with the profile's costs on the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from hvpipe.errors import PlanError
from hvpipe.forecast.step import Step, StepModel
from hvpipe.plan.memory_shortage import say_missing
from hvpipe.plan.placement_cost import missing_bytes
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.plan_schedule import check_is_pipeline
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile
from hvpipe.trace.events import Event, Trace


@dataclass(frozen=True)
class Forecast:
    """The forecast of one training step of a plan.

    Args:
        plan: The plan.
        step_s: Seconds of the step.
        busy_s: Seconds that each device of `plan.ranks` computes.
        memory_bytes: Peak bytes of each device of `plan.ranks`: weights, gradients, slots and activations.
        make_trace: Makes `trace`; None if the placement is not a pipeline.

    Example:
        ```python
        found = forecast(plan, profile, cluster)
        print(found.step_s, found.utilization)
        ```
    """

    plan: Plan
    step_s: float
    busy_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    make_trace: Callable[[], Trace] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def trace(self) -> Trace:
        """The events of every rank, made when first read. Empty if the placement is not a pipeline."""
        return Trace() if self.make_trace is None else self.make_trace()

    @property
    def utilization(self) -> tuple[float, ...]:
        """The share of the step, 0 to 1, that each device computes."""
        return tuple(busy / self.step_s if self.step_s else 1.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The share of all devices' time, 0 to 1, in which they compute nothing."""
        return max(0.0, 1.0 - sum(self.utilization) / len(self.utilization))

    def shortages(self, cluster: Cluster) -> dict[str, int]:
        """Return the missing bytes of each device that lacks memory, by device name."""
        return missing_bytes(dict(zip(self.plan.ranks, self.memory_bytes, strict=True)), cluster)

    def check_memory(self, cluster: Cluster) -> Forecast:
        """Return the forecast itself; raise PlanError if memory is short, saying what each device lacks."""
        if missing := self.shortages(cluster):
            needed = dict(zip(self.plan.ranks, self.memory_bytes, strict=True))
            raise PlanError(
                "The memory of every device should hold its stage. "
                f"Received: method={self.plan.method!r}; {say_missing(missing, needed)}"
            )
        return self


def forecast(plan: Plan, profile: Profile, cluster: Cluster) -> Forecast:
    """Forecast one training step of a plan.

    A pipeline is simulated: every device computes, and transfers between stages run beside it. A skip
    connection goes straight to its user. All traffic of a host shares its network link. When the last
    backward of a stage's replicas is over, their gradients are reduced beside what other stages compute;
    between hosts they travel while transfers leave the links free. Then each device updates its weights.

    If stages are not runs of consecutive layers, there is no pipeline: the whole batch passes once, as with
    TensorFlow's own device placement.

    Args:
        plan: The plan.
        profile: The profile of the plan's model, with costs of one micro-batch.
        cluster: The cluster that the plan was made for.

    Returns:
        The forecast.

    Raises:
        PlanError: If the plan is of another model or cluster.

    Example:
        ```python
        step = forecast(partition(profile, cluster), profile, cluster)
        print(f"{step.step_s:.3f} s, bubble {step.bubble:.0%}")
        ```
    """
    plan.check(profile, cluster)
    if not plan.contiguous:
        return _without_pipelining(plan, profile, cluster)
    check_is_pipeline(plan)
    shares = tuple(stage.shares for stage in plan.stages)
    step = StepModel(profile, cluster).step(plan.placement(profile), plan.pipelining, shares)
    return Forecast(plan, step.step_s, step.busy_s, step.memory_bytes, lambda: _trace(plan, step))


def _trace(plan: Plan, step: Step) -> Trace:
    """Return the events of every rank: actions, waits, transfers, all-reduces and updates."""
    trace = step.simulation.trace
    events = [*trace.events]
    for number, start_s, end_s, size_bytes in step.reduces:
        args = {"stage": number, "bytes": size_bytes}
        rank = plan.ranks.index(plan.stages[number].devices[0])
        events.append(Event(f"reduce stage {number}", "reduce", rank, "transfer", start_s, end_s, args))
    for rank, (start_s, end_s) in enumerate(step.updates):
        if end_s > start_s:
            events.append(Event("update", "update", rank, "compute", start_s, end_s, {"kind": "U"}))
    metadata = {"schedule": plan.pipelining.schedule, **trace.metadata, "devices": list(plan.ranks)}
    return replace(trace, events=tuple(events), metadata=metadata)


def _without_pipelining(plan: Plan, profile: Profile, cluster: Cluster) -> Forecast:
    """Forecast a step in which the whole batch passes once."""
    whole = profile.at_batch(profile.batch_size * plan.pipelining.microbatches)
    at_once = Plan.of(whole, cluster, plan.placement(profile), plan.pipelining, plan.method)
    updates_s = dict.fromkeys(plan.ranks, 0.0)
    for devices, places in plan.placement(profile):
        stage_s = sum(layer.update_s for layer in profile.once(places))
        for device in devices:
            updates_s[device] += stage_s / cluster.device(device).speed
    busy_s = tuple(stage.cost.compute_s for stage in at_once.stages)
    step_s = at_once.one_batch_s + max(updates_s.values())
    return Forecast(plan, step_s, busy_s, tuple(plan.memory_bytes.values()))
