"""What each mode would gain: the forecast's arithmetic, the advice, and cases without enough figures."""

from __future__ import annotations

import pytest

from bench.report.figures import CaseFigures, all_figures
from bench.report.modes import advised, describe, forecasts, of_groups
from bench_rounds import case, finished, outcome


def rows(alone_s: float, links_s: float) -> list[CaseFigures]:
    """Return a group that computes for alone_s and whose gradients take links_s on 1 Gb/s."""
    gradients = round(links_s * 1e9 / 8)
    alone = finished(case("single"), alone_s, gradient_bytes=gradients)
    return all_figures(outcome(alone, finished(case("hvpipe-step"), 1.5 * links_s)))


def test_each_mode_hides_what_it_can() -> None:
    found = {each.system: each for each in forecasts(rows(0.4, 0.8))}
    best_s = {name: each.at_best_s for name, each in found.items()}
    assert best_s == pytest.approx(
        {
            "hvpipe-none": 1.2,
            "hvpipe-step": 0.8,
            "hvpipe-bf16": 0.4,
            "hvpipe-int8": 0.4,
            "hvpipe-local": 0.4,
        }
    )
    assert found["hvpipe-step"].measured_s == pytest.approx(1.2)
    assert found["hvpipe-none"].measured_s is None
    shown = describe(of_groups(rows(0.4, 0.8)))
    assert "1.50x" in shown  # measured over at best
    assert 'Use overlap="step": at best 1.50x as fast as no overlap. Links are the limit' in shown
    assert "hvpipe-bf16 2.00x" in shown


def test_less_is_sent_only_where_links_are_the_limit() -> None:
    assert advised(forecasts(rows(0.8, 0.4))).endswith("computing takes longer than the links.")


def test_without_computing_alone_there_is_no_forecast() -> None:
    found = all_figures(outcome(finished(case("hvpipe-step"), 1.0)))
    assert forecasts(found) == []
    assert of_groups(found) == {}
