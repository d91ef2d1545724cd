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
from bench.training.workloads import dataset_of

ANYWHERE = "hosts"  # the cluster of groups that name none
LOOPBACK = "loopback"  # the cluster that is this machine alone


@dataclass(frozen=True)
class Group:
    """Cases that are compared with each other: one task on one cluster by several systems, in rounds.

    `spec` describes a virtual cluster. Systems in `once` take part only in the first round.
    """

    task: Task
    cluster: str
    ranks: int
    systems: tuple[str, ...]
    rounds: int = 2
    spec: ClusterSpec | None = None
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
        return Case(system, self.cluster, self.ranks, task)

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
        """Return the same with threads settled: `given`, else a rank's `cores`."""

        def settled(group: Group) -> Group:
            threads = given or max(1, int(cores(group)))
            return replace(group, task=replace(group.task, threads=threads))

        return replace(self, groups=tuple(settled(group) for group in self.groups))

    def on_one_cluster(self, cluster: str, ranks: int, spec: ClusterSpec | None = None) -> Suite:
        """Return the same tasks, each once, on one cluster of `ranks` ranks. A virtual one has a `spec`."""
        groups: dict[str, Group] = {}
        notes = list(self.notes)
        for group in self.groups:
            try:
                require_ranks(group.task, ranks)
            except BenchError as error:
                notes.append(f"{group.name} is left out: {error}")
                continue
            moved = replace(group, cluster=cluster, ranks=ranks, spec=spec)
            if groups.setdefault(moved.name, moved) is not moved:
                notes.append(f"{group.name} is left out: another group has its task")
        return replace(self, groups=tuple(groups.values()), notes=tuple(notes))


def require_ranks(task: Task, ranks: int) -> None:
    """Raise BenchError if `ranks` ranks cannot train a task."""
    if not task.epochs:
        return
    examples = dataset_of(task.workload).trained
    if task.epochs * (examples // (task.batch * ranks)) <= task.warm_up:
        raise BenchError(
            f"epochs of {examples} examples should have more steps than the warm-up's {task.warm_up}. "
            f"Received: {task.batch} samples on each of {ranks} ranks"
        )
