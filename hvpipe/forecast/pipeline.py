"""Foretells the training step of a plan: its schedule, simulated with the profile's costs on the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hvpipe.errors import PlanError
from hvpipe.forecast.gradient_reduce import Backward, Gradients, Ring, reduce_beside
from hvpipe.forecast.simulate import Contention, Costs, Simulation, StageCost, Way, links, simulate
from hvpipe.plan.memory_shortage import say_missing
from hvpipe.plan.placement_cost import stage_costs
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.plan_schedule import check_is_pipeline as check_is_pipeline
from hvpipe.schedule.plan_schedule import schedule_of as schedule_of
from hvpipe.schedule.program import Dataflow, Message
from hvpipe.schedule.schedule import Schedule
from hvpipe.schedule.verify import peak_stash
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile
from hvpipe.trace.events import Event, Trace


@dataclass(frozen=True)
class Forecast:
    """What a training step of a plan takes. `busy_s` and `memory_bytes` are of the devices `plan.ranks`.

    `trace` is empty for a placement that is no pipeline.
    """

    plan: Plan
    step_s: float
    busy_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    trace: Trace

    @property
    def utilization(self) -> tuple[float, ...]:
        """The share of the step that each device computes."""
        return tuple(busy / self.step_s if self.step_s else 1.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they compute nothing."""
        return max(0.0, 1.0 - sum(self.utilization) / len(self.utilization))

    def shortages(self, cluster: Cluster) -> dict[str, int]:
        """For each device that lacks memory, how many bytes."""
        missing = {}
        for name, size_bytes in zip(self.plan.ranks, self.memory_bytes, strict=True):
            limit_bytes = cluster.device(name).memory_bytes
            if limit_bytes is not None and size_bytes > limit_bytes:
                missing[name] = size_bytes - limit_bytes
        return missing

    def check_memory(self, cluster: Cluster) -> Forecast:
        """The forecast itself; PlanError where memory does not suffice: it says what each device lacks."""
        if missing := self.shortages(cluster):
            needed = dict(zip(self.plan.ranks, self.memory_bytes, strict=True))
            raise PlanError(
                "The memory of every device should hold its stage. "
                f"Received: method={self.plan.method!r}; {say_missing(missing, needed)}"
            )
        return self


def forecast(plan: Plan, profile: Profile, cluster: Cluster) -> Forecast:
    """Foretell a step of the plan; PlanError where it is of another model or cluster.

    A pipeline is simulated: computing on every device, and beside it the transfers between stages, each skip
    connection on a way of its own; all that leaves or enters a host shares its link. The gradients of a
    stage's replicas are reduced when their last backward is over, beside what other stages compute, and
    between hosts travel while transfers leave the links free. Then each device updates its weights. Where
    stages are no runs of consecutive layers there is no pipeline: the whole batch passes once, as in the
    native mode.
    """
    plan.check(profile, cluster)
    if not plan.contiguous:
        return _without_pipelining(plan, profile, cluster)
    schedule = schedule_of(plan)
    costs = costs_of(plan, profile, cluster)
    foreseen = simulate(schedule, costs, dataflow_of(plan, profile), contention_of(plan, profile, cluster))
    reduces = tuple(_reduces(plan, profile, cluster, foreseen, schedule))
    updates = tuple(_updates(plan, profile, cluster, (*foreseen.trace.events, *reduces), schedule))
    step_s = max([foreseen.makespan_s, *(event.end_s for event in (*reduces, *updates))])
    metadata = {**foreseen.trace.metadata, "devices": list(plan.ranks)}
    trace = replace(foreseen.trace, events=(*foreseen.trace.events, *reduces, *updates), metadata=metadata)
    updating_s = {event.rank: event.duration_s for event in updates}
    busy_s = tuple(busy + updating_s.get(rank, 0.0) for rank, busy in enumerate(foreseen.busy_s))
    return Forecast(plan, step_s, busy_s, _memory_bytes(plan, profile, cluster, schedule), trace)


def dataflow_of(plan: Plan, profile: Profile) -> Dataflow:
    """Which stages use what others make."""
    edges = {(maker, user) for maker, user, _ in _crossing(plan, profile)}
    return Dataflow(len(plan.stages), tuple(sorted(edges)))


