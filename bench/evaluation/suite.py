"""Suites: what an evaluation runs, in groups of cases; read from TOML, or from options of one task.

A group is one task on one cluster, on which several systems take turns. A group that names no cluster runs on
the hosts or the cluster that the command names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import ROOT
from bench.cluster.spec import ClusterSpec, named_cluster
from bench.errors import BenchError
from bench.rounds.record import Case, Task
from bench.systems import SYSTEMS, is_exact
from bench.training.workloads import WORKLOADS, check, dataset_of
from hvpipe.config_file import Table, read_document

FOLDER = ROOT / "bench" / "suites"
_OPTIONS = ("batch", "pixels", "warm_up", "steps", "seed", "epochs")
_NUMBERS = (*_OPTIONS, "more_epochs")
_KEYS = (*_NUMBERS, "workload", "clusters", "systems", "rounds", "once")
_DEFAULTS = {"rounds": 2, "once": []}
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
        if is_exact(system):
            task = replace(task, more_epochs=0)
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


def suite_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_suite(name: str, all_systems: Sequence[str]) -> Suite:
    """Read the suite of that name, or that TOML file. `all_systems` are the systems of "all"."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.exists():
        raise BenchError(
            f"A suite should be one of {', '.join(suite_names())}, or a TOML file. Received: {name!r}"
        )
    whole = read_document(path)
    whole.allow(("title", "defaults", "group"))
    title = whole.text("title") if whole.has("title") else path.stem
    defaults = whole.table("defaults").as_dict() if whole.has("defaults") else {}
    groups: list[Group] = []
    for given in whole.tables("group"):
        table = Table({**_DEFAULTS, **defaults, **given.as_dict()}, given.place)
        with table.named_in_errors():
            groups += _groups(table, path.parent, all_systems)
    # Groups begin with different systems, so that in groups of one round none is always first or last.
    groups = [replace(group, first=number) for number, group in enumerate(groups)]
    names = [each.name for each in groups]
    if not names or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise BenchError(f"{path} should hold groups, each once. Received: {twice or 'none'}")
    specs: dict[str, ClusterSpec | None] = {}
    for each in groups:
        if specs.setdefault(each.cluster, each.spec) != each.spec:
            raise BenchError(
                f"{path}: clusters of one suite should have different file names. Received: {each.cluster!r}"
            )
    return Suite(path.stem, title, tuple(groups))


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is trained and for how long, for suite_of_options."""
    parser.add_argument("--workload", default="resnet50", choices=list(WORKLOADS))
    parser.add_argument("--pixels", type=int, default=64, help="side of an image, or length of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step (default: 8)")
    parser.add_argument("--ranks", type=int, help="ranks on this host alone (default: 2)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps of a round (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round (default: 8)")
    parser.add_argument(
        "--epochs", type=int, default=0, help="instead of steps, of digits, prose, table and the like"
    )
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each (default: 3)")


def suite_of_options(options: argparse.Namespace, systems: Sequence[str], known: Sequence[str]) -> Suite:
    """Return the task of the options as a suite, with these of the known systems in turn."""
    fields = {name: getattr(options, name) for name in ("workload", "rounds", *_OPTIONS)}
    table = Table({**_DEFAULTS, **fields, "systems": systems}, "options")
    title = f"{options.workload}, {len(systems)} in turn"
    return Suite(options.command, title, tuple(_groups(table, Path(), known)))


def _groups(table: Table, folder: Path, all_systems: Sequence[str]) -> list[Group]:
    """Return the groups of a table, one for each of its clusters."""
    table.allow(_KEYS)
    fields = table.as_dict()
    systems = tuple(all_systems) if fields.get("systems") == "all" else _names(table, "systems", all_systems)
    once = _names(table, "once", systems) if fields["once"] else ()
    clusters: list[tuple[str, ClusterSpec | None]] = [(ANYWHERE, None)]
    if table.has("clusters"):
        clusters = [named_cluster(text, folder) for text in _names(table, "clusters")]
    rounds = table.integer("rounds", minimum=1)
    task = _task(table)
    made = []
    for name, spec in clusters:
        ranks = spec.slots if spec is not None else 1
        require_ranks(task, ranks)
        made.append(Group(task, name, ranks, systems, rounds, spec=spec, once=once))
    return made


def _task(table: Table) -> Task:
    fields = table.as_dict()
    values = {key: table.integer(key) for key in _NUMBERS if key in fields or key == "batch"}
    task = Task(table.text("workload"), **values)
    check(task)
    return task


def _names(table: Table, key: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Return at least one text, all different and of the known ones, if these are given."""
    found = table.texts(key)
    if not found or len(set(found)) < len(found) or (known and not set(found) <= set(known)):
        of = f" of {', '.join(known)}" if known else ""
        raise BenchError(f"{key} should be names{of}, each once. Received: {found}")
    return tuple(found)
