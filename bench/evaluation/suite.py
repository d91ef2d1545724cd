"""Suites: what an evaluation runs, read from TOML; groups of cases, and pipelines.

A group is one task on one cluster, on which the systems take turns. Clusters have names: "2x300mbit" is two
equal hosts on links of 300 Mb/s, "4xunlimited" four without limits, "mine.toml" a file beside the suite, any
other one a file in bench/clusters/. A group without clusters runs where it is moved to.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.cluster.spec import ClusterSpec, equal_hosts, read_spec
from bench.errors import ClusterError
from bench.rounds.record import AUTO_THREADS, Case, Task
from bench.training.image_model import MODELS
from bench.training.workloads import TRAINED_DIGITS, check
from hvpipe.forecast.data_parallel import whole_shares

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FOLDER = Path(__file__).parents[1]
_EQUAL = re.compile(r"(\d+)x([\w.]+)")
ANYWHERE = "hosts"  # the cluster of groups and pipelines that name none
_LEAST_STEPS = 4  # of an epoch
_TASK_KEYS = {"workload", "batch", "pixels", "threads", "warm_up", "steps", "seed", "epochs"}
_GROUP_KEYS = _TASK_KEYS | {"clusters", "systems", "rounds", "once", "scaling", "shares"}
_PIPELINE_COUNTS = {"pixels", "batch", "seeds", "rounds", "steps"}
_PIPELINE_KEYS = _PIPELINE_COUNTS | {"cluster", "model", "microbatches", "methods"}


class SuiteError(ValueError):
    """A suite that cannot be read or run."""


@dataclass(frozen=True)
class Group:
    """Cases that are compared with each other: one task on one cluster by several systems, in rounds.

    With "strong" scaling a step has the same samples on any number of ranks; the task's batch is one's part.
    `spec` is what a virtual cluster looks like; shares that are `by_speed` follow from it.
    Systems that are in `once` take part in the first round alone.
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
        """As Case.group."""
        return self.case(self.systems[0]).group

    def case(self, system: str) -> Case:
        """The case of one of the systems."""
        return Case(system, self.cluster, self.ranks, self.task, self.scaling)

    def rounds_of(self, system: str) -> int:
        """How many of them one of the systems takes part in."""
        return 1 if system in self.once else self.rounds

    def turns(self) -> list[tuple[int, Case]]:
        """Rounds with their cases, in order; each begins with the next system, from `first` on."""
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
class PipelineRun:
    """A run of bench.pipeline on a cluster: placements of a model, measured beside what was predicted."""

    cluster: str
    model: str
    pixels: int = 64
    batch: int = 32
    microbatches: int | str = 8  # or "auto"
    methods: str = "greedy,even,round_robin,random"
    seeds: int = 1
    rounds: int = 2
    steps: int = 3
    spec: ClusterSpec | None = None  # what its cluster looks like where that is a virtual one

    @property
    def name(self) -> str:
        """Unique in a suite."""
        return f"pipeline/{self.model}-{self.pixels}/{self.batch}/{self.cluster}"

    def words(self) -> list[str]:
        """The arguments of bench.pipeline."""
        options = {key: value for key, value in asdict(self).items() if key not in ("cluster", "spec")}
        return [word for key, value in options.items() for word in (f"--{key}", str(value))]


