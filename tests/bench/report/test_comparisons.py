"""The report, cautions and README's tables: complete, with the right numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.evaluation.outcome import ClusterFacts, EvaluationOutcome
from bench.evaluation.suite import Group, Suite
from bench.hosts.links import LinkFacts
from bench.report.comparisons import Comparisons, comparisons
from bench.report.figures import all_figures, cautions, not_measured
from bench.report.readme import BEGIN, END, comparison, rewrite
from bench.report.text import to_json, to_text
from bench.rounds.record import Round, Task
from bench_rounds import CLUSTER, TASK, case, finished, outcome

FOUR = ClusterFacts("4x1gbit", "4 hosts", 4, 1e9)
LINK = LinkFacts("2x1gbit", "h0", "h1", 1e9, 9.4e8)


def everything() -> EvaluationOutcome:
    digits = Task("digits", 32, 8, epochs=2)
    curves = {"loss": [2.0, 1.0], "accuracy": [0.5, 0.875]}
    rounds = (
        finished(case("single"), 1.0),
        finished(case("tf-mwms"), 3.0),
        finished(case("hvpipe-step"), 2.0, sent_bytes=95_000_000),
        Round(case("horovod"), 0, error="no such symbol\nlast line"),
        Round(case("tf-ps"), 0, skipped="not installed"),
        finished(case("single", "4x1gbit", 4), 1.0),
        finished(case("hvpipe-step", "4x1gbit", 4), 2.5),
        finished(case("hvpipe-none", task=digits), 0.1, **curves),
        finished(case("hvpipe-step", task=digits), 0.1, **curves),
        finished(case("tf-mwms", task=digits), 0.1, **{**curves, "loss": [2.0, 1.00002]}),
    )
    found = outcome(*rounds, clusters=(CLUSTER, FOUR), links=(LINK,))
    return replace(found, setting=replace(found.setting, notes=("plain loopback",)))


def test_the_text_has_every_figure_of_every_case() -> None:
    text = to_text(everything())
    for figure in ("3 s", "5.33", "50%", "40%", "1 s", "87.5%", "95.0 MB", "two-way 940mbit"):
        assert f" {figure}" in text, figure
    assert "0.90 / 0.90" in text  # cores by rank
    assert "2 hosts: h0 1gbit, h1 1gbit; batch 8 a rank, 1 thread an operation, 1 round of 3 + 8" in text
    assert "single: TensorFlow 2.18.1\n" in text
    assert text.startswith(
        "Quick: 2026-11-21, 2 cores (A CPU), 4 GB, Linux 6.1, Python 3.11.2, hvpipe 0.1.0\nplain"
    )


def compared(found: EvaluationOutcome) -> list[Comparisons]:
    return comparisons(found, all_figures(found))


def test_means_say_how_they_are_formed() -> None:
    found = everything()
    (native, synchronous) = compared(found)
    assert native.cells() == [
        *("hvpipe-step", "best native TensorFlow", "one host is faster", "1.50x", "33% less"),
        *("1: 1 of one round", "1.50x, one round"),
    ]
    assert synchronous.cells()[1] == "best native TensorFlow that trains the same"
    assert "geometric means over the cases, reductions of time are arithmetic means" in comparison(found)
    # 2 hosts: 2 / 1. 4 hosts: 1.5 x 0.7616 s on the links is more than computing, so 2.5 / 1.1424.
    assert f"hvpipe-step over its bound: {(2 * 2.5 / 1.1424) ** 0.5:.2f}x, the geo" in to_text(found)


def test_the_speedup_is_given_case_by_case() -> None:
    # From 3 s to 2 s: 1.5x, a third less.
    of_native, _ = json.loads(to_json(everything()))["comparisons"]
    assert (of_native["speedup"], of_native["reduction"]) == (1.5, pytest.approx(1 / 3))
    (each,) = of_native["each"]
    assert (each["group"], each["baseline"]) == ("resnet50-64/8/2x1gbit-2/weak", "tf-mwms")
    assert each["ratios"] == [1.5]


def test_a_slower_step_is_more_time() -> None:
    rounds = [finished(case(name, "hosts"), s) for name, s in (("tf-mwms", 1.0), ("hvpipe-step", 1.25))]
    found = outcome(*rounds, clusters=(ClusterFacts("hosts", "hosts a:1, b:1", 2),))
    *_, speed, time, _, worst = compared(found)[0].cells()
    assert (speed, time) == ("0.80x", "25% more")
    assert worst == "0.80x, one round in resnet50-64/8/hosts-2/weak"


def test_cases_in_which_a_cluster_pays_are_apart() -> None:
    free = ClusterFacts("2xunlimited", "2 hosts, no limit", 2)
    times = {CLUSTER: (1.0, 4.0, 2.0), free: (1.0, 1.2, 1.5)}
    rounds = [
        finished(case(name, cluster.name), s, number=number)
        for cluster, steps in times.items()
        for name, s in zip(("single", "horovod-tuned", "hvpipe-step"), steps, strict=True)
        for number in range(2)
    ]
    found = outcome(*rounds, clusters=(CLUSTER, free))
    pays, does_not = (each.cells()[2:] for each in compared(found) if each.against == "Horovod, tuned")
    # Two hosts train 2 / 1.2 of one host's samples at best; then 2 / 2, which is not more.
    assert pays == [
        *("a cluster is faster", "0.80x (0.80 to 0.80)", "25% more", "1: 1 slower"),
        "0.80x (0.80 to 0.80) in resnet50-64/8/2xunlimited-2/weak",
    ]
    assert does_not[:3] == ["one host is faster", "2.00x (2.00 to 2.00)", "50% less"]


def test_a_link_that_is_not_as_set_is_marked() -> None:
    assert "NOT AS SET" not in LINK.describe()
    assert (
        replace(LINK, two_way_bits_per_s=1.58e9)
        .describe()
        .endswith("two-way 1.58gbit, NOT AS SET: results do not reflect the set rate")
    )


def _two_groups(*failed: Round) -> EvaluationOutcome:
    """Make groups of 8 and of 16 samples. Ours is twice as fast as `tf-mwms`; `tf-ps` is even slower."""
    rounds = [
        finished(case(name, task=replace(TASK, batch=batch)), step_s)
        for batch in (8, 16)
        for name, step_s in (("tf-ps", 4.0), ("tf-mwms", 2.0), ("hvpipe-step", 1.0))
    ]
    gone = {each.case.key for each in failed if each.number == 0}
    return outcome(*(each for each in rounds if each.case.key not in gone), *failed)


@pytest.mark.parametrize("number", [0, 1])  # the only round, or a round after one with figures
@pytest.mark.parametrize("system", ["hvpipe-step", "tf-mwms"])
def test_means_leave_out_the_cases_in_which_ours_or_a_native_system_failed(system: str, number: int) -> None:
    found = _two_groups(Round(case(system, task=replace(TASK, batch=16)), number, error="boom"))
    *_, speed, time, cases, _ = compared(found)[0].cells()
    assert (speed, time, cases) == ("2.00x", "50% less", "1: 1 of one round")
    assert [*cautions(found)][-1].endswith(f": resnet50-64/16/2x1gbit-2/weak/{system}.")
    cells = {"hvpipe-step": "4 s | **2 s** | failed", "tf-mwms": "4 s | failed | **1 s**"}[system]
    assert f"| resnet50, 64, 16 a rank, 2x1gbit | {cells} |" in comparison(found)


def test_rounds_missing_from_an_evaluation_are_counted() -> None:
    group = Group(TASK, "2x1gbit", 2, ("single", "tf-ps", "hvpipe-step"), rounds=2, once=("single",))
    plan = json.loads(json.dumps(asdict(Suite("quick", "Quick", (group,)))))
    setting = replace(outcome().setting, plan=plan)
    rounds = (finished(case("single"), 1.0), finished(case("hvpipe-step"), 2.0))
    found = EvaluationOutcome(setting, (*rounds, Round(case("tf-ps"), 0, skipped="not installed")))
    said = "2 of 5 planned rounds have figures. Others failed, were skipped or are to run."
    assert [*cautions(found)] == [said]
    for shown in (to_text(found), comparison(found)):
        assert said in " ".join(shown.split())
    more = [finished(case(name), 3.0, number=1) for name in ("tf-ps", "hvpipe-step")]
    whole = EvaluationOutcome(setting, (*rounds, finished(case("tf-ps"), 3.0), *more))
    assert [*cautions(whole)] == []


def test_a_case_measured_after_being_skipped_is_not_shown_as_skipped() -> None:
    skipped = Round(case("horovod"), 0, skipped="not installed")
    found = outcome(skipped, finished(case("horovod"), 1.0))
    assert not_measured(found) == {}
    assert "skipped" not in to_text(found)
    assert json.loads(to_json(outcome(skipped)))["not_measured"] == {
        "resnet50-64/8/2x1gbit-2/weak/horovod": "skipped, not installed"
    }


def test_readme_table_goes_between_the_comments(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nformer\n{END}\n\nThe end.\n")
    assert rewrite(readme, everything()) == "rewritten"
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n| system | against | ")
    assert text.endswith(f"|\n{END}\n\nThe end.\n")
    assert "| resnet50, 64, 8 a rank, 2x1gbit | 1 s | 3 s | **2 s** | failed | skipped |" in text
    assert "| resnet50, 64, 8 a rank, 4x1gbit | 1 s |  | **2.5 s** |  |  |" in text
    assert "\n\nplain loopback\n" in text
    assert "| digits" not in text
    assert "former" not in text
    assert rewrite(readme, everything()) == "as it was"


def test_readme_without_the_comments(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n")
    with pytest.raises(BenchError, match="should have the lines"):
        rewrite(readme, everything())
    with pytest.raises(BenchError, match="Received: "):
        rewrite(tmp_path / "absent.md", everything())
    readme.write_text(f"{BEGIN}\nformer\n{END}\n")
    with pytest.raises(BenchError, match="Received: none"):
        rewrite(readme, outcome(Round(case("tf-ps"), 0, skipped="not installed")))
    assert "former" in readme.read_text()
