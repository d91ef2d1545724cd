"""Comparing two evaluations: changes beyond noise are found, others are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.evaluation.outcome import ClusterFacts, EvaluationOutcome
from bench.report.compare import compare
from bench.rounds.record import Round
from bench_rounds import MACHINE, TASK, case, finished, outcome

QUIET = (1.0, 1.0, 1.0, 1.0)
LOUD = (0.6, 0.8, 1.0, 1.2, 1.4)


def verdict(before: tuple[float, ...], after: tuple[float, ...]) -> str:
    of = case("hvpipe-step")
    (change,) = compare(outcome(finished(of, *before)), outcome(finished(of, *after))).changes
    return change.verdict


@pytest.mark.parametrize(
    ("factor", "quiet", "loud"),
    [
        *[(1.0, "the same", "the same"), (1.04, "the same", "the same"), (1.2, "slower", "the same")],
        *[(0.8, "faster", "the same"), (3.0, "slower", "slower"), (0.3, "faster", "faster")],
    ],
)
def test_a_change_counts_beyond_the_noise(factor: float, quiet: str, loud: str) -> None:
    assert verdict(QUIET, tuple(factor * s for s in QUIET)) == quiet
    assert verdict(LOUD, tuple(factor * s for s in LOUD)) == loud


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8), st.lists(st.floats(0.1, 10), min_size=2))
def test_swapping_before_and_after_swaps_the_verdict(before: list[float], after: list[float]) -> None:
    opposite = {"slower": "faster", "faster": "slower", "the same": "the same"}
    assert verdict(tuple(after), tuple(before)) == opposite[verdict(tuple(before), tuple(after))]


def between_rounds(*factors: float) -> tuple[Round, ...]:
    """Make one case for each factor; its second round takes `factor` times as long as the first."""
    cases = [case("hvpipe-step", task=replace(TASK, batch=100 + index)) for index in range(len(factors))]
    first = [finished(of, *QUIET) for of in cases]
    return (*first, *(finished(of, f, f, number=1) for of, f in zip(cases, factors, strict=True)))


def test_a_single_round_has_the_noise_between_rounds() -> None:
    # A ratio of 1.14 occurred between two rounds of the same software, whose steps each scatter by 1 %.
    of = case("tf-mwms")
    assert verdict((1.0, 1.01, 0.99), (1.13, 1.14, 1.12)) == "the same"
    before, after = (outcome(finished(of, s), *between_rounds(1.1, 0.9, 1.1, 0.9)) for s in (1.0, 1.25))
    found = compare(before, after)
    assert found.changes[0].verdict == "the same"
    # Rounds that differ by factors of 1.1 and 0.9 have standard deviations of 6.7 % and 7.5 %.
    assert found.between_rounds == pytest.approx(0.071, abs=1e-3)
    assert "one round before or after: 1 cases; their noise is that between rounds, 7.1%" in found.to_text()
    quiet = between_rounds(1.001, 0.999, 1.001, 0.999)
    before, after = (outcome(finished(of, s), *quiet) for s in (1.0, 1.06))
    assert compare(before, after).changes[0].verdict == "slower"


def test_the_allowed_change_grows_with_the_number_of_cases() -> None:
    def evaluated(first_s: float, cases: int) -> EvaluationOutcome:
        tasks = [replace(TASK, batch=8 + index) for index in range(cases)]
        steps_s = [first_s] + [1.0] * (cases - 1)
        pairs = zip(tasks, steps_s, strict=True)
        return outcome(*(finished(case("single", task=task), step_s) for task, step_s in pairs))

    # With noise of 5 % between rounds, before and after: 1.96 x 7.07 % = 13.9 % for one case,
    # 3.04 x 7.07 % = 21.5 % for 21 cases.
    assert compare(evaluated(1.0, 1), evaluated(1.2, 1)).regressed
    assert not compare(evaluated(1.0, 21), evaluated(1.2, 21)).regressed
    assert compare(evaluated(1.0, 21), evaluated(1.3, 21)).regressed


def test_a_failed_case_is_a_regression_but_a_new_or_missing_one_is_not() -> None:
    one, two = finished(case("tf-ps"), *QUIET), finished(case("hvpipe-step"), *QUIET)
    both = outcome(one, two)
    failed = compare(both, outcome(one, Round(case("hvpipe-step"), 0, error="first\nSegmentation fault")))
    assert failed.regressed
    assert "hvpipe-step: failed, Segmentation fault" in failed.to_text()
    again = Round(case("hvpipe-step"), 1, error="a crash in the second round")
    assert compare(both, outcome(one, two, again)).regressed
    assert not compare(outcome(one, two, again), outcome(one, two, again)).regressed
    for after in (outcome(one), outcome(one, Round(case("hvpipe-step"), 0, skipped="it is not installed"))):
        found = compare(both, after)
        assert not found.regressed
        assert found.changes[1].verdict == "not run"
    assert "hvpipe-step: skipped, it is not installed" in found.to_text()
    new = compare(outcome(one), both)
    assert not new.regressed
    assert new.to_json()["changes"][1]["verdict"] == "new"


def test_different_software_is_named() -> None:
    plain = outcome(finished(case("hvpipe-step"), *QUIET))
    old, new = (
        replace(plain, setting=replace(plain.setting, software={"keras": version, "commit": "abc"}))
        for version in ("3.14", "3.15")
    )
    assert "Other software: keras 3.14 (now 3.15)\n" in compare(old, new).to_text()
    assert "Other software" not in compare(old, old).to_text()


@pytest.mark.parametrize("other", [{"threads": 4}, {"steps": 20}, {"warm_up": 9}, {"seed": 1}], ids=str)
def test_a_different_task_is_no_regression(other: dict[str, int]) -> None:
    before = finished(case("hvpipe-step"), *QUIET)
    after = finished(case("hvpipe-step", task=replace(TASK, **other)), 9.0, 9.0)  # type: ignore[arg-type]
    found = compare(outcome(before), outcome(after))
    assert [(change.verdict, change.ratio) for change in found.changes] == [("another task", None)]
    assert not found.regressed
    assert found.to_text().endswith("1 another task")


def test_the_text_lists_the_changes() -> None:
    of = case("hvpipe-step")
    slower = compare(outcome(finished(of, *QUIET)), outcome(finished(of, 2.0, 2.0)))
    assert slower.regressed
    text = slower.to_text()
    assert "resnet50-64/8/2x1gbit-2/weak/hvpipe-step" in text
    assert "2.000" in text
    assert text.endswith("1 slower")
    assert "different machines" not in text


def test_different_machines_are_mentioned() -> None:
    one = outcome(finished(case("tf-ps"), *QUIET))
    other = replace(one, setting=replace(one.setting, machine=replace(MACHINE, cores=64)))
    assert not compare(one, other).same_machine
    assert compare(one, other).to_text().startswith("Measured on different machines")
    hosts = [outcome(clusters=(ClusterFacts("hosts", f"hosts {name}", 2),)) for name in "ab"]
    assert not compare(*hosts).same_machine
    assert compare(hosts[0], hosts[0]).same_machine
