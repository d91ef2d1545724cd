"""bench.planning: its cases and figures by hand, a small run, a JSON round trip, the plot."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.planning.command import all_cases, equal_links, main, measured_links, planning_time_s
from bench.planning.report import PlanningCase, PlanningReport, Result
from hvpipe.specs.cluster import Cluster


def result(of_exact: float, speedup: float | None, limits: str = "equal") -> Result:
    return Result(PlanningCase("m", 4, limits, 1e9), of_exact, 1.0, 1.0, speedup)


def test_all_cases() -> None:
    cases = list(all_cases(["a", "b"], [4, 8]))
    assert len(cases) == len(set(cases)) == 2 * 2 * 4 * 2
    assert cases[0] == PlanningCase("a", 4, "equal", 1e9)


def test_figures_by_hand() -> None:
    report = PlanningReport(
        8, 100, (result(1.0, 2.0), result(1.21, 8.0), result(1.0, None, "short")), {"x": 2.0}
    )
    figures = report.summary()
    assert figures["greedy_of_exact_worst"] == 1.21
    assert figures["greedy_of_exact_geometric_mean"] == pytest.approx(1.21 ** (1 / 3))
    assert figures["cases_with_a_random_placement_that_fits"] == 2
    assert (figures["greedy_over_random_least"], figures["greedy_over_random_geometric_mean"]) == (2.0, 4.0)
    assert figures["planning_s, x"] == 2.0
    assert math.isnan(report.results[2].speedup)
    lines = report.to_text().splitlines()
    assert lines[2].split() == ["m", "equal", "2", "1.2100", "1.1000", "2.00x", "4.00x"]
    assert lines[3].split() == ["m", "short", "1", "1.0000", "1.0000", "none", "fits"]
    assert PlanningReport.from_json(report.to_json()) == report


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "planning.json"
    arguments = ["--models", "alexnet", "--devices", "3", "--draws", "3", "--only", "quality"]
    assert main([*arguments, "--json", str(target)]) == 0
    assert "greedy_of_exact_worst" in capsys.readouterr().out
    report = PlanningReport.from_json(target.read_text())
    assert len(report.results) == 8
    assert all(1 - 1e-9 <= one.of_exact <= 1.05 for one in report.results)
    # Scarce memory never improves a plan.
    by_case = {(one.case.limits, one.case.bits_per_s): one for one in report.results}
    for rate in (1e9, 10e9):
        scarce = by_case["equal, short of memory", rate].exact_bottleneck_s
        assert scarce >= by_case["equal", rate].exact_bottleneck_s * (1 - 1e-9)


@pytest.mark.parametrize("cluster_of", [equal_links, measured_links])
def test_planning_is_timed(cluster_of: Callable[[int], Cluster]) -> None:
    assert 0 < planning_time_s(40, cluster_of(3)) < 60


def test_measured_links_all_differ() -> None:
    cluster = measured_links(8)
    assert len({device.speed for device in cluster.devices}) == 8
    assert len({link for _, _, link in cluster.measured}) == 8 * 7 // 2


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    PlanningReport(8, 100, (result(1.0, 2.0), result(1.21, None, "short")), {}).plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