@dataclass(frozen=True)
class Suite:
    """What is run, in order; `notes` say what is not as it was written, where it was moved to a cluster."""

    name: str
    title: str
    groups: tuple[Group, ...]
    pipelines: tuple[PipelineRun, ...] = ()
    notes: tuple[str, ...] = ()

    def only_systems(self, names: Iterable[str]) -> Suite:
        """The same with some of the systems; groups without any of them are left out."""
        wanted = set(names)
        known = dict.fromkeys(name for group in self.groups for name in group.systems)
        if unknown := sorted(wanted - set(known)):
            raise SuiteError(f"Systems of this suite are {', '.join(known)}. Received: {unknown}")
        groups = []
        for group in self.groups:
            kept = tuple(name for name in group.systems if name in wanted)
            if kept:
                once = tuple(name for name in group.once if name in wanted)
                groups.append(replace(group, systems=kept, once=once))
        return replace(self, groups=tuple(groups))

    def with_threads(self, given: int | None, cores: Callable[[Group], float]) -> Suite:
        """The same with threads settled: `given`, else a group's own, else as many as `cores` a rank has."""

        def settled(group: Group) -> Group:
            threads = given or group.task.threads or max(1, int(cores(group)))
            return replace(group, task=replace(group.task, threads=threads))

        return replace(self, groups=tuple(settled(group) for group in self.groups))

    def on_one_cluster(self, cluster: str, ranks: int, spec: ClusterSpec | None = None) -> Suite:
        """The same tasks on a single cluster of so many ranks, each once; a virtual one has a `spec`."""
        groups: dict[str, Group] = {}
        notes = list(self.notes)
        for group in self.groups:
            try:
                task = _task_on(group, ranks, spec)
            except SuiteError as error:
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
        runs = (replace(run, cluster=cluster, spec=spec) for run in self.pipelines)
        pipelines = tuple({run.name: run for run in runs}.values())
        return replace(self, groups=tuple(groups.values()), pipelines=pipelines, notes=tuple(notes))


def suite_names() -> list[str]:
    """The suites that come with the benchmarks."""
    return sorted(path.stem for path in (_FOLDER / "suites").glob("*.toml"))


def read_suite(name: str, all_systems: Sequence[str]) -> Suite:
    """The suite of that name, or in that TOML file. `all_systems` is what "all" means."""
    path = Path(name) if name.endswith(".toml") else _FOLDER / "suites" / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuiteError(
            f"A suite should be one of {', '.join(suite_names())}, or a TOML file. Received: {name!r}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path} should be TOML. Received: {error}") from error
    _require_keys(path, data, {"title", "group", "pipeline"})
    title = data.get("title", path.stem)
    _require(path, isinstance(title, str), "the title should be a text", title)
    groups = [group for table in _tables(path, data, "group") for group in _groups(path, table, all_systems)]
    # Groups of one round begin with different systems too: none is always first, none always last.
    groups = [replace(group, first=number) for number, group in enumerate(groups)]
    pipelines = [_pipeline(path, table) for table in _tables(path, data, "pipeline")]
    names = [each.name for each in (*groups, *pipelines)]
    if not names or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SuiteError(f"{path} should hold groups, each once. Received: {twice or 'none'}")
    specs: dict[str, ClusterSpec | None] = {}
    for each in (*groups, *pipelines):
        _require(
            path,
            specs.setdefault(each.cluster, each.spec) == each.spec,
            "clusters of one suite should have different file names",
            each.cluster,
        )
    return Suite(path.stem, title, tuple(groups), tuple(pipelines))


def cluster_spec(name: str) -> ClusterSpec:
    """The virtual cluster of that name."""
    if match := _EQUAL.fullmatch(name):
        return equal_hosts(int(match[1]), match[2])
    files = {path.stem: path for path in sorted((_FOLDER / "clusters").glob("*.toml"))}
    if name not in files:
        raise ClusterError(
            f"A cluster should be as 2x300mbit, one of {', '.join(files)}, or a TOML file, as in mine.toml. "
            f"Received: {name!r}"
        )
    return read_spec(files[name])


def named_cluster(text: str, folder: Path) -> tuple[str, ClusterSpec]:
    """What results call a cluster, and what it looks like; a TOML file is looked for in `folder`."""
    if text.endswith(".toml"):
        path = folder / text
        return path.name, read_spec(path)
    return text, cluster_spec(text)


