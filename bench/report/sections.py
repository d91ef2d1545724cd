"""What the sections of the report show: plots, and tables of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time
from bench.report import figures
from bench.report.figures import ALONE, CaseFigures, by_group, computes_alone, fastest, rounds_by_case
from bench.report.headlines import comparisons
from bench.report.learning import ends_of_epochs_s, learning
from bench.report.plots import bars, lines
from bench.report.speedups import BEST_NATIVE, Comparison, less_or_more
from bench.rounds.record import Round

_NAMES = (
    *(ALONE, "tf-ps", "tf-mwms", "horovod", "horovod-tuned"),
    *("hvpipe-none", "hvpipe-backward", "hvpipe-step", "hvpipe-stale", "tf-mwms-tuned"),
    *("hvpipe-local", "hvpipe-int8"),
)
_UNITS = {  # of sampled quantities, by the end of their names
    "_bytes_per_s": (", MB/s", 1e-6),
    "_bytes": (", MB", 1e-6),
    "_share": (" busy, %", 100.0),
    "_sm_mhz": (" clock, MHz", 1.0),
    "_w": (", W", 1.0),
    "_celsius": (" temperature, °C", 1.0),
}
Figure = tuple[str, str]  # the caption, and the plot as SVG
_Series = dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Table:
    """Rows of text, one of which may stand out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    fastest: int | None = None


@dataclass(frozen=True)
class Part:
    """A figure beside a table, about one group."""

    name: str
    figure: Figure
    table: Table
    description: str = ""


def system_colour(name: str) -> int:
    """Return the colour of a system, the same in every plot: TensorFlow orange, Horovod purple, hvpipe blue,
    green.
    """
    return _NAMES.index(name) if name in _NAMES else len(_NAMES)


def curve(rows: list[CaseFigures]) -> list[Figure]:
    """Plot, for each number of ranks, throughput over the ratio of communication to computing."""
    plots = []
    known = [row for row in rows if _is_on_curve(row)]
    for ranks in sorted({row.case.ranks for row in known}):
        series: _Series = {}
        for row in sorted((row for row in known if row.case.ranks == ranks), key=_communication):
            x, y = series.setdefault(row.case.system, ([], []))
            x.append(_communication(row))
            y.append(row.against_one_host or 0.0)
        ratios = [2 ** (number / 4) for number in range(-20, 17)]
        theory = {
            "ideal overlap": (ratios, [ranks / max(1.0, ratio) for ratio in ratios]),
            "no overlap": (ratios, [ranks / (1 + ratio) for ratio in ratios]),
            "one host": (ratios, [1.0 for _ in ratios]),
        }
        colours = {name: system_colour(name) for name in series}
        labels = ("communication : computing", "throughput, one host = 1")
        title = f"{ranks} ranks"
        drawn = lines(title, {**theory, **series}, colours, labels, float(ranks), points=tuple(series))
        plots.append((title, drawn))
    return plots


def _is_on_curve(row: CaseFigures) -> bool:
    task = row.case.task
    alone = computes_alone(row.case.system)
    return row.links_s is not None and not alone and not task.shares and not task.epochs


def _communication(row: CaseFigures) -> float:
    """Return communication over computing; where links have no limit, at the plot's left end."""
    return max((row.links_s or 0.0) / (row.alone_s or 1.0), 1 / 32)


