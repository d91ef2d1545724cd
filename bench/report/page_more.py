"""The other sections of the report: scaling, utilization, time to accuracy, links, what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from bench.evaluation.outcome import EvaluationOutcome
from bench.report.figures import (
    ALONE,
    CaseFigures,
    by_group,
    computes_alone,
    rounds_by_case,
)
from bench.report.learning import SHARE, ends_of_epochs_s, learning
from bench.report.markup import around, element, figure, folded, table
from bench.report.page_measured import system_colour
from bench.report.plots import lines
from bench.rounds.record import Round

_EQUAL_HOSTS = re.compile(r"\d+x([\d.]*\w+)")
_SAMPLED = ("tf-ps", "tf-mwms", "tf-mwms-tuned", "horovod-tuned", "hvpipe-step")
_QUANTITIES = {
    "cpu": ("cores kept busy", 1.0),
    "host": ("CPU of the whole machine, %", 100.0),
    "resident_bytes": ("memory, MB", 1e-6),
    "gpu_share": ("GPU kept busy, %", 100.0),
    "gpu_memory_share": ("GPU memory kept busy, %", 100.0),
    "gpu_power_w": ("GPU power, W", 1.0),
}
_Series = dict[str, tuple[list[float], list[float]]]


def scaling(rows: list[CaseFigures]) -> str:
    """Plot efficiency over the number of ranks, with constant samples a rank."""
    families: dict[str, list[CaseFigures]] = {}
    for row in rows:
        match = _EQUAL_HOSTS.fullmatch(row.case.cluster)
        task = row.case.task
        if (
            match
            and not task.shares
            and not task.epochs
            and row.efficiency
            and not computes_alone(row.case.system)
        ):
            what = f"{task.workload}, {task.pixels}, links {match[1]}"
            families.setdefault(f"weak scaling: {what}, {task.batch} samples a rank", []).append(row)
    plots = []
    for title, members in families.items():
        if len({row.case.ranks for row in members}) < 2:
            continue
        series: _Series = {}
        for row in sorted(members, key=lambda row: row.case.ranks):
            x, y = series.setdefault(row.case.system, ([1.0], [100.0]))
            x.append(float(row.case.ranks))
            y.append(100 * (row.efficiency or 0.0))
        plots.append(figure(title, _plot(title, series, ("ranks", "% of computing alone"), 100.0)))
    return around("div", plots, "plots") if plots else ""


def gpus(rows: Sequence[CaseFigures]) -> str:
    """Return the means of what each rank's GPU did, a table for each group that sampled one."""
    made = []
    for name, members in by_group(rows).items():
        sampled = [row for row in members if row.usage.gpu]
        quantities = list(dict.fromkeys(quantity for row in sampled for quantity in row.usage.gpu))
        if not quantities:
            continue
        lines = []
        for row in sampled:
            cells = [_of_ranks(row.usage.gpu.get(each, ()), _quantity(each)[1]) for each in quantities]
            lines.append([row.case.system, *cells])
        made += [
            element("h3", name),
            table(["system", *(_quantity(each)[0] for each in quantities)], lines),
        ]
    return element("p", "Means over the timed steps of all rounds, by rank.") + "".join(made) if made else ""


def _of_ranks(values: Sequence[float | None], scale: float) -> str:
    return " / ".join("?" if value is None else f"{value * scale:.3g}" for value in values)


