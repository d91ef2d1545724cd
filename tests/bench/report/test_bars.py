"""The picture of the steps: which bars there are, and what cannot be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.report import bars
from bench_rounds import case, finished, outcome

pytest.importorskip("matplotlib")


def test_a_bar_for_each_system_in_steps_of_computing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"single": 0.5, "torch-ddp-alone": 1.0, "torch-ddp": 1.5, "tf-ps": 0.1, "hvpipe-step": 0.75}
    figures = []
    drawn = bars._drawn
    monkeypatch.setattr(bars, "_drawn", lambda groups: figures.append(drawn(groups)) or figures[-1])
    bars.draw(outcome(*(finished(case(name), s) for name, s in times.items())), tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([3.0, 1.5])
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([2.0, 1.0, 1.0])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["ResNet-50\n8 a rank, two hosts, 1 Gb/s"]


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="needs steps of single"):
        bars.draw(outcome(finished(case("hvpipe-step"), 1.0)), tmp_path / "steps.png")
    steps = outcome(finished(case("single"), 1.0), finished(case("hvpipe-step"), 1.0))
    for name in ("steps.txt", "missing/steps.png"):
        with pytest.raises(BenchError, match=r"should go to a \.svg or \.png file"):
            bars.draw(steps, tmp_path / name)