def steps(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> list[Part]:
    """Return a plot and a table for each group."""
    made = []
    for name, members in by_group(rows).items():
        first = members[0]
        marks = {}
        if first.bound_s is not None:
            marks[f"bound ({first.bound_is})" if first.bound_is else "bound"] = first.bound_s
        drawing = bars(
            f"step time, {name}",
            {row.case.system: row.step_s for row in members},
            [system_colour(row.case.system) for row in members],
            marks,
        )
        task = first.case.task.describe([row.rounds for row in members])
        description = f"{outcome.setting.cluster(first.case.cluster).description}; {task}"
        figure = ("Median step of the slowest rank", drawing)
        made.append(Part(name, figure, step_table(members), description))
    return made


def step_table(members: Sequence[CaseFigures]) -> Table:
    """Return a row for each system of a group, with the columns that have figures."""
    columns: dict[str, Callable[[CaseFigures], str]] = {
        "system": lambda row: row.case.system,
        "step": lambda row: format_time(row.step_s),
        "noise": lambda row: f"{row.noise:.0%}",
        "with drain": lambda row: format_time(row.wall_s),
        "samples/s": lambda row: f"{row.samples_per_s:.3g}",
        "efficiency": lambda row: "" if row.efficiency is None else f"{row.efficiency:.0%}",
        "over bound": lambda row: "" if row.over_bound is None else f"{row.over_bound:.2f}",
        "CPU, cores by rank": lambda row: " / ".join(f"{cores:.2f}" for cores in row.cores),
        "CPU a step": lambda row: format_time(row.cpu_s),
        "memory": lambda row: f"{row.peak_bytes / 1e6:.0f} MB",
        "sent a step": lambda row: f"{row.sent_bytes / 1e6:.1f} MB" if row.sent_bytes else "",
        "first step": lambda row: format_time(row.first_step_s),
    }
    cells = {title: [show(row) for row in members] for title, show in columns.items()}
    for name in dict.fromkeys(name for row in members for name in row.gpu):
        title, scale = _gpu_quantity(name)
        cells[title] = [_of_ranks(row.gpu.get(name, ()), scale) for row in members]
    kept = {title: column for title, column in cells.items() if any(column)}
    best = fastest(members)
    return Table(
        list(kept), list(zip(*kept.values(), strict=True)), None if best is None else members.index(best)
    )


def case_by_case(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> Table:
    """Return what hvpipe saves in each case: a row for each group, a column for each baseline."""
    against = comparisons(outcome, rows)
    found = {(title, each.group): each for title, compared in against.items() for each in compared}
    groups = [group for group in by_group(rows) if any((title, group) in found for title in against)]
    lines = [
        [group, *(_saved(found.get((title, group)), title.startswith(BEST_NATIVE)) for title in against)]
        for group in groups
    ]
    return Table(["case", *(f"against {title}" for title in against)], lines)


def _saved(compared: Comparison | None, named: bool) -> str:
    if compared is None:
        return ""
    tie = ", a tie" if compared.verdict == "tie" else ""
    text = f"{compared.describe()}, {less_or_more(compared.reduction)}{tie}"
    return f"{text} ({compared.baseline})" if named else text


def _of_ranks(values: Sequence[float | None], scale: float) -> str:
    return " / ".join("?" if value is None else f"{value * scale:.3g}" for value in values)


def _gpu_quantity(name: str) -> tuple[str, float]:
    """Return the name of a sampled quantity, and the factor to the unit in that name."""
    end = next((end for end in _UNITS if name.endswith(end)), "")
    unit, scale = _UNITS.get(end, ("", 1.0))
    words = name.removesuffix(end).replace("_", " ")
    for written in ("GPU", "PCIe", "NVLink"):
        words = words.replace(written.lower(), written)
    return words + unit, scale


def time_to_accuracy(outcome: EvaluationOutcome) -> list[Part]:
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
        colours = {name: system_colour(name) for name in series}
        drawn = lines(f"accuracy, {group}", series, colours, ("seconds of training", "accuracy"), 1.0)
        header = ["system", f"time to {target:.1%}", "last accuracy", "seeds"]
        made.append(Part(group, ("accuracy over time, first seed", drawn), Table(header, rows)))
    return made


def links(outcome: EvaluationOutcome) -> Table:
    rows = [
        [
            each.cluster,
            f"{each.first} to {each.second}",
            _rate(each.set_bits_per_s) or "no limit",
            (_rate(each.two_way_bits_per_s) or each.why) + ("" if each.keeps_its_limit else ", NOT AS SET"),
        ]
        for each in outcome.links
    ]
    return Table(["cluster", "between", "set", "two-way"], rows)


def not_measured(outcome: EvaluationOutcome) -> list[tuple[str, str]]:
    """Return every case that was skipped or failed, with the output of what failed."""
    rounds = rounds_by_case(outcome)
    return [
        (f"{key}: {why}", next((each.error for each in rounds[key] if each.error), ""))
        for key, why in figures.not_measured(outcome).items()
    ]


def systems(outcome: EvaluationOutcome) -> list[str]:
    """Return what each system says about itself."""
    notes: dict[str, list[str]] = {}
    for each in outcome.rounds:
        said = notes.setdefault(each.case.system, [])
        said += [note for note in (*each.notes, each.versions) if note and note not in said]
    return [f"{name}: {'; '.join(said)}" for name, said in notes.items() if said]


def _first_good(outcome: EvaluationOutcome) -> dict[str, list[Round]]:
    """Return by group the first round of each case that has figures."""
    groups: dict[str, list[Round]] = {}
    for rounds in rounds_by_case(outcome).values():
        good = next((each for each in rounds if each.ok), None)
        if good is not None:
            groups.setdefault(good.case.group, []).append(good)
    return groups


def _rate(bits_per_s: float | None) -> str:
    return "" if bits_per_s is None else f"{bits_per_s / 1e6:.4g} Mb/s"
