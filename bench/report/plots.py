"""Plots of an evaluation as SVG for an HTML page, in the page's own colours: light, dark and print.

matplotlib draws with placeholder colours. Afterwards each becomes a CSS variable or `currentColor`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bench.metrics import format_time

INK = "#010203"  # becomes currentColor
_GRID = "#010204"
_PAPER = "#010205"  # behind the page
_SERIES = [f"#0102{number:02x}" for number in range(16, 40)]
_WIDTH_IN = 4.6
_MARKERS = "osD^vPX*"
_FEW = 12  # series of few points get markers


def colour(number: int) -> str:
    """Return the colour of a series, which the page defines as --c0, --c1, ..."""
    return _SERIES[number % len(_SERIES)]


def bars(title: str, values: Mapping[str, float], colours: Sequence[int], marks: Mapping[str, float]) -> str:
    """Return a horizontal bar of seconds for each name. `marks` are vertical lines with a legend."""
    with _axes(0.36 * len(values) + 0.9 + 0.22 * len(marks), title) as (axes, finish):
        places = range(len(values))[::-1]
        drawn = axes.barh(places, list(values.values()), color=[colour(c) for c in colours], height=0.68)
        # A mark may pass behind a label, not through it.
        behind = {"facecolor": _PAPER, "edgecolor": "none", "pad": 0.5}
        texts = [format_time(value) for value in values.values()]
        axes.bar_label(drawn, texts, padding=3, fontsize=9, bbox=behind, zorder=3)
        axes.set_yticks(places, list(values))
        for (what, value), style in zip(marks.items(), ("--", ":"), strict=False):
            axes.axvline(
                value,
                color=INK,
                linestyle=style,
                linewidth=1.1,
                zorder=1,
                label=f"{what} {format_time(value)}",
            )
        axes.margins(x=0.2)
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds a step")
        if marks:
            _legend(axes, 1)
        return finish()


def lines(
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    colours: Mapping[str, int],
    labels: tuple[str, str],
    top: float | None = None,
    points: Sequence[str] = (),
) -> str:
    """Return a line for each series over x. `labels` are of the axes; y ends at `top` or above.

    The series named in `points` are drawn as points, and x is then logarithmic. Those without a colour
    are drawn in ink.
    """
    with _axes(3.0 + 0.22 * -(-len(series) // 2), title) as (axes, finish):
        for number, (name, (x, y)) in enumerate(series.items()):
            style = ("-", "--", "-.", ":")[number % 4]
            marker = "o" if len(x) <= _FEW else ""
            options = {"color": colour(colours[name]) if name in colours else INK, "linewidth": 1.6}
            if name in points:
                style = ""
                marker = _MARKERS[colours.get(name, number) % len(_MARKERS)]  # the same in every plot
            axes.plot(
                x, y, linestyle=style, marker=marker, markersize=5 if points else 3, label=name, **options
            )
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        if top is not None:
            axes.set_ylim(bottom=0, top=max(top, axes.get_ylim()[1]))
        if points:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(
                lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
            )
        places = sorted({value for x, _ in series.values() for value in x})
        if len(places) <= _FEW and all(place.is_integer() for place in places):
            axes.set_xticks(places)
        _legend(axes, 2)
        return finish()


@contextmanager
def _axes(height_in: float, title: str) -> Iterator[tuple[Any, Any]]:
    """Yield axes in the page's ink, and a function that makes the SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK
    )
    settings = {
        **ink,
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(_WIDTH_IN, height_in), layout="constrained")
        axes.grid(color=_GRID, linewidth=0.6, axis="x" if height_in < 3 else "both")
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0)  # the grid marks the places
        try:
            yield axes, lambda: _svg(figure, title)
        finally:
            pyplot.close(figure)


def _legend(axes: Any, columns: int) -> None:
    """Put the legend below the axes, where it covers nothing."""
    axes.figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=9)


def _svg(figure: Any, title: str) -> str:
    """Return the figure as an element of a page: without header, named for screen readers, scaled to its
    column.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'font-family: [^;"]*;? ?', "", text)  # the page's
    text = re.sub(r"<[^>]*>", _shorten, text)
    text = re.sub(r"(?<=\n) +", "", text)
    text = text.replace(INK, "currentColor").replace(_GRID, "var(--grid)").replace(_PAPER, "var(--paper)")
    for number, series in enumerate(_SERIES):
        text = text.replace(series, f"var(--c{number})")
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _shorten(tag: re.Match[str]) -> str:
    """Shorten a tag: a hundredth of a point is enough, no label is rotated by 0, nothing refers to groups."""
    text = re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), tag[0])
    return re.sub(r' transform="rotate\(-0 [^)]*\)"|(?<=<g) id="[^"]*"', "", text)