def utilization(outcome: EvaluationOutcome) -> str:
    """Plot what rank 0 sampled in the first good round, for each group and quantity, of a few systems."""
    plots = []
    for group, rounds in _first_good(outcome).items():
        sampled = {each.case.system: each.ranks[0].utilization for each in rounds}
        sampled = {name: found for name, found in sampled.items() if name in _SAMPLED} or sampled
        for quantity in dict.fromkeys(key for rank in sampled.values() for one in rank for key in one):
            words, scale = _quantity(quantity)
            series: _Series = {}
            for system, found in sampled.items():
                points = [(one["at_s"], one[quantity] * scale) for one in found if quantity in one]
                if len(points) > 1:
                    series[system] = ([at for at, _ in points], [value for _, value in points])
            if quantity != "at_s" and series:
                plots.append(
                    figure(f"{words}, {group}", _plot(f"{words}, {group}", series, ("seconds", words), 0.0))
                )
    if not plots:
        return ""
    return element("p", "Rank 0 in the first round, during the timed steps.") + around("div", plots, "plots")


def _quantity(name: str) -> tuple[str, float]:
    """Return the name of a sampled quantity, and the factor to the unit in that name."""
    if name in _QUANTITIES:
        return _QUANTITIES[name]
    if name.endswith(("_bytes", "_bytes_per_s")):
        unit = "MB/s" if name.endswith("_per_s") else "MB"
        return f"{name.partition('_bytes')[0].replace('_', ' ')}, {unit}", 1e-6
    return name.replace("_", " "), 1.0


def time_to_accuracy(outcome: EvaluationOutcome) -> str:
    """Return, for each training by epochs, accuracy over seconds and the time to that of exact training."""
    made, first_good = [], _first_good(outcome)
    for group, (target, learned) in learning(outcome).items():
        series: _Series = {
            each.case.system: (ends_of_epochs_s(each), each.ranks[0].accuracy)
            for each in first_good[group]
            if each.ranks[0].accuracy and each.case.system != ALONE
        }
        rows = [
            [each.system, each.describe(), f"{median(list(each.last)):.1%}", str(len(each.last))]
            for each in learned
            if each.system != ALONE
        ]
        drawn = _plot(f"accuracy, {group}", series, ("seconds of training", "accuracy"), 1.0)
        header = [f"time to {target:.1%}", "last accuracy", "seeds"]
        made += [
            element("h3", group),
            around("div", [figure("accuracy over time, first seed", drawn)], "plots"),
            table(["system", *header], rows),
        ]
    words = f"The accuracy to reach is {SHARE:.0%} of the median that exact training ends with."
    return element("p", words) + "".join(made) if made else ""


def links(outcome: EvaluationOutcome) -> str:
    if not outcome.links:
        return ""
    rows = [
        [
            each.cluster,
            f"{each.first} to {each.second}",
            _rate(each.set_bits_per_s) or "no limit",
            (_rate(each.two_way_bits_per_s) or each.why) + ("" if each.keeps_its_limit else ", NOT AS SET"),
        ]
        for each in outcome.links
    ]
    words = "Two-way is the rate of each direction with both busy."
    header = ["cluster", "between", "set", "two-way"]
    return element("p", words) + table(header, rows)


def not_measured(outcome: EvaluationOutcome) -> str:
    """Return every case that was skipped or failed, with its output."""
    made = []
    for key, rounds in rounds_by_case(outcome).items():
        failed = next((each for each in rounds if each.error), None)
        if failed is not None:
            made.append(folded(f"failed: {key}: {failed.why}", failed.error))
        elif not any(each.ok for each in rounds):
            made.append(element("p", f"skipped: {key}: {rounds[0].skipped}"))
    return "".join(made)


def _first_good(outcome: EvaluationOutcome) -> dict[str, list[Round]]:
    """Return by group the first round of each case that has figures."""
    groups: dict[str, list[Round]] = {}
    for rounds in rounds_by_case(outcome).values():
        good = next((each for each in rounds if each.ok), None)
        if good is not None:
            groups.setdefault(good.case.group, []).append(good)
    return groups


def _plot(
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    labels: tuple[str, str],
    top: float,
) -> str:
    return lines(title, series, {name: system_colour(name) for name in series}, labels, top)


def _rate(bits_per_s: float | None) -> str:
    return "" if bits_per_s is None else f"{bits_per_s / 1e6:.4g} Mb/s"
