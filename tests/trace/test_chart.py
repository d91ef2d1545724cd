"""Charts of steps: drawn if matplotlib is installed; otherwise the error names the extra to install."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hvpipe.errors import HvpipeError
from hvpipe.forecast.simulate import StageTimes, simulate
from hvpipe.plan.pipelining import Pipelining
from hvpipe.schedule.schedule import make_schedule
from hvpipe.search.choice import choose
from hvpipe.specs.cluster import Link, equal_cluster
from hvpipe.trace.chart import draw_timeline
from hvpipe.trace.events import Trace
from model_graphs import chain


def colours_in(path: Path) -> set[tuple[int, ...]]:
    image = pytest.importorskip("matplotlib.image")
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int)
    return {tuple(pixel) for pixel in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}


def test_a_chart_has_every_kind_of_action(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    costs = [StageTimes(1, 2, 1, {1: 0.5}), StageTimes(1, 2, 1)]
    draw_timeline(simulate(make_schedule("zb-h1", 2, 4), costs).trace, tmp_path / "step.png", "two stages")
    found = colours_in(tmp_path / "step.png")
    forward, backward, inputs, weights = (72, 120, 168), (106, 165, 106), (111, 183, 183), (217, 180, 91)
    assert {forward, inputs, weights, (155, 139, 180)} <= found
    assert backward not in found


def test_a_data_parallel_step(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cluster = equal_cluster(2, Link(0, 5.0))
    one = choose(chain(3, 3, weight_bytes=1), cluster, Pipelining("1f1b", 4))
    draw_timeline(one.trace, tmp_path / "step.png", "data parallel")
    assert {(72, 120, 168), (106, 165, 106), (192, 108, 91)} <= colours_in(tmp_path / "step.png")


def test_a_step_that_takes_no_time(tmp_path: Path) -> None:
    """Regression: it counted as a trace without events."""
    pytest.importorskip("matplotlib")
    trace = simulate(make_schedule("1f1b", 2, 2), [StageTimes(0, 0)] * 2).trace
    draw_timeline(trace, tmp_path / "step.png", "nothing to do")
    assert colours_in(tmp_path / "step.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trace = simulate(make_schedule("1f1b", 1, 1), [StageTimes(1, 1)]).trace
    with pytest.raises(HvpipeError, match=r"pip install 'hvpipe\[plot\]'"):
        draw_timeline(trace, tmp_path / "step.png", "")


def test_a_trace_without_events_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(HvpipeError, match=r"^The trace is empty"):
        draw_timeline(Trace(), tmp_path / "step.png", "")
    trace = simulate(make_schedule("1f1b", 1, 1), [StageTimes(1, 1)]).trace
    with pytest.raises(HvpipeError, match="a file that can be written"):
        draw_timeline(trace, tmp_path / "absent" / "step.png", "")
