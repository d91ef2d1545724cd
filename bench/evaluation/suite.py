"""Suites: what an evaluation runs, in groups of cases.

A group is one task on one cluster, on which several systems take turns. A group that names no cluster runs on
the hosts or the cluster that the command names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bench.cluster.spec import ClusterSpec
from bench.errors import BenchError
from bench.rounds.record import Case, Task
from bench.systems import SYSTEMS
from bench.training.workloads import trained_examples
from hvpipe.forecast.data_parallel import whole_shares

ANYWHERE = "hosts"  # the cluster of groups that name none
LOOPBACK = "loopback"  # the cluster that is this machine alone
_LEAST_STEPS = 4  # per epoch


@dataclass(frozen=True)
class Group:
    """Cases that are compared with each other: one task on one cluster by several systems, in rounds.

    With "strong" scaling a step has the same samples on any number of ranks, and the task's batch is a rank's
    part. `spec` describes a virtual cluster; shares that are `by_speed` follow from it. Systems in `once`
    take part only in the first round.
    """

    task: Task
    cluster: str
    ranks: int
    systems: tuple[str, ...]
    rounds: int = 2
    scaling: str = "weak"
    spec: ClusterSpec | None = None
    by_speed: bool = False
    first: int = 0  # the system that begins the first round
    once: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The same as Case.group."""
        return self.case(self.systems[0]).group

    def case(self, system: str) -> Case:
        task = self.task
        if system in SYSTEMS and not task.epochs:
            task = replace(task, steps=max(task.steps, SYSTEMS[system].least_steps))
        return Case(system, self.cluster, self.ranks, task, self.scaling)

    def rounds_of(self, system: str) -> int:
        return 1 if system in self.once else self.rounds

    def turns(self) -> list[tuple[int, Case]]:
        """Return rounds with their cases, in order. Each begins with the next system, from `first` on."""
        turns = []
        for number in range(self.rounds):
            first = (self.first + number) % len(self.systems)
            turns += [
                (number, self.case(name))
                for name in self.systems[first:] + self.systems[:first]
                if number < self.rounds_of(name)
            ]
        return turns


@dataclass(frozen=True)
class Suite:
    """What is run, in order. `notes` say what changed when it was moved to a cluster."""

    name: str
    title: str
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    def only_systems(self, names: Iterable[str]) -> Suite:
        """Return the same with some of the systems. Groups without any of them are left out."""
        wanted = set(names)
        known = dict.fromkeys(name for group in self.groups for name in group.systems)
        if unknown := sorted(wanted - set(known)):
            raise BenchError(f"Systems of this suite are {', '.join(known)}. Received: {unknown}")
        groups = []
        for group in self.groups:
            kept = tuple(name for name in group.systems if name in wanted)
            if kept:
                once = tuple(name for name in group.once if name in wanted)
                groups.append(replace(group, systems=kept, once=once))
        return replace(self, groups=tuple(groups))

    def at_most(self, rounds: int) -> Suite:
        """Return the same with no more than `rounds` rounds of a system."""
        if rounds < 1:
            raise BenchError(f"A system has at least one round. Received: {rounds}")
        groups = (replace(group, rounds=min(group.rounds, rounds)) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def with_threads(self, given: int | None, cores: Callable[[Group], float]) -> Suite:
        """Return the same with threads settled: `given`, else the group's own, else a rank's `cores`."""

        def settled(group: Group) -> Group:
            threads = given or group.task.threads or max(1, int(cores(group)))
            return replace(group, task=replace(group.task, threads=threads))

        return replace(self, groups=tuple(settled(group) for group in self.groups))

    def on_one_cluster(self, cluster: str, ranks: int, spec: ClusterSpec | None = None) -> Suite:
        """Return the same tasks, each once, on one cluster of `ranks` ranks. A virtual one has a `spec`."""
        groups: dict[str, Group] = {}
        notes = list(self.notes)
        for group in self.groups:
            try:
                task = _task_on(group, ranks, spec)
            except BenchError as error:
                notes.append(f"{group.name} is left out: {error}")
                continue
            moved = replace(group, cluster=cluster, ranks=ranks, task=task, spec=spec)
            if group.scaling == "weak" and task.batch < group.task.batch:
                notes.append(f"{moved.name} has a smaller batch, so that an epoch has {_LEAST_STEPS} steps")
            known = groups.setdefault(moved.name, moved)
            systems = tuple(dict.fromkeys(known.systems + moved.systems))
            rounds = max(known.rounds, moved.rounds)
            more = {name for each in (known, moved) for name in each.systems if name not in each.once}
            once = tuple(name for name in systems if name not in more)
            groups[moved.name] = replace(known, systems=systems, rounds=rounds, once=once)
        return replace(self, groups=tuple(groups.values()), notes=tuple(notes))


def batch_of_rank(batch: int, ranks: int) -> int:
    """Return a rank's part of a whole step's batch. BenchError if it is no whole number."""
    if batch % ranks:
        raise BenchError(
            f"With strong scaling the batch is the whole step's, and {ranks} ranks should share it evenly. "
            f"Received: batch={batch}"
        )
    return batch // ranks


def _task_on(group: Group, ranks: int, spec: ClusterSpec | None) -> Task:
    """Return what a group trains on `ranks` ranks. BenchError if it cannot."""
    task = group.task
    if group.scaling == "strong":
        task = replace(task, batch=batch_of_rank(task.batch * group.ranks, ranks))
    elif task.epochs:
        task = replace(task, batch=min(task.batch, trained_examples(task.workload) // (_LEAST_STEPS * ranks)))
    if group.by_speed:
        if spec is None:
            raise BenchError("its shares follow from the CPU limits of a virtual cluster")
        task = replace(task, shares=shares_by_speed(task.batch, spec))
    require_ranks(task, ranks)
    return task


def shares_by_speed(batch: int, spec: ClusterSpec) -> tuple[int, ...]:
    """Return the samples of each rank by its host's CPU time: batch x ranks in all, at least one each."""
    speeds = [host.cpus or 1.0 for host in spec.hosts for _ in range(host.slots)]
    return tuple(whole_shares(batch * len(speeds), speeds, least=1))


def require_ranks(task: Task, ranks: int) -> None:
    """Raise BenchError if `ranks` ranks cannot train a task."""
    if task.shares and len(task.shares) != ranks:
        raise BenchError(f"shares should have one for each of {ranks} ranks. Received: {list(task.shares)}")
    together = sum(task.shares) or task.batch * ranks
    if not task.epochs:
        return
    examples = trained_examples(task.workload)
    if together == 0 or task.epochs * (examples // together) <= task.warm_up:
        raise BenchError(
            f"epochs of {examples} examples should have more steps than the warm-up's {task.warm_up}. "
            f"Received: {task.batch} samples on each of {ranks} ranks"
        )
