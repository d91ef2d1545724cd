"""The steps of an evaluation as a picture: a bar for each system in each case, computing alone as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time
from bench.report.figures import ALONE, CaseFigures, all_figures, by_group
from bench.training.workloads import WORKLOADS
from hvpipe.trace.chart import figure_class

_SYSTEMS: Mapping[str, tuple[str, str]] = {
    "tf-mwms-tuned": ("TensorFlow MultiWorkerMirrored, tuned", "#b8bec6"),
    "horovod-tuned": ("Horovod, tuned", "#8d96a3"),
    "keras-jax": ("Keras on JAX", "#d9b36c"),
    "torch-ddp": ("Keras on PyTorch, DistributedDataParallel", "#c98a72"),
    "hvpipe-step": ("hvpipe", "#1f77b4"),
}
"""The systems that are drawn, in this order: their titles and colours. All train exactly."""
_HOSTS = {2: "two hosts", 4: "four hosts", 8: "eight hosts"}


def draw(outcome: EvaluationOutcome, path: Path) -> None:
    """Draw the steps of all cases, in steps of TensorFlow computing alone. The file's name says PNG or SVG.

    Raises:
        BenchError: If no case has computing alone and one of the systems, or the file cannot be written.
    """
    groups: list[tuple[str, float, list[CaseFigures]]] = []
    for members in by_group(all_figures(outcome)).values():
        known = {row.case.system: row for row in members}
        drawn = [known[name] for name in _SYSTEMS if name in known]
        if drawn and ALONE in known and not drawn[0].case.task.epochs:
            groups.append((_title(outcome, drawn[0]), known[ALONE].step_s, drawn))
    if not groups:
        raise BenchError("A picture needs steps of single and of hvpipe-step, or others. Received: none")
    figure = _drawn(groups)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        raise BenchError(f"A picture should go to a .svg or .png file. Received: {path}: {error}") from error


def _title(outcome: EvaluationOutcome, row: CaseFigures) -> str:
    cluster, task = outcome.setting.cluster(row.case.cluster), row.case.task
    workload = WORKLOADS.get(task.workload)
    rate = cluster.slowest_bits_per_s
    link = "links without limit" if rate is None else _rate(rate)
    hosts = _HOSTS.get(cluster.hosts, f"{cluster.hosts} hosts")
    return f"{workload.title if workload else task.workload}\n{task.batch} a rank, {hosts}, {link}"


def _rate(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:g} Gb/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g} Mb/s"


def _drawn(groups: Sequence[tuple[str, float, Sequence[CaseFigures]]]) -> Any:
    """Return the figure of groups: title, the seconds of computing alone, and the systems."""
    heights = [len(rows) + 1.0 for _, _, rows in groups]
    figure = figure_class()(figsize=(9, 1.2 + 0.19 * sum(heights)), dpi=130, layout="constrained")
    axes = figure.subplots()
    top, middles, legend = 0.0, [], {}
    longest = max(row.step_s / alone_s for _, alone_s, rows in groups for row in rows)
    for (_, alone_s, rows), height in zip(groups, heights, strict=True):
        for place, row in enumerate(rows, start=round(top)):
            title, colour = _SYSTEMS[row.case.system]
            times = row.step_s / alone_s
            legend[title] = axes.barh(place, times, height=0.86, color=colour)
            own = (row.alone_s or alone_s) / alone_s
            said = f" {times:.2f}  ({format_time(row.step_s)})"
            axes.text(max(times, own), place, said, va="center", fontsize=7)
            axes.plot([own, own], [place - 0.43, place + 0.43], color="black", linewidth=1)
        middles.append(top + (len(rows) - 1) / 2)
        top += height
    axes.axvline(1, color="black", linewidth=0.5)
    axes.text(1, -1.1, "computing alone", ha="center", va="bottom", fontsize=8)
    axes.set_yticks(middles, [title for title, _, _ in groups], fontsize=8)
    axes.set(ylim=(top - 0.6, -0.9), xlim=(0, 1.13 * longest))
    axes.set_xlabel("a training step, in steps of computing alone (shorter is better)", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend([*legend.values()], [*legend], loc="outside upper left", ncols=3, fontsize=8, frameon=False)
    return figure
