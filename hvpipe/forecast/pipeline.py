"""Forecasts the training step of a plan: its schedule, simulated with the profile's costs on the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hvpipe.errors import PlanError
from hvpipe.forecast.gradient_reduce import BackwardSpan, Ring, RingGradients, reduce_beside
from hvpipe.forecast.plan_costs import contention_of, costs_of, dataflow_of
from hvpipe.forecast.simulate import Simulation, simulate
from hvpipe.plan.memory_shortage import say_missing
from hvpipe.plan.placement_cost import stage_costs
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.plan_schedule import schedule_of
from hvpipe.schedule.schedule import Schedule
from hvpipe.schedule.verify import peak_stash
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
        trace: The events of every rank. Empty if the placement is not a pipeline.
    """

    plan: Plan
    step_s: float
    busy_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    trace: Trace

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
        missing = {}
        for name, size_bytes in zip(self.plan.ranks, self.memory_bytes, strict=True):
            limit_bytes = cluster.device(name).memory_bytes
            if limit_bytes is not None and size_bytes > limit_bytes:
                missing[name] = size_bytes - limit_bytes
        return missing

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
    schedule = schedule_of(plan)
    costs = costs_of(plan, profile, cluster)
    simulated = simulate(schedule, costs, dataflow_of(plan, profile), contention_of(plan, profile, cluster))
    reduces = tuple(_reduces(plan, profile, cluster, simulated, schedule))
    updates = tuple(_updates(plan, profile, cluster, (*simulated.trace.events, *reduces), schedule))
    step_s = max([simulated.makespan_s, *(event.end_s for event in (*reduces, *updates))])
    metadata = {**simulated.trace.metadata, "devices": list(plan.ranks)}
    trace = replace(simulated.trace, events=(*simulated.trace.events, *reduces, *updates), metadata=metadata)
    updating_s = {event.rank: event.duration_s for event in updates}
    busy_s = tuple(busy + updating_s.get(rank, 0.0) for rank, busy in enumerate(simulated.busy_s))
    return Forecast(plan, step_s, busy_s, _memory_bytes(plan, profile, cluster, schedule), trace)


def _reduces(
    plan: Plan, profile: Profile, cluster: Cluster, simulated: Simulation, schedule: Schedule
) -> Iterator[Event]:
    """Yield the all-reduces of the stages with replicas, each on the first rank of its stage."""
    last = {event.rank: event for event in simulated.trace.of("backward") if event.args["kind"] != "I"}
    gradients = {}
    for number, (devices, places) in enumerate(plan.placement(profile)):
        if len(devices) > 1:
            # A micro-batch's backward is one graph, so all gradients of a stage become final together.
            ends_s = [last[rank].end_s for rank in schedule.ranks_of(number)]
            backwards = [BackwardSpan(end_s, end_s) for end_s in ends_s]
            layers = [profile.layers[place] for place in places]
            gradients[number] = RingGradients(layers, backwards, Ring.of(cluster, devices))
    for number, start_s, end_s, size_bytes in reduce_beside(gradients, simulated.taken):
        name, rank = f"reduce stage {number}", schedule.ranks_of(number)[0]
        args = {"stage": number, "bytes": size_bytes}
        yield Event(name, "reduce", rank, "transfer", start_s, end_s, args)


def _updates(
    plan: Plan, profile: Profile, cluster: Cluster, events: Sequence[Event], schedule: Schedule
) -> Iterator[Event]:
    """Yield each rank's update: it starts when the rank is done computing and its gradients are summed."""
    placement = plan.placement(profile)
    for rank, device in enumerate(plan.ranks):
        stages = schedule.stages_of(rank)
        whole_s = sum(profile.layers[place].update_s for stage in stages for place in placement[stage][1])
        if whole_s == 0:
            continue
        start_s = max(
            event.end_s
            for event in events
            if (event.lane == "compute" and event.rank == rank)
            or (event.category == "reduce" and event.args["stage"] in stages)
        )
        end_s = start_s + whole_s / cluster.device(device).speed
        yield Event("update", "update", rank, "compute", start_s, end_s, {"kind": "U"})


def _memory_bytes(plan: Plan, profile: Profile, cluster: Cluster, schedule: Schedule) -> tuple[int, ...]:
    """Return each rank's peak bytes: weights, gradients, slots, and the activations that the schedule
    stashes.

    Uses the profile's micro-batch, which may have another size than the plan's.
    """
    placement = plan.placement(profile)
    costs = stage_costs(profile, cluster, placement, plan.pipelining)
    saved = [sum(profile.layers[place].saved_bytes for place in places) for _, places in placement]
    again = [plan.pipelining.recomputes(stage) for stage in range(len(saved))]
    kept = [
        cost.receive_bytes + (0 if twice else s) for cost, s, twice in zip(costs, saved, again, strict=True)
    ]
    stash = peak_stash(schedule, kept)
    sizes = []
    for rank, stash_bytes in enumerate(stash):
        stages = schedule.stages_of(rank)
        state_bytes = sum(costs[stage].state_bytes for stage in stages)
        anew_bytes = max((saved[stage] for stage in stages if again[stage]), default=0)
        sizes.append(state_bytes + int(stash_bytes) + anew_bytes)
    return tuple(sizes)


def _without_pipelining(plan: Plan, profile: Profile, cluster: Cluster) -> Forecast:
    """Forecast a step in which the whole batch passes once."""
    whole = profile.at_batch(profile.batch_size * plan.pipelining.microbatches)
    at_once = Plan.of(whole, cluster, plan.placement(profile), plan.pipelining, plan.method)
    updates_s = dict.fromkeys(plan.ranks, 0.0)
    for devices, places in plan.placement(profile):
        stage_s = sum(profile.layers[place].update_s for place in places)
        for device in devices:
            updates_s[device] += stage_s / cluster.device(device).speed
    busy_s = tuple(stage.cost.compute_s for stage in at_once.stages)
    step_s = at_once.one_batch_s + max(updates_s.values())
    return Forecast(plan, step_s, busy_s, tuple(plan.memory_bytes.values()), Trace())
