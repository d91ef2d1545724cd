"""Figures of an evaluation: by hand, and properties that hold for any rounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.hosts.links import LinkFacts
from bench.report.comparisons import NATIVE, Comparison, Comparisons, compare_in_groups
from bench.report.figures import CaseFigures, all_figures, by_group, disturbed, fastest, pays, steps_noise
from bench.report.text import to_text
from bench.rounds.record import Round, Task
from bench.systems import SYSTEMS
from bench_rounds import CLUSTER, TASK, case, finished, outcome, rank

STEPS = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


def row(system: str, rows: list[CaseFigures]) -> CaseFigures:
    (found,) = [each for each in rows if each.case.system == system]
    return found


def test_a_step_is_the_median_of_the_slowest_rank() -> None:
    two = Round(case("tf-mwms"), 0, (rank([1.0, 1.0, 2.0, 9.0]), rank([1.0, 2.0, 3.0, 4.0])))
    (found,) = all_figures(outcome(two))
    assert found.step_s == 3.0
    assert found.samples_per_s == pytest.approx(16 / 3)
    assert found.wall_s == 3.25  # the mean of the first rank
    assert (found.efficiency, found.bound_s, found.over_bound) == (None, None, None)


@pytest.mark.parametrize("system", ["single", "tf-mwms", "horovod", "hvpipe-step"])
def test_the_first_step_of_a_round_is_left_out_for_every_system(system: str) -> None:
    # In mode "step" the first step has nothing to collect. Two rounds of three steps each start that way.
    short = [finished(case(system), 0.1, 1.0, 1.0, number=number) for number in (0, 1)]
    whole = [finished(case(system), 1.0, 1.0, 1.0, number=number) for number in (0, 1)]
    (found,) = all_figures(outcome(*short))
    (other,) = all_figures(outcome(*whole))
    assert (found.step_s, found.noise) == (other.step_s, other.noise)
    assert found.step_s == 1.0


def test_all_steps_count_for_epochs_and_if_there_are_few() -> None:
    assert finished(case("single"), 0.1, 1.0, 2.0).counted(0) == [1.0, 2.0]
    assert finished(case("single"), 0.1, 1.0).counted(0) == [0.1, 1.0]
    epochs = case("single", task=replace(TASK, epochs=2))
    assert finished(epochs, 0.1, 1.0, 2.0).counted(0) == [0.1, 1.0, 2.0]


def test_efficiency_and_the_bound() -> None:
    rows = all_figures(outcome(finished(case("single"), 0.6), finished(case("hvpipe-step"), 1.2)))
    found = row("hvpipe-step", rows)
    assert found.efficiency == pytest.approx(0.5)
    # 95.2 MB between two hosts at 1 Gb/s take 0.7616 s, more than computing.
    assert found.bound_s == pytest.approx(0.7616)
    assert found.over_bound == pytest.approx(1.2 / 0.7616)
    alone_here = replace(CLUSTER, hosts=1, slowest_bits_per_s=None)
    rows = all_figures(
        outcome(finished(case("single"), 0.6), finished(case("tf-ps"), 1.2), clusters=(alone_here,))
    )
    assert row("tf-ps", rows).bound_s == 0.6


def test_the_step_beside_plain_tcp_is_the_bound_where_it_was_measured() -> None:
    rounds = [finished(case(name), s) for name, s in (("single", 0.6), ("hvpipe-step", 1.2))]
    found = outcome(*rounds, finished(case("single-beside-tcp"), 0.8))
    assert row("hvpipe-step", all_figures(found)).over_bound == pytest.approx(1.5)
    assert "hvpipe-step over its bound: 1.50x, the geometric mean of 1 case\n" in to_text(found)


def test_links_without_a_set_rate_bound_at_the_measured_rate() -> None:
    cluster = replace(CLUSTER, hosts=3, slowest_bits_per_s=None)
    fast, slow = (LinkFacts("2x1gbit", "a", end, None, rate) for end, rate in (("b", 2e9), ("c", 5e8)))
    rounds = (finished(case("single"), 0.6), finished(case("hvpipe-step"), 4.0))
    found = row("hvpipe-step", all_figures(outcome(*rounds, clusters=(cluster,), links=(fast, slow))))
    # 2 (3 - 1) / 3 x 95.2 MB at 500 Mb/s.
    assert found.bound_s == pytest.approx(4 / 3 * 95.2e6 * 8 / 5e8)
    unknown = replace(slow, two_way_bits_per_s=None)
    for links in ((), (fast, unknown)):
        found = row("hvpipe-step", all_figures(outcome(*rounds, clusters=(cluster,), links=links)))
        assert (found.bound_s, found.over_bound) == (None, None)


def test_without_gradient_bytes_limited_links_have_no_bound() -> None:
    rounds = (
        finished(case("single"), 0.6, gradient_bytes=0),
        finished(case("tf-ps"), 1.2, gradient_bytes=0),
    )
    assert row("tf-ps", all_figures(outcome(*rounds))).bound_s is None


def test_rounds_are_combined_and_failed_ones_left_out() -> None:
    of = case("horovod")
    rounds = (finished(of, 1.0, 2.0), finished(of, 3.0, 4.0, number=1), Round(of, 2, error="crashed"))
    (found,) = all_figures(outcome(*rounds))
    assert (found.step_s, found.rounds) == (2.5, 2)
    # The medians of the rounds are 1.5 and 3.5: half their distance over 2.5.
    assert found.noise == pytest.approx(0.4)
    assert (
        all_figures(outcome(Round(of, 0, error="crashed"), Round(case("tf-ps"), 0, skipped="absent"))) == []
    )


def test_means_are_as_defined() -> None:
    # 1.5x is 33 % less time, 4x is 75 % less.
    found = Comparisons("a", "b", "all", (Comparison("g", "b", 1.0), Comparison("h", "b", 4.0)))
    assert found.reduction == pytest.approx(0.375)  # of 0 and 0.75
    assert found.speedup == pytest.approx(2.0)  # sqrt(1 x 4)
    assert found.cells()[3:] == ["2.00x", "38% less", "2: 2 of one round", "1.00x, one round"]
    lost = Comparisons("a", "b", "all", (Comparison("g", "b", 0.96), Comparison("h", "b", 0.5)))
    assert lost.cells()[-1] == "0.96x, one round in g; 0.50x, one round in h"


def test_a_system_is_compared_with_the_fastest_baseline() -> None:
    rounds = [finished(case(name), s) for name, s in (("tf-ps", 6.0), ("tf-mwms", 3.0), ("hvpipe-step", 2.0))]
    rows = all_figures(outcome(*rounds))
    (found,) = compare_in_groups(rows, "hvpipe-step", ("tf-ps", "tf-mwms"))
    assert (found.baseline, found.speedup) == ("tf-mwms", 1.5)
    assert compare_in_groups(rows, "hvpipe-step", ("horovod",)) == []
    assert compare_in_groups(rows, "absent", ("tf-ps",)) == []


def test_native_lists_every_tensorflow_system() -> None:
    assert set(NATIVE) == {name for name in SYSTEMS if name.startswith("tf-")}


def test_uneven_steps_and_their_rivals_are_compared_by_mean() -> None:
    def took(system: str, steps: list[float], wall_s: float) -> Round:
        return Round(case(system), 0, (replace(rank(steps), wall_s=wall_s),) * 2)

    bursts = took("tf-ps", [0.0, 0.0, 6.0], 2.1)
    ours = took("hvpipe-step", [0.9, 1.0, 1.0, 1.3], 1.4)
    linear = took("tf-mwms", [3.0, 3.0, 3.0], 3.0)
    rows = all_figures(outcome(bursts, ours, linear))
    assert {row.case.system: row.step_s for row in rows} == {
        "tf-ps": 2.1,
        "hvpipe-step": 1.0,
        "tf-mwms": 3.0,
    }
    assert rows[0].noise == pytest.approx(math.sqrt(8) / 2 / math.sqrt(3))  # pstdev 2.83 at a mean of 2
    (found,) = compare_in_groups(rows, "hvpipe-step", ("tf-ps", "tf-mwms"))
    assert (found.baseline, found.speedup) == ("tf-ps", pytest.approx(2.1 / 1.4))


def test_efficiency_is_against_the_same_library_computing_alone() -> None:
    times = (("single", 0.5), ("single-beside-tcp", 0.9), ("torch-ddp-alone", 0.9), ("torch-ddp", 1.2))
    rows = all_figures(outcome(*(finished(case(name), s) for name, s in times)))
    found = row("torch-ddp", rows)
    assert found.efficiency == pytest.approx(0.9 / 1.2)
    assert found.over_bound == pytest.approx(1.2 / 0.9)
    rows = all_figures(outcome(*(finished(case(name), s) for name, s in times if "-alone" not in name)))
    assert row("torch-ddp", rows).efficiency is None
    assert fastest(rows) == row("torch-ddp", rows)


def test_efficiency_of_uneven_steps_uses_means() -> None:
    def took(system: str, steps: list[float], wall_s: float) -> Round:
        return Round(case(system), 0, (replace(rank(steps), wall_s=wall_s),) * 2)

    alone, bursts = took("single", [1.0, 1.0, 1.0, 2.2], 1.3), took("tf-ps", [0.0, 0.0, 7.8], 2.6)
    rows = all_figures(outcome(alone, bursts, took("horovod", [2.0, 2.0, 2.0], 2.0)))
    assert row("tf-ps", rows).efficiency == 0.5
    assert row("horovod", rows).efficiency == 0.5


def test_the_fastest_system_must_train_the_same() -> None:
    times = (("single", 0.5), ("tf-ps", 0.9), ("hvpipe-stale", 0.8), ("hvpipe-step", 1.0), ("horovod", 1.1))
    rows = all_figures(outcome(*(finished(case(name), s) for name, s in times)))
    found = fastest(rows)
    assert found is not None
    assert found.case.system == "hvpipe-step"
    others = ("single", "tf-ps", "hvpipe-stale")
    assert fastest([row for row in rows if row.case.system in others]) is None


def test_trainings_by_epochs_are_not_compared_by_their_steps() -> None:
    task = Task("digits", 8, epochs=3)
    rounds = [finished(case(name, task=task), 1.0) for name in ("tf-ps", "hvpipe-step")]
    assert compare_in_groups(all_figures(outcome(*rounds)), "hvpipe-step", ("tf-ps",)) == []


def test_a_cluster_pays_if_an_exact_system_beats_one_host() -> None:
    def members(single: float, ours: float) -> list[CaseFigures]:
        steps = (("single", single), ("tf-ps", 0.1), ("hvpipe-step", ours))
        return all_figures(outcome(*(finished(case(name), s) for name, s in steps)))

    assert pays(members(1.0, 1.9)) is True
    assert pays(members(1.0, 2.1)) is False
    assert pays([row for row in members(1.0, 1.9) if row.case.system != "single"]) is True
    assert pays(all_figures(outcome(finished(case("hvpipe-step"), 1.0)))) is None


def test_the_interval_is_students_over_paired_rounds() -> None:
    mine = [finished(case("hvpipe-step"), s, number=n) for n, s in enumerate((1.0, 2.0, 4.0))]
    theirs = [finished(case("horovod"), s, number=n) for n, s in enumerate((1.1, 2.42, 4.4, 9.0))]
    (found,) = compare_in_groups(all_figures(outcome(*mine, *theirs)), "hvpipe-step", ("horovod",))
    assert found.ratios == pytest.approx((1.1, 1.21, 1.1))
    assert found.speedup == pytest.approx(1.1 ** (4 / 3))
    # Logarithms in units of ln 1.1: 1, 2, 1. Their standard error is 1/3; t of 2 degrees is 4.303.
    assert found.interval == pytest.approx(
        [1.1 ** (4 / 3 - 4.3027 / 3), 1.1 ** (4 / 3 + 4.3027 / 3)], rel=1e-4
    )
    assert found.verdict == "tie"
    single = Comparisons("a", "b", "all", (found, Comparison("h", "b", 1.0, (1.0,))))
    assert single.interval is None
    # A second case without noise halves the error, and keeps the degrees of freedom.
    both = Comparisons("a", "b", "all", (found, Comparison("h", "b", 1.0, (1.0, 1.0, 1.0))))
    assert both.interval == pytest.approx(
        [1.1 ** (2 / 3 - 4.3027 / 6), 1.1 ** (2 / 3 + 4.3027 / 6)], rel=1e-4
    )


@given(st.lists(STEPS, min_size=1, max_size=4), st.floats(0.1, 10))
def test_noise_does_not_depend_on_the_unit(rounds: list[list[float]], factor: float) -> None:
    noise = steps_noise(rounds)
    assert noise >= 0
    assert steps_noise([[factor * s for s in each] for each in rounds]) == pytest.approx(noise)


@given(st.floats(0.01, 100), st.integers(1, 4), st.integers(1, 8))
def test_equal_steps_have_no_noise(step_s: float, rounds: int, steps: int) -> None:
    assert steps_noise([[step_s] * steps] * rounds) == 0


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=10))
def test_means_lie_between_the_extremes(speedups: list[float]) -> None:
    each = tuple(Comparison(str(i), "b", s) for i, s in enumerate(speedups))
    found = Comparisons("a", "b", "all", each)
    assert min(speedups) * 0.999 <= found.speedup <= max(speedups) * 1.001
    assert 1 - 1 / min(speedups) - 1e-9 <= found.reduction <= 1 - 1 / max(speedups) + 1e-9
    # By Jensen's inequality, the speedup from the mean reduction is at most the geometric mean.
    assert 1 / (1 - found.reduction) <= found.speedup * 1.001


@given(st.lists(st.tuples(st.sampled_from("abc"), STEPS), min_size=1, max_size=8))
def test_every_case_with_figures_has_one_row(parts: list[tuple[str, list[float]]]) -> None:
    rounds = [finished(case(name), *steps, number=i) for i, (name, steps) in enumerate(parts)]
    rows = all_figures(outcome(*rounds))
    assert sorted(each.case.system for each in rows) == sorted({name for name, _ in parts})
    assert sum(each.rounds for each in rows) == len(parts)
    for each in rows:
        steps = [s for name, found in parts if name == each.case.system for s in found]
        assert min(steps) <= each.step_s <= max(steps)
    assert list(by_group(rows)) == ["resnet50-64/8/2x1gbit-2/weak"]


@pytest.mark.parametrize(("cores", "named"), [(0.9, False), (0.8, False), (0.7, True)])
def test_rounds_beside_other_work_are_named(cores: float, named: bool) -> None:
    """Both cores of the machine are busy in all samples, each of the two ranks with `cores` of them."""
    found = outcome(finished(case("hvpipe-step"), 1.0, host_share=1.0, cpu_share=cores))
    plan = {"groups": [{"cluster": "2x1gbit", "spec": {"hosts": []}}]}
    found = replace(found, setting=replace(found.setting, plan=plan))
    assert bool(disturbed(found)) is named
    on_real_hosts = {"groups": [{"cluster": "2x1gbit", "spec": None}]}
    assert disturbed(replace(found, setting=replace(found.setting, plan=on_real_hosts))) == []
