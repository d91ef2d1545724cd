"""One training step of a placement: its time and memory, without the cost of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hvpipe.errors import PlanError
from hvpipe.forecast.gradient_reduce import FinalGradients, Ring, reduce_beside
from hvpipe.forecast.layer_sums import Crossing, LayerSums
from hvpipe.forecast.simulate import Simulation, simulation
from hvpipe.forecast.stage_work import ends_of, names_of, stage_work
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.placement_cost import Placement, waiting_bytes
from hvpipe.schedule.coded import CodedSchedule, coded_schedule
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

Shares = tuple[tuple[float, ...], ...]
"""For each stage a number for each of its devices: they get micro-batches in proportion."""


@dataclass(frozen=True)
class Step:
    """The forecast of one step of a placement.

    Args:
        simulation: Computing and transfers.
        reduces: (stage, start, end, bytes) of each bucket of a stage with replicas.
        updates: For each rank when its update starts and ends.
        memory_bytes: Peak bytes of each rank: weights, gradients, slots and activations.
    """

    simulation: Simulation
    reduces: tuple[tuple[int, float, float, int], ...]
    updates: tuple[tuple[float, float], ...]
    memory_bytes: tuple[int, ...]

    @cached_property
    def step_s(self) -> float:
        """Seconds of the step."""
        ends_s = (end_s for _, _, end_s, _ in self.reduces)
        return max(self.simulation.makespan_s, *ends_s, *(end_s for _, end_s in self.updates))

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        pairs = zip(self.simulation.busy_s, self.updates, strict=True)
        return tuple(busy_s + end_s - start_s for busy_s, (start_s, end_s) in pairs)


class StepModel:
    """Forecasts steps of many placements of one model on one cluster."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile, self.cluster = profile, cluster
        self.sums = LayerSums(profile)
        self._rings: dict[tuple[str, ...], Ring] = {}
        self._equal: dict[tuple[str, ...], bool] = {}

    def schedule(
        self, placement: Placement, pipelining: Pipelining, shares: Shares | None = None
    ) -> CodedSchedule:
        """Return the schedule of a placement. By default, shares are the speeds for a stage's layers."""
        counts = tuple(len(devices) for devices, _ in placement)
        if pipelining.chunks > 1 or max(counts) == 1:
            shares = None
        elif shares is None:
            shares = tuple(
                tuple(self.profile.speed(self.cluster.device(name), places) for name in names)
                for names, places in placement
            )
        return coded_schedule(pipelining.schedule, counts, pipelining.microbatches, pipelining.chunks, shares)

    def step(self, placement: Placement, pipelining: Pipelining, shares: Shares | None = None) -> Step:
        """Forecast the step of a pipeline.

        Args:
            placement: The devices and layers of each stage.
            pipelining: Schedule, micro-batches, recomputation and chunks.
            shares: The shares of each stage's devices; None for their speeds for its layers.

        Raises:
            HvpipeError: If a device would get no micro-batch.
        """
        schedule = self.schedule(placement, pipelining, shares)
        crossings = self.sums.crossings(ends_of(placement))
        work, resources = stage_work(self.sums, self.cluster, placement, pipelining, schedule, crossings)
        simulated = simulation(work, resources)
        if simulated is None:
            raise PlanError(f"The schedule should not deadlock. Received: {pipelining}")
        reduces = self._reduces(placement, simulated)
        memory_bytes = self._memory_bytes(placement, pipelining, schedule)
        return Step(simulated, reduces, self._updates(placement, simulated, reduces), memory_bytes)

    def memory_bytes(self, placement: Placement, pipelining: Pipelining) -> tuple[int, ...]:
        """Return each rank's peak bytes: weights, gradients, slots, and the activations that it stashes."""
        return self._memory_bytes(placement, pipelining, self.schedule(placement, pipelining))

    def most_memory_bytes(self, placement: Placement, pipelining: Pipelining) -> list[int]:
        """Return for each stage at least what `memory_bytes` returns for its ranks, without a schedule.

        If the devices of each stage are equal, it is what the fullest rank needs. Not for chunks, several of
        which are on a rank.
        """
        ends, m = ends_of(placement), pipelining.microbatches
        crossings = self.sums.crossings(ends)
        state, received, saved = self.sums.kept_bytes(ends, crossings)
        counts = [len(devices) for devices, _ in placement]
        equal = [self.are_equal(devices) for devices, _ in placement]
        if all(equal):
            in_flight = pipelining.all_in_flight(counts)
            held = [dealt * count for dealt, count in zip(in_flight, counts, strict=True)]
            found = _waiting_bytes(crossings, counts, held, m)
        else:
            in_flight = [-(-m // count) if alike else m for count, alike in zip(counts, equal, strict=True)]
            found = [0] * len(counts)
            for (maker, user), crossing in crossings.items():
                found[maker] += -(-m // counts[maker]) * crossing.back_bytes if user > maker + 1 else 0
        for stage, dealt in enumerate(in_flight):
            twice = pipelining.recomputes(stage)
            kept = received[stage] + (0 if twice else saved[stage])
            found[stage] += state[stage] + dealt * kept + (saved[stage] if twice else 0)
        return found

    def are_equal(self, devices: tuple[str, ...]) -> bool:
        """Tell whether devices have the same speed and type."""
        if devices not in self._equal:
            kinds = {(one.speed, one.type) for one in map(self.cluster.device, devices)}
            self._equal[devices] = len(kinds) == 1
        return self._equal[devices]

    def _memory_bytes(
        self, placement: Placement, pipelining: Pipelining, schedule: CodedSchedule
    ) -> tuple[int, ...]:
        ends = ends_of(placement)
        crossings = self.sums.crossings(ends)
        state, received, saved = self.sums.kept_bytes(ends, crossings)
        counts = [len(devices) for devices, _ in placement]
        waiting = _waiting_bytes(crossings, counts, schedule.most_in_flight, pipelining.microbatches)
        again = [pipelining.recomputes(stage) for stage in range(len(ends))]
        kept = [got + (0 if twice else save) for got, save, twice in zip(received, saved, again, strict=True)]
        sizes = []
        for stash_bytes, jobs in zip(schedule.peak_stash(kept), schedule.jobs_of, strict=True):
            stages = {job >> 2 for job in jobs}
            anew_bytes = max((saved[stage] for stage in stages if again[stage]), default=0)
            sizes.append(sum(state[s] + waiting[s] for s in stages) + stash_bytes + anew_bytes)
        return tuple(sizes)

    def ring(self, devices: tuple[str, ...]) -> Ring:
        """Return the ring that sums the gradients of these devices."""
        if devices not in self._rings:
            self._rings[devices] = Ring.of(self.cluster, devices)
        return self._rings[devices]

    def _reduces(
        self, placement: Placement, simulated: Simulation
    ) -> tuple[tuple[int, float, float, int], ...]:
        """Return the all-reduces of stages with replicas.

        A micro-batch's backward is one graph, so all gradients of a stage become final together.
        """
        gradients, rank, start = {}, 0, 0
        for stage, (devices, places) in enumerate(placement):
            end = places[-1] + 1
            if len(devices) > 1:
                final_s = max(simulated.ends_s[rank : rank + len(devices)])
                sizes_bytes = self.sums.bucket_bytes(start, end)
                gradients[stage] = FinalGradients(final_s, sizes_bytes, self.ring(devices))
            rank, start = rank + len(devices), end
        shared = any(one.ring.ports for one in gradients.values())
        return tuple(reduce_beside(gradients, simulated.taken if shared else None))

    def _updates(
        self,
        placement: Placement,
        simulated: Simulation,
        reduces: Sequence[tuple[int, float, float, int]],
    ) -> tuple[tuple[float, float], ...]:
        """Return each rank's update, which starts when computing and the sum of its gradients are done."""
        reduced_s: dict[int, float] = {}
        for stage, _, end_s, _ in reduces:
            reduced_s[stage] = max(end_s, reduced_s.get(stage, 0.0))
        update_s = [self.sums.whole_update_s(start, end) for start, end in _spans(placement)]
        found = []
        jobs_of = simulated.work.schedule.jobs_of
        for name, end_s, jobs in zip(names_of(placement), simulated.ends_s, jobs_of, strict=True):
            stages = {job >> 2 for job in jobs}
            start_s = max(end_s, *(reduced_s.get(stage, 0.0) for stage in stages))
            whole_s = sum(update_s[stage] for stage in stages) / self.cluster.device(name).speed
            found.append((start_s, start_s + whole_s))
        return tuple(found)


def _waiting_bytes(
    crossings: Mapping[tuple[int, int], Crossing], replicas: Sequence[int], held: Sequence[int], m: int
) -> list[int]:
    sent = ((*stages, crossing.bytes, crossing.back_bytes) for stages, crossing in crossings.items())
    return waiting_bytes(sent, replicas, held, m)


def _spans(placement: Placement) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends_of(placement)]))