def cores_of_rank(spec: ClusterSpec, cores: int) -> float:
    """Cores that each rank of a virtual cluster has: its part of the machine's, on the slowest host."""
    limits = [host.cpus / host.slots for host in spec.hosts if host.cpus is not None]
    return min([cores / spec.slots, *limits])


def proportional_shares(batch: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Samples of each rank, by speed: batch x ranks in all, at least one each."""
    return tuple(whole_shares(batch * len(speeds), speeds, least=1))


def batch_of_rank(batch: int, ranks: int) -> int:
    """A rank's part of a whole step's batch; SuiteError where it is no whole number."""
    if batch % ranks:
        raise SuiteError(
            f"With strong scaling the batch is the whole step's, and {ranks} ranks should share it evenly. "
            f"Received: batch={batch}"
        )
    return batch // ranks


def _task_on(group: Group, ranks: int, spec: ClusterSpec | None) -> Task:
    """What a group trains where it has so many ranks; SuiteError where it cannot."""
    task = group.task
    if group.scaling == "strong":
        task = replace(task, batch=batch_of_rank(task.batch * group.ranks, ranks))
    elif task.epochs:
        task = replace(task, batch=min(task.batch, TRAINED_DIGITS // (_LEAST_STEPS * ranks)))
    if group.by_speed:
        if spec is None:
            raise SuiteError("its shares follow from what a virtual cluster leaves its hosts of their CPUs")
        task = replace(task, shares=_shares_by_speed(task.batch, spec))
    _require_ranks(task, ranks)
    return task


def _shares_by_speed(batch: int, spec: ClusterSpec) -> tuple[int, ...]:
    return proportional_shares(batch, [host.cpus or 1.0 for host in spec.hosts for _ in range(host.slots)])


def _require_ranks(task: Task, ranks: int) -> None:
    """SuiteError where so many ranks cannot train a task."""
    if task.shares and len(task.shares) != ranks:
        raise SuiteError(f"shares are one for each of {ranks} ranks. Received: {list(task.shares)}")
    together = sum(task.shares) or task.batch * ranks
    if task.epochs and (together == 0 or task.epochs * (TRAINED_DIGITS // together) <= task.warm_up):
        raise SuiteError(
            f"epochs of {TRAINED_DIGITS} images should have more steps than the warm-up's {task.warm_up}. "
            f"Received: {task.batch} samples on each of {ranks} ranks"
        )


def _groups(path: Path, table: dict[str, Any], all_systems: Sequence[str]) -> list[Group]:
    _require_keys(path, table, _GROUP_KEYS)
    if not {"workload", "batch", "systems"} <= set(table):
        raise SuiteError(f"{path}: a group has workload, batch and systems. Received: {sorted(table)}")
    systems = tuple(all_systems) if table["systems"] == "all" else _texts(path, table, "systems")
    if unknown := sorted(set(systems) - set(all_systems)):
        raise SuiteError(f"{path}: systems should be of {', '.join(all_systems)}. Received: {unknown}")
    scaling = table.get("scaling", "weak")
    _require(path, scaling in ("weak", "strong"), "scaling should be 'weak' or 'strong'", scaling)
    rounds = table.get("rounds", 2)
    _require(path, _is_count(rounds), "rounds should be a whole number of at least 1", rounds)
    once = _texts(path, table, "once") if "once" in table else ()
    if unknown := sorted(set(once) - set(systems)):
        raise SuiteError(f"{path}: once should be of the group's systems. Received: {unknown}")
    clusters: list[tuple[str, ClusterSpec | None]] = [(ANYWHERE, None)]
    if "clusters" in table:
        clusters = [named_cluster(text, path.parent) for text in _texts(path, table, "clusters")]
    made = []
    for name, spec in clusters:
        task = _task(path, table, spec)
        by_speed = table.get("shares") == "proportional"
        ranks = spec.slots if spec is not None else len(task.shares) or 1
        made.append(
            Group(task, name, ranks, systems, rounds, scaling, spec=spec, by_speed=by_speed, once=once)
        )
    return made


def _task(path: Path, table: dict[str, Any], spec: ClusterSpec | None) -> Task:
    """What a group trains on one of its clusters; without one, on one rank."""
    values = {key: value for key, value in table.items() if key in _TASK_KEYS}
    workload = values["workload"]
    _require(path, isinstance(workload, str), "the workload should be a name", workload)
    if values.setdefault("threads", "auto") == "auto":
        values["threads"] = AUTO_THREADS
    else:
        least = type(values["threads"]) is int and values["threads"] >= 1
        _require(path, least, "threads should be 'auto', or a whole number of at least 1", values["threads"])
    for key in sorted(values.keys() - {"workload"}):
        _require(path, type(values[key]) is int, f"{key} should be a whole number", values[key])
    if table.get("scaling") == "strong":
        try:
            values["batch"] = batch_of_rank(values["batch"], 1 if spec is None else spec.slots)
        except SuiteError as error:
            raise SuiteError(f"{path}: {error}") from error
    shares = table.get("shares", [])
    proportional = shares == "proportional"
    if proportional:
        if spec is None:
            raise SuiteError(
                f"{path}: 'proportional' shares follow from what a virtual cluster leaves its hosts of their "
                "CPUs: the group should name clusters. Received: none"
            )
        shares = _shares_by_speed(values["batch"], spec)
    whole = proportional or (isinstance(shares, list) and all(type(each) is int for each in shares))
    _require(path, whole, "shares should be 'proportional', or a list of whole numbers", shares)
    task = Task(**values, shares=tuple(shares))
    try:
        check(replace(task, threads=max(1, task.threads)))
        _require_ranks(task, spec.slots if spec is not None else len(shares) or 1)
    except ValueError as error:
        raise SuiteError(f"{path}: {error}") from error
    return task


def _pipeline(path: Path, table: dict[str, Any]) -> PipelineRun:
    _require_keys(path, table, _PIPELINE_KEYS)
    models = (*MODELS, "transformer")
    model, methods = table.get("model"), table.get("methods", "")
    _require(path, model in models, f"a pipeline's model should be one of {', '.join(models)}", model)
    _require(path, isinstance(methods, str), "methods should be a text, as in 'greedy,random'", methods)
    cluster = table.get("cluster", ANYWHERE)
    _require(path, isinstance(cluster, str), "a pipeline's cluster should be a name", cluster)
    counts = {key: value for key, value in table.items() if key in _PIPELINE_COUNTS}
    if table.get("microbatches", "auto") != "auto":
        counts["microbatches"] = table["microbatches"]
    for key, value in counts.items():
        _require(path, _is_count(value), f"{key} should be a whole number of at least 1", value)
    if "cluster" not in table:
        return PipelineRun(**table, cluster=cluster)
    name, spec = named_cluster(cluster, path.parent)
    return PipelineRun(**{**table, "cluster": name}, spec=spec)


def _tables(path: Path, data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    tables = data.get(key, [])
    are_tables = isinstance(tables, list) and all(isinstance(each, dict) for each in tables)
    _require(path, are_tables, f"[[{key}]] should be tables", tables)
    return list(tables)


def _texts(path: Path, table: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of different texts, at least one."""
    found = table[key]
    are_texts = isinstance(found, list) and all(isinstance(each, str) for each in found)
    _require(
        path,
        are_texts and len(found) > 0 and len(set(found)) == len(found),
        f"{key} should be a list of names, each once",
        found,
    )
    return tuple(found)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _require(path: Path, holds: bool, wanted: str, received: object) -> None:
    if not holds:
        raise SuiteError(f"{path}: {wanted}. Received: {received!r}")


def _require_keys(path: Path, table: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(table) - known):
        raise SuiteError(f"{path}: known keys are {', '.join(sorted(known))}. Received: {', '.join(unknown)}")
