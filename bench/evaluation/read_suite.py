"""Reads suites from TOML (those of bench/suites/, and the user's own), and from options of one task."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cluster.spec import ClusterSpec, named_cluster
from bench.errors import BenchError
from bench.evaluation.suite import ANYWHERE, Group, Suite, require_ranks
from bench.rounds.record import Task
from bench.training.workloads import WORKLOADS, check
from hvpipe.config_file import Table, read_document

FOLDER = Path(__file__).parents[1] / "suites"
_NUMBERS = ("batch", "pixels", "warm_up", "steps", "seed", "epochs")
_KEYS = (*_NUMBERS, "workload", "clusters", "systems", "rounds", "once")
_DEFAULTS = {"rounds": 2, "once": []}


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
    parser.add_argument("--epochs", type=int, default=0, help="instead of steps, of digits, prose or table")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each (default: 3)")


def suite_of_options(options: argparse.Namespace, systems: Sequence[str], known: Sequence[str]) -> Suite:
    """Return the task of the options as a suite, with these of the known systems in turn."""
    fields = {name: getattr(options, name) for name in ("workload", "rounds", *_NUMBERS)}
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
