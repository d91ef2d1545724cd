"""Reads suites from TOML: those of bench/suites/, and the user's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cluster.named_clusters import named_cluster
from bench.cluster.spec import ClusterSpec
from bench.evaluation.suite import (
    ANYWHERE,
    Group,
    Suite,
    SuiteError,
    batch_of_rank,
    require_ranks,
    shares_by_speed,
)
from bench.rounds.record import AUTO_THREADS, Task
from bench.training.workloads import check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "suites"
_TASK_KEYS = {"workload", "batch", "pixels", "threads", "warm_up", "steps", "seed", "epochs"}
_GROUP_KEYS = _TASK_KEYS | {"clusters", "systems", "rounds", "once", "scaling", "shares"}


def suite_names() -> list[str]:
    """Return the names of the suites in bench/suites/."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_suite(name: str, all_systems: Sequence[str]) -> Suite:
    """Read the suite of that name, or that TOML file. `all_systems` are the systems of "all"."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuiteError(
            f"A suite should be one of {', '.join(suite_names())}, or a TOML file. Received: {name!r}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path} should be TOML. Received: {error}") from error
    _require_keys(path, data, {"title", "defaults", "group"})
    title = data.get("title", path.stem)
    _require(path, isinstance(title, str), "the title should be a text", title)
    defaults = data.get("defaults", {})
    _require(path, isinstance(defaults, dict), "[defaults] should be a table", defaults)
    tables = [{**defaults, **table} for table in _tables(path, data)]
    groups = [group for table in tables for group in _groups(path, table, all_systems)]
    # Groups begin with different systems, so that in groups of one round none is always first or last.
    groups = [replace(group, first=number) for number, group in enumerate(groups)]
    names = [each.name for each in groups]
    if not names or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SuiteError(f"{path} should hold groups, each once. Received: {twice or 'none'}")
    specs: dict[str, ClusterSpec | None] = {}
    for each in groups:
        _require(
            path,
            specs.setdefault(each.cluster, each.spec) == each.spec,
            "clusters of one suite should have different file names",
            each.cluster,
        )
    return Suite(path.stem, title, tuple(groups))


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
    """Return what a group trains on one of its clusters; without a cluster, on one rank."""
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
        shares = shares_by_speed(values["batch"], spec)
    whole = proportional or (isinstance(shares, list) and all(type(each) is int for each in shares))
    _require(path, whole, "shares should be 'proportional', or a list of whole numbers", shares)
    task = Task(**values, shares=tuple(shares))
    try:
        check(replace(task, threads=max(1, task.threads)))
        require_ranks(task, spec.slots if spec is not None else len(shares) or 1)
    except ValueError as error:
        raise SuiteError(f"{path}: {error}") from error
    return task


def _tables(path: Path, data: dict[str, Any]) -> list[dict[str, Any]]:
    tables = data.get("group", [])
    are_tables = isinstance(tables, list) and all(isinstance(each, dict) for each in tables)
    _require(path, are_tables, "[[group]] should be tables", tables)
    return list(tables)


def _texts(path: Path, table: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of at least one text, all different."""
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
