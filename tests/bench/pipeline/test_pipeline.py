"""bench.pipeline: its figures by hand, what it runs, its arguments."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from bench.hosts import rank_benchmark
from bench.hosts.hosts import ThisHost
from bench.pipeline import __main__ as pipeline
from bench.pipeline.report import MeasuredPlan, PipelineReport, summary


def report(
    greedy: tuple[float, float], *random: tuple[float, float], bound_s: float | None = None
) -> PipelineReport:
    """Make a report from pairs of measured and simulated steps."""
    cases = [
        MeasuredPlan("greedy", 2, [[step], [step / 2]], simulated, bound_s) for step, simulated in (greedy,)
    ]
    cases += [
        MeasuredPlan(f"random {seed}", 2, [[step], [step]], simulated)
        for seed, (step, simulated) in enumerate(random)
    ]
    return PipelineReport("m", "somewhere", "1f1b", 8, 2, 32, tuple(cases))


def test_figures_by_hand() -> None:
    text = summary(
        {
            "a": report((2.0, 2.0), (8.0, 4.0), bound_s=1.6),
            "b": report((3.0, 2.0), (1.0, 1.0), (9.0, 9.0), (6.0, 6.5)),
        }
    )
    rows = [line.split() for line in text.splitlines()]
    assert rows[1] == ["a", "8", "2", "s", "1.00", "1.25", "8", "s", "75%"]
    assert rows[2] == ["b", "8", "3", "s", "1.50", "6", "s", "50%"]
    assert "greedy plans within 10% of the simulation: 1 of 2" in text
    assert "all plans within 10% of the simulation: 4 of 6" in text
    assert "62% less time (arithmetic mean), 2.83x (geometric mean), worst 2.00x" in text


def test_other_placements_have_their_own_columns() -> None:
    whole = report((2.0, 2.0), (8.0, 4.0))
    even = MeasuredPlan("even", 2, [[3.0]], 4.0)
    greedy, random = whole.cases
    text = summary({"a": replace(whole, cases=(greedy, even, random)), "b": report((1.0, 1.0))})
    rows = [line.split() for line in text.splitlines()]
    assert rows[0][-4:] == ["even", "saved", "random", "saved"]
    assert rows[1] == ["a", "8", "2", "s", "1.00", "3", "s", "33%", "8", "s", "75%"]
    assert rows[2] == ["b", "8", "1", "s", "1.00"]
    assert "greedy against random: 75% less time" in text
    assert "greedy against even: 33% less time (arithmetic mean), 1.50x" in text
    assert "all plans within 10% of the simulation: 2 of 4" in text


def test_the_chosen_plan_is_compared_with_the_fastest() -> None:
    """Of 2.0 and 2.5 s the chosen one takes 2.5; alone with greedy it is the faster one."""
    slower, faster = (
        replace(one, cases=(*one.cases, MeasuredPlan("chosen", 2, [[step_s]], step_s)))
        for one, step_s in ((report((2.0, 2.0)), 2.5), (report((2.0, 2.0)), 1.0))
    )
    text = summary({"a": slower, "b": faster})
    assert "within 3% of the fastest one measured: 1 of 2; 1.118x (geometric mean), worst 1.250x" in text


def test_cases_with_a_file_are_not_run_again(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def measure(options: object, cluster: str, model: str) -> PipelineReport:
        started.append(model)
        if started == ["resnet50", "vgg16", "vgg16"]:
            raise OSError("no space left")
        if model == "vgg16":
            raise BenchError("the ranks failed")
        return report((1.0, 1.0), (2.0, 2.0))

    monkeypatch.setattr(pipeline, "_measured", measure)
    arguments = ["--out", str(tmp_path), "--clusters", "slow-cpu", "--models", "resnet50,vgg16"]
    for says in ("the ranks failed", "no space left"):
        assert pipeline.main(arguments) == 1
        said = capsys.readouterr()
        assert says in said.err
        assert "not measured: slow-cpu-vgg16" in said.err
        assert "slow-cpu-resnet50" in said.out
    assert started == ["resnet50", "vgg16", "vgg16"]


def test_the_options_reach_the_ranks_and_an_interrupt_ends_all_cases(
    tmp_path: Path, monkeypatch: Any
) -> None:
    given = []

    def hosts_of(cluster: str, hosts: None) -> ThisHost:
        given.append(cluster)
        return ThisHost()

    def run_on_ranks(worker: str, arguments: Any, *_: Any, **__: Any) -> None:
        given.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_benchmark, "hosts_of", hosts_of)
    monkeypatch.setattr(rank_benchmark, "run_on_ranks", run_on_ranks)
    words = ["--out", str(tmp_path), "--clusters", "slow-cpu,2x1gbit", "--models", "transformer"]
    assert pipeline.main([*words, "--steps", "5", "--methods", "greedy,even"]) == 130
    cluster, arguments = given
    assert (cluster, arguments["where"]) == ("slow-cpu", "plain loopback, links without limit")
    assert (arguments["task"].workload, arguments["task"].pixels) == ("transformer", 128)
    assert (arguments["options"].steps, arguments["options"].methods) == (5, ("greedy", "even"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "resnet50,foo"], "some of resnet50, vgg16, transformer. Received: 'foo'"),
        (["--clusters", "foo"], "A cluster should be .*Received: 'foo'"),
        (["--methods", "greedy,foo"], "some of chosen, .*Received: 'greedy,foo'"),
        (["--batch", "0"], "must be at least 1. Received: Task"),
        (["--methods", "even,random"], "should be greedy, .*Received: 'even,random'"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        pipeline.main(["--out", str(tmp_path), *arguments])
    found = capsys.readouterr().err
    assert re.search(says, found)
