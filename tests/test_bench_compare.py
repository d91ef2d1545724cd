"""Two evaluations compared: changes beyond noise are found, others are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.compare import compare
from bench.outcome import ClusterFacts
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
def test_forth_and_back_are_opposites(before: list[float], after: list[float]) -> None:
    opposite = {"slower": "faster", "faster": "slower", "the same": "the same"}
    assert verdict(tuple(after), tuple(before)) == opposite[verdict(tuple(before), tuple(after))]


def test_what_is_gone_is_a_regression_and_what_is_new_is_none() -> None:
    one, two = finished(case("tf-ps"), *QUIET), finished(case("hvpipe-step"), *QUIET)
    gone = compare(outcome(one, two), outcome(one))
    assert gone.regressed
    new = compare(outcome(one), outcome(one, two))
    assert not new.regressed
    assert new.to_json()["changes"][1]["verdict"] == "new"


@pytest.mark.parametrize("other", [{"threads": 4}, {"steps": 20}, {"warm_up": 9}, {"seed": 1}], ids=str)
def test_another_task_is_no_regression(other: dict[str, int]) -> None:
    before = finished(case("hvpipe-step"), *QUIET)
    after = finished(case("hvpipe-step", task=replace(TASK, **other)), 9.0, 9.0)  # type: ignore[arg-type]
    found = compare(outcome(before), outcome(after))
    assert [(change.verdict, change.ratio) for change in found.changes] == [("another task", None)]
    assert not found.regressed
    assert found.to_text().endswith("1 another task")


def test_the_text_says_what_changed() -> None:
    of = case("hvpipe-step")
    slower = compare(outcome(finished(of, *QUIET)), outcome(finished(of, 2.0, 2.0)))
    assert slower.regressed
    text = slower.to_text()
    assert "resnet50-64/8/2x1gbit-2/weak/hvpipe-step" in text
    assert "2.000" in text
    assert text.endswith("1 slower")
    assert "different machines" not in text


def test_different_machines_are_said_to_be() -> None:
    one = outcome(finished(case("tf-ps"), *QUIET))
    other = replace(one, setting=replace(one.setting, machine=replace(MACHINE, cores=64)))
    assert not compare(one, other).same_machine
    assert compare(one, other).to_text().startswith("Measured on different machines")
    hosts = [outcome(clusters=(ClusterFacts("hosts", f"hosts {name}", 2),)) for name in "ab"]
    assert not compare(*hosts).same_machine
    assert compare(hosts[0], hosts[0]).same_machine
