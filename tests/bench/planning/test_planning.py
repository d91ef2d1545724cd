"""bench.planning: its cases and figures by hand, a small run."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest

from bench.planning import __main__ as planning
from bench.planning.__main__ import Case, Result, all_cases, summary


def result(of_exact: float, speedup: float | None, limits: str = "equal") -> Result:
    return Result(Case("m", 4, limits, 1e9), of_exact, 1.0, 1.0, speedup)


def test_all_cases() -> None:
    cases = list(all_cases(["a", "b"], [4, 8]))
    assert len(cases) == len(set(cases)) == 2 * 2 * 4 * 2
    assert cases[0] == Case("a", 4, "equal", 1e9)


def test_figures_by_hand() -> None:
    figures = summary([result(1.0, 2.0), result(1.21, 8.0), result(1.0, None, "short")])
    assert figures["greedy_of_exact_worst"] == 1.21
    assert figures["greedy_of_exact_geometric_mean"] == pytest.approx(1.21 ** (1 / 3))
    assert figures["cases_with_a_random_placement_that_fits"] == 2
    assert (figures["greedy_over_random_least"], figures["greedy_over_random_geometric_mean"]) == (2.0, 4.0)
    none_fits = summary([result(1.0, None)])
    assert math.isnan(none_fits["greedy_over_random_geometric_mean"])


def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "planning.json"
    monkeypatch.setattr(planning, "all_cases", lambda *_: all_cases(["alexnet"], [3]))
    monkeypatch.setattr(planning, "measure", partial(planning.measure, draws=3))
    assert planning.main(["--json", str(target)]) == 0
    assert "greedy_of_exact_worst" in capsys.readouterr().out
    _, *results = map(json.loads, target.read_text().splitlines())
    assert len(results) == 8
    for one in results:
        assert 1 - 1e-9 <= one["greedy_bottleneck_s"] / one["exact_bottleneck_s"] <= 1.05
    # Scarce memory never improves a plan.
    exact_s = {
        (one["case"]["limits"], one["case"]["bits_per_s"]): one["exact_bottleneck_s"] for one in results
    }
    for rate in (1e9, 10e9):
        assert exact_s["equal, short of memory", rate] >= exact_s["equal", rate] * (1 - 1e-9)