def costs_of(plan: Plan, profile: Profile, cluster: Cluster) -> Costs:
    """What each stage takes on each of its devices."""
    sizes = _crossing_bytes(plan, profile)
    costs = []
    for number, (devices, places) in enumerate(plan.placement(profile)):
        layers = [profile.layers[place] for place in places]
        forward_s = sum(layer.forward_s for layer in layers)
        backward_s = sum(layer.backward_s for layer in layers)
        weights_s = sum(layer.weights_part_s for layer in layers)
        again_s = forward_s if plan.pipelining.recomputes(number) else 0.0
        of_devices = []
        for device in devices:
            speed = cluster.device(device).speed
            ways_s = {
                user: [
                    cluster.link(device, other).time_s(sum(tensors), sum(map(bool, tensors)))
                    for other in plan.stages[user].devices
                ]
                for (maker, user), tensors in sizes.items()
                if maker == number
            }
            of_devices.append(
                StageCost(forward_s / speed, (backward_s + again_s) / speed, weights_s / speed, ways_s)
            )
        costs.append(of_devices)
    return costs


def contention_of(plan: Plan, profile: Profile, cluster: Cluster) -> Contention:
    """Devices of a host share its link, which sends and receives at once; inside, each pair has wires.

    A message keeps a host's link busy for as long as that alone takes: it may well travel for longer.
    """
    sizes = _crossing_bytes(plan, profile)

    def keeps_busy(message: Message, seconds: float) -> Sequence[tuple[Way, float]]:
        shared = cluster.ports(plan.ranks[message.source], plan.ranks[message.target])
        if not shared:
            return links(message, seconds)
        maker, user = sorted((message.producer.stage, message.consumer.stage))
        tensors = sizes[maker, user]
        total_bytes, count = sum(tensors), sum(map(bool, tensors))
        return tuple((port, min(seconds, link.time_s(total_bytes, count))) for port, link in shared)

    return keeps_busy


def _crossing(plan: Plan, profile: Profile) -> Iterator[tuple[int, int, int]]:
    """Each tensor that another stage uses, once for each of these: maker's stage, user's stage, bytes."""
    stage_of = {
        place: number for number, (_, places) in enumerate(plan.placement(profile)) for place in places
    }
    for place, layer in enumerate(profile.layers):
        home = stage_of[place]
        for away in sorted({stage_of[user] for user in profile.users[place]} - {home}):
            yield home, away, layer.output_bytes


def _crossing_bytes(plan: Plan, profile: Profile) -> Mapping[tuple[int, int], Sequence[int]]:
    """The bytes of the tensors that go from one stage to another, by (maker's stage, user's stage)."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for maker, user, size_bytes in _crossing(plan, profile):
        sizes.setdefault((maker, user), []).append(size_bytes)
    return sizes


def _reduces(
    plan: Plan, profile: Profile, cluster: Cluster, foreseen: Simulation, schedule: Schedule
) -> Iterator[Event]:
    """The all-reduces of the stages that have replicas, on their first ranks."""
    last = {event.rank: event for event in foreseen.trace.of("backward") if event.args["kind"] != "I"}
    gradients = {}
    for number, (devices, places) in enumerate(plan.placement(profile)):
        if len(devices) > 1:
            # A micro-batch's backward is one graph: all gradients of a stage are final when the last is over.
            ends_s = [last[rank].end_s for rank in schedule.ranks_of(number)]
            backwards = [Backward(end_s, end_s) for end_s in ends_s]
            layers = [profile.layers[place] for place in places]
            gradients[number] = Gradients(layers, backwards, Ring.of(cluster, devices))
    for number, start_s, end_s, size_bytes in reduce_beside(gradients, foreseen.taken):
        name, rank = f"reduce stage {number}", schedule.ranks_of(number)[0]
        args = {"stage": number, "bytes": size_bytes}
        yield Event(name, "reduce", rank, "transfer", start_s, end_s, args)


def _updates(
    plan: Plan, profile: Profile, cluster: Cluster, events: Sequence[Event], schedule: Schedule
) -> Iterator[Event]:
    """Each rank's update of its weights, when it is done computing and their gradients are summed."""
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
    """What each rank needs at its peak: weights, gradients, slots, and what the schedule has it stash.

    By the profile, whose micro-batches may be of another size than those that were planned for.
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
    whole = profile.at_batch(profile.batch_size * plan.pipelining.microbatches)
    at_once = Plan.of(whole, cluster, plan.placement(profile), plan.pipelining, plan.method)
    updates_s = dict.fromkeys(plan.ranks, 0.0)
    for devices, places in plan.placement(profile):
        of_stage_s = sum(profile.layers[place].update_s for place in places)
        for device in devices:
            updates_s[device] += of_stage_s / cluster.device(device).speed
    busy_s = tuple(stage.cost.compute_s for stage in at_once.stages)
    step_s = at_once.one_batch_s + max(updates_s.values())
    return Forecast(plan, step_s, busy_s, tuple(plan.memory_bytes.values()), Trace())
