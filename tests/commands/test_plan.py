"""`hvpipe plan`: plans, output, files, and errors for bad input."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvpipe import cli
from hvpipe.commands import plan_request
from hvpipe.commands.plan import in_flags
from hvpipe.commands.plan_report import to_json, to_text
from hvpipe.commands.plan_request import (
    METHODS,
    PlanRequest,
    PlanResult,
    best_microbatches,
    counts_to_try,
    make_plan,
    of_microbatch,
    read_profile,
)
from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan import greedy
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import DATA_PARALLEL, Plan
from hvpipe.schedule.plan_schedule import schedule_of
from hvpipe.schedule.schedule import Schedule
from hvpipe.search.choice import Candidate, find
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import BUDGET
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile
from hvpipe.trace import chart
from hvpipe.trace.events import Trace
from model_graphs import chain

ROOT = Path(__file__).parents[2]
GNMT = str(ROOT / "tests" / "data" / "profiles" / "gnmt.txt")
CLUSTER = """
[[host]]
name = "a"
link = { latency_s = 1e-4, bandwidth_bytes_per_s = 1.25e9 }
[[host]]
name = "b"
link = { latency_s = 1e-4, bandwidth_bytes_per_s = 1.25e9 }
[[host.device]]
name = "b"
speed = 0.5
memory_bytes = 8e9
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cli.os, "environ", {"COLUMNS": "116"})
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return str(tmp_path / "cluster.toml")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 1
    return capsys.readouterr().err


def small(mode: str = "pipeline", method: str = "search", stages: int | None = None) -> PlanResult:
    profile = chain(3, 3, 3, output_bytes=10**6)
    cluster = equal_cluster(3, Link(0, 1e6), memory_bytes=10**7)
    return make_plan(PlanRequest(profile, cluster, Pipelining("1f1b", 4), stages, mode, method))


def test_the_table_of_stages_by_hand() -> None:
    """F takes 1 s and B 2 s on each of three devices; 1 MB takes 1 s each way.

    A micro-batch takes 3 + 2 s forward and 6 + 2 s backward, 13 s in all.
    """
    lines = to_text(small(stages=3), lambda one: "the drawing\n").splitlines()
    assert lines[0] == "model, 3 layers, on 3 of 3 devices: search, 1f1b, 4 micro-batches of 1 sample"
    assert re.fullmatch(r"step \d\d s, 0.\d+ samples/s, bubble [\d.]+%, utilization [\d.]+%", lines[1])
    assert lines[3].split() == [
        "stage",
        "device",
        "layers",
        "compute",
        "travel",
        "in",
        "out",
        "memory",
        "full",
        "busy",
    ]
    assert [line.split()[:12] for line in lines[4:7]] == [
        ["0", "h0", "a", "3", "s", "2", "s", "0", "B", "1", "MB", "0"],
        ["1", "h1", "b", "3", "s", "4", "s", "1", "MB", "1", "MB", "2"],
        ["2", "h2", "c", "3", "s", "2", "s", "1", "MB", "0", "B", "1"],
    ]
    assert lines[8] == "the drawing"


def test_every_baseline_is_listed() -> None:
    text = to_text(small(), lambda one: "")
    for method in METHODS:
        assert ("\n" + method in text) == (method != "exact")
    assert re.search(r"\nrandom \(median of 100\) +\d ", text)
    ends = {line.split()[0]: line.endswith("no pipeline") for line in text.splitlines() if line.strip()}
    assert (ends["random"], ends["round_robin"]) == (True, False)  # the latter has a, b, c in order
    assert re.search(r"\nsearch +\d .* 1\.00x ", text)


def test_a_step_of_zero_seconds_has_no_ratio() -> None:
    """Regression: the ratio to such a step divided by zero."""
    given = make_plan(PlanRequest(chain(0, 0), equal_cluster(2), Pipelining("1f1b", 4)))
    assert re.search(r"\n(search|data_parallel|hybrid) +\d +0 ms +0 ms", to_text(given, lambda one: ""))


def test_a_random_baseline_is_the_median_of_the_plans_that_fit() -> None:
    """Regression: one seed without a plan that fits discarded the other 99."""
    profile = chain(*[1] * 12, weight_bytes=10)
    given = make_plan(PlanRequest(profile, equal_cluster(6, memory_bytes=40), Pipelining("1f1b", 6), 6))
    count = given.fitting["random"]
    assert 0 < count < 100
    assert f"\nrandom (median of {count}) " in to_text(given, lambda one: "")


def test_a_random_plan_chosen_by_method_is_not_a_median() -> None:
    text = to_text(small(method="random_cuts", stages=2), lambda one: "")
    assert re.search(r"\nrandom_cuts +2 ", text)


def test_another_method_is_compared_with_greedy() -> None:
    given = small(method="exact", stages=2)
    assert given.chosen.plan.method == "exact"
    assert given.baselines["greedy"] is not None
    assert "\nexact" in to_text(given, lambda one: "")


def test_auto_shows_all_modes_and_chooses_one() -> None:
    given = small(mode="auto")
    text = to_text(given, lambda one: "")
    # Shares of 2, 1 and 1 of 4 samples, 9 s each.
    assert re.search(r"\ndata +18 s +33\.3% +3 +chosen\n", text)
    assert re.search(r"\nhybrid +", text)
    assert given.chosen.plan.method == DATA_PARALLEL
    assert "data parallel, 4 micro-batches" in text
    assert "\nTrain with hvpipe.keras.data_parallel, on batches of 2, 1, 1 samples.\n" in text


def test_data_parallel_by_micro_batches_is_a_pipeline_of_one_stage() -> None:
    """A whole share saves 20 bytes for the backward, a micro-batch 10."""
    profile, cluster = chain(3, 3, saved_bytes=10), equal_cluster(2, memory_bytes=25)
    given = make_plan(PlanRequest(profile, cluster, Pipelining("1f1b", 4), mode="data"), with_baselines=False)
    text = to_text(given, lambda one: "")
    assert "hybrid, 1f1b, 4 micro-batches" in text
    assert "Train with" not in text
    assert schedule_of(given.chosen.plan).stages == 1


def test_a_baseline_that_lacks_memory_is_marked() -> None:
    """h0 has memory for the weights of one layer, but `even` places two there."""
    hosts = (Host("h0", (Device("h0", 1.0, 25),)), Host("h1", (Device("h1"),)))
    question = PlanRequest(chain(1, 1, 1, 1, weight_bytes=10), Cluster(hosts), Pipelining("1f1b", 4), 2)
    given = make_plan(question)
    assert given.baselines["even"] is None
    assert re.search(r"\neven +lacks memory\n", to_text(given, lambda one: ""))
    assert not given.chosen.shortages(question.cluster)


@pytest.mark.parametrize(
    ("stages", "choice"),
    [
        (3, PipeliningChoice()),
        (4, PipeliningChoice("interleaved")),
        (None, PipeliningChoice("interleaved")),
        (3, PipeliningChoice(recompute=(2,))),
        (None, PipeliningChoice(recompute=(2,))),
    ],
)
def test_a_baseline_is_not_chosen_against_what_is_asked_for(
    stages: int | None, choice: PipeliningChoice
) -> None:
    """Regression: m_topo leaves everything on one device here, which is fastest over slow links."""
    profile = chain(30e-3, 3e-3, 3e-3, 3e-3, output_bytes=10**6, weight_bytes=10**6)
    heavy = replace(profile.layers[0], weight_bytes=10**8)
    profile = replace(profile, layers=(heavy, *profile.layers[1:]))
    result = make_plan(PlanRequest(profile, equal_cluster(3, Link(1e-3, 1e6)), choice, stages, "pipeline"))
    plan = result.chosen.plan
    assert stages in (None, len(plan.stages))
    assert choice.schedule in ("auto", plan.pipelining.schedule)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for one in result.baselines.values():
        assert one is None or one.step_s >= result.chosen.step_s


def test_a_method_without_the_stages_to_recompute_is_an_error() -> None:
    """Regression: the plan that was written could not be read."""
    choice = PipeliningChoice("1f1b", recompute=(2,))
    profile = chain(1, 1, 1, 1)
    profile = replace(profile, layers=(replace(profile.layers[0], weight_bytes=100), *profile.layers[1:]))
    with pytest.raises(PlanError, match=r"recompute=\(2,\), method='m_topo', which makes stages=1"):
        make_plan(PlanRequest(profile, equal_cluster(3), choice, 3, method="m_topo"))


def test_a_method_that_does_not_fit_is_an_error() -> None:
    """Each device gets two layers with 20 bytes of weights and gradients each."""
    cluster = equal_cluster(2, memory_bytes=25)
    question = PlanRequest(
        chain(1, 1, 1, 1, weight_bytes=10), cluster, Pipelining("1f1b", 4), 2, method="even"
    )
    says = r"method='even'; h0: needs 40 bytes, may use 25 bytes; h1: needs 40 bytes, may use 25 bytes"
    with pytest.raises(PlanError, match=says):
        make_plan(question, with_baselines=False)


def test_the_command_prints_and_writes_a_plan(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    text = printed(
        capsys,
        *(GNMT, "--cluster", cluster, "--microbatches", "4", "--explain", "-o", str(plan_file)),
        *("--mode", "pipeline", "--stages", "2"),
    )
    assert text.startswith("gnmt, 48 layers, on 2 of 2 devices: search, ")
    assert re.search(r"^[ab] \| F0.*[BI]0", text, re.MULTILINE)
    assert re.search(r"^cut 1 after node\d+ \([ab] \| [ab]\): ", text, re.MULTILINE)
    assert "\033[" not in text
    plan = Plan.read(plan_file)
    assert (plan.method, plan.pipelining.microbatches, plan.model) == ("search", 4, "gnmt")


@pytest.mark.parametrize(
    ("batch_size", "counts"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (12, [1, 2, 4, 6, 12]),
        (97, [1, 2, 4, 8, 16, 32, 64, 97]),
        (100, [1, 2, 4, 10, 20, 25, 50, 100]),
        (10**9, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]),
    ],
)
def test_divisors_of_the_batch_are_tried(batch_size: int, counts: list[int]) -> None:
    assert counts_to_try(batch_size) == counts


def test_a_part_of_the_work_refuses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each number of micro-batches had a part of the work, and scarce memory needs all of it."""
    asked = []

    def scarce(*given: Any) -> list[Candidate]:
        asked.append((given[2].microbatches, given[-1]))
        if given[-1] < BUDGET or given[2].microbatches < 4:
            return [Candidate(mode, None, "lacks memory") for mode in given[-2]]
        return find(*given)

    monkeypatch.setattr(plan_request, "find", scarce)

    def request_with(count: int) -> PlanRequest:
        return PlanRequest(chain(1, 1), equal_cluster(2), PipeliningChoice(microbatches=count))

    assert best_microbatches(request_with, 8).choice.microbatches == 4
    part = BUDGET // 4
    assert asked == [(1, part), (2, part), (4, part), (8, part), (8, BUDGET), (4, BUDGET), (2, BUDGET)]


def test_an_estimate_leaves_few_numbers_of_micro_batches_for_many_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: with 1,024 devices, simulating 13 numbers of micro-batches took minutes. Later the estimate
    alone chose, and left out the largest numbers."""
    asked = []

    def counted(*given: Any) -> list[Candidate]:
        asked.append((given[2].microbatches, given[-1]))
        return find(*given)

    monkeypatch.setattr(plan_request, "find", counted)

    def request_with(count: int) -> PlanRequest:
        profile = replace(chain(*[1] * 8), batch_size=4096 // count)
        return PlanRequest(profile, equal_cluster(65), PipeliningChoice(microbatches=count), mode="data")

    chosen = best_microbatches(request_with, 4096).choice.microbatches
    assert len(asked) == 3
    assert chosen in [count for count, _ in asked]
    assert sum(part for _, part in asked) < BUDGET


def test_json_output(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(printed(capsys, GNMT, "--cluster", cluster, "--mode", "auto", "--json"))
    plan = Plan.from_json(document["plan"])
    assert document["forecast"]["step_s"] <= min(
        one["forecast"]["step_s"] for one in document["candidates"] if one["forecast"]
    )
    assert set(document["forecast"]["utilization"]) == set(plan.ranks)
    assert document["forecast"]["samples_per_s"] == pytest.approx(8 / document["forecast"]["step_s"])
    assert document["baselines"]["random"]["step_s"] > document["forecast"]["step_s"]
    assert Plan.from_json(document["baselines"]["random"]["plan"]).method == "random"
    assert "explanation" not in document
    explained = json.loads(
        printed(capsys, GNMT, "--cluster", cluster, "--json", "--explain", "--mode", "pipeline")
    )
    assert [line.split(" after ")[0] for line in explained["explanation"]] == ["cut 1"]


def test_advised_batches_add_up_to_the_batch(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: 100 samples in 8 micro-batches of up to 13 were advised as 69 and 35."""
    asked = ("--cluster", cluster, "--graph-batch-size", "64", "--batch-size", "50", "--no-baselines")
    text = printed(capsys, GNMT.replace("gnmt", "resnet50"), *asked, "--mode", "data")
    assert "\nTrain with hvpipe.keras.data_parallel, on batches of 33, 17 samples.\n" in text


def test_no_more_devices_than_micro_batches() -> None:
    """Regression: without --stages, `exact` and the baselines used all devices."""
    profile, how = chain(3, 3, 3, 3), Pipelining("1f1b", 2)
    given = make_plan(PlanRequest(profile, equal_cluster(4), how, method="exact"))
    assert len(given.chosen.plan.stages) == 2
    assert given.baselines["even"] is not None
    assert len(given.baselines["even"].plan.stages) == 2


def test_equal_requests_have_equal_plans(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (GNMT, "--cluster", cluster, "--method", "random", "--no-baselines", "--seed")
    first, again, other = (printed(capsys, *arguments, seed) for seed in "112")
    assert first == again != other


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "interleaved"])
def test_other_schedules(schedule: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys,
        GNMT,
        "--cluster",
        cluster,
        "--schedule",
        schedule,
        "--recompute",
        "--no-baselines",
        "--mode",
        "pipeline",
    )
    chunks = ", 2 chunks" if schedule == "interleaved" else ""
    assert f"search, {schedule}{chunks}, recompute, 8 micro-batches" in text


def test_a_schedule_that_is_not_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: data parallel was chosen, and nothing said that it has no schedule."""
    chain(1, 1, 1, 1).write(tmp_path / "p.json")
    equal_cluster(2, Link(1e-4, 1e9)).write(tmp_path / "c.json")
    files = (str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.json"), "--no-baselines")
    note = (
        "--schedule interleaved is not in use, because data parallel has no schedule. "
        "Use --mode pipeline for a plan with this schedule."
    )
    interleaved = (*files, "--schedule", "interleaved")
    assert f"\n{note}\n" in printed(capsys, *interleaved)
    assert json.loads(printed(capsys, *interleaved, "--json"))["notes"] == [note]
    assert json.loads(printed(capsys, *files, "--json"))["notes"] == []
    assert "not in use" not in printed(capsys, *interleaved, "--mode", "pipeline")


def test_recompute_in_some_stages(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    again = ("--recompute-stages", "1,0", "--no-baselines", "--schedule", "1f1b", "--mode", "pipeline")
    assert "search, 1f1b, recompute in 0, 1, 8 micro-batches" in printed(
        capsys, GNMT, "--cluster", cluster, *again
    )


def test_a_profile_is_scaled_to_the_micro_batch(tmp_path: Path) -> None:
    assert read_profile(GNMT).batch_size == 1
    whole = read_profile(GNMT, 64)
    assert of_microbatch(whole, 4, None) == whole
    assert whole.batch_size == 64
    # 30 samples in 4 micro-batches: 8, 8, 7 and 7. The profile is for the largest.
    profile = of_microbatch(whole, 4, 30)
    assert profile.batch_size == 8
    assert profile.compute_s == pytest.approx(whole.compute_s / 8)
    chain(1, 2).write(tmp_path / "p.json")
    with pytest.raises(HvpipeError, match=r"graph-batch-size is for a PipeDream graph"):
        read_profile(str(tmp_path / "p.json"), 64)
    with pytest.raises(HvpipeError, match="batch_size=3, microbatches=4"):
        of_microbatch(whole, 4, 3)


def test_a_profile_from_a_pipe(cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it was read anew for each number of micro-batches, and was empty then."""
    chain(1, 2).write(tmp_path / "p.json")
    source, end = os.pipe()
    with open(end, "wb") as file:
        file.write((tmp_path / "p.json").read_bytes())
    asked = (f"/dev/fd/{source}", "--cluster", cluster, "--batch-size", "4", "--no-baselines")
    assert "2 layers" in printed(capsys, *asked)
    os.close(source)


@pytest.mark.parametrize(("fixed", "microbatches"), [(0.0, 64), (0.02, 8), (1.0, 1)])
def test_the_fixed_cost_of_a_micro_batch_decides_their_number(
    fixed: float, microbatches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two layers takes 1 s for 64 samples, of which `fixed` seconds do not depend on their number.

    A step takes (m + 1) 2 (fixed + (1 - fixed) / m) seconds: 2.57 s with 8 micro-batches, 2.65 with 4.
    """
    cluster = str(tmp_path / "equal.json")
    equal_cluster(2, Link(1e-4, 1.25e9)).write(cluster)
    layers = [LayerCost(name, 1.0, 1.0, fixed_forward_s=fixed, fixed_backward_s=fixed) for name in "ab"]
    path = str(tmp_path / "p.json")
    Profile.of(layers, [("a", "b")], batch_size=64).write(path)
    text = printed(
        capsys,
        *(
            path,
            "--cluster",
            cluster,
            "--stages",
            "2",
            "--no-baselines",
            "--mode",
            "pipeline",
            "--schedule",
            "1f1b",
        ),
        *("--microbatches", "auto", "--batch-size", "64"),
    )
    word = "micro-batches" if microbatches > 1 else "micro-batch"
    assert f" {microbatches} {word} of {64 // microbatches} sample" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--microbatches", "auto"], "auto needs --batch-size"),
        (["--microbatches", "auto", "--batch-size", "0"], "batch_size=0"),
        (["--batch-size", "-4"], "at least one sample. Received: batch_size=-4"),
        (["--chunks", "9e9"], "a layer for each chunk. Received: chunks=9000000000, layers=48"),
        (["--method", "greedy", "--chunks", "2"], "Received: --method greedy --schedule auto --chunks 2"),
        (["--recompute-stages", "-1"], "--recompute-stages should have .* --recompute-stages -1"),
        (["--microbatches", "auto", "--batch-size", "8", "--stages", "49"], "stages=49"),
        (["--stages", "49"], "stages=49"),
        (["--stages", "3"], "at most the number of devices, 2. Received: stages=3"),
        (
            ["--stages", "4", "--microbatches", "1", "--schedule", "interleaved"],
            "at least the number of ranks, 2. Received: microbatches=1",
        ),
        (["--microbatches", "0"], "microbatches=0"),
        (["--batch-size", "8", "--microbatches", "0"], "at least 1. Received: microbatches=0"),
        (["--batch-size", "8", "--microbatches", "-2"], "at least 1. Received: microbatches=-2"),
        (["--schedule", "2f2b"], "schedule='2f2b'"),
        (["--schedule", "1f1b", "--chunks", "2"], "interleaved. Received: --schedule 1f1b --chunks 2"),
        (["--chunks", "0"], "chunks=0"),
        (["--microbatches", "1000000000"], "at most 16,384 micro-batches. Received: microbatches=1000000000"),
        (["--stages", "0"], "stages=0"),
        (["--stages", "0", "--method", "even"], "stages=0"),
        (["--stages", "0", "--mode", "hybrid"], "stages should be at least 1. Received: stages=0"),
        (["--graph-batch-size", "0"], "batch_size=0"),
        (["--mode", "model"], "mode='model'"),
        (["--mode", "data", "--stages", "2"], "one stage: omit the stages.* mode='data', stages=2"),
        (["--mode", "hybrid", "--stages", "1"], "has two stages or more.* mode='hybrid', stages=1"),
        (["--method", "best"], "method='best'"),
        (["--method", "exact", "--mode", "hybrid"], "mode='hybrid', method='exact'"),
        (["--method", "random", "--png", "x.png", "--no-baselines"], "trace is empty"),
        (["--batch-size", "7", "--microbatches", "8"], "batch_size=7, microbatches=8"),
        (
            ["-o", "/absent/plan.json", "--no-baselines"],
            "plan.json should be a file that can be written",
        ),
    ],
)
def test_bad_input(arguments: list[str], says: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, GNMT, "--cluster", cluster, *arguments)
    assert message.startswith("hvpipe plan: ")
    assert re.search(says, message)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.json", "{", r"p\.json, line 1, column 2: should be JSON"),
        ("p.json", "{}", r'p\.json should have "format": "hvpipe-profile"'),
        ("p.txt", "node1 -- node2", r"p\.txt, line 1: should be"),
        ("absent.json", None, r"absent\.json should be a JSON file. Received: No such file"),
        (
            "p.json",
            json.dumps(
                chain(1, 2).to_json() | {"edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]}
            ),
            r"p\.json: The graph of layers should have no cycle. Received: a -> b -> a",
        ),
    ],
)
def test_a_bad_profile(
    name: str, text: str | None, says: str, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert re.search(says, refusal(capsys, str(tmp_path / name), "--cluster", cluster))


def test_a_bad_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[[host]]\nname = 3\n")
    assert "host[0].name should be text" in refusal(capsys, GNMT, "--cluster", str(bad))
    bad.write_text("[[host]\n")
    assert re.search(r"bad\.toml should be TOML.*line 1", refusal(capsys, GNMT, "--cluster", str(bad)))


def test_a_model_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = tmp_path / "tight.toml"
    tight.write_text(
        CLUSTER.replace('name = "a"', 'name = "a"\ndevice = [{ name = "a", memory_bytes = 8e8 }]')
    )
    tight.write_text(tight.read_text().replace("memory_bytes = 8e9", "memory_bytes = 8e8"))
    message = refusal(capsys, GNMT, "--cluster", str(tight))
    assert re.search(
        r"memory of every device should hold its stage.*: needs .* GB, may use 800 MB.*It would fit with",
        message,
    )


def test_why_a_model_does_not_fit_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the reason was printed for each number of stages, and again for the printed plan."""
    asked = []
    least_short = greedy.least_short
    monkeypatch.setattr(greedy, "least_short", lambda *given: asked.append(given[2]) or least_short(*given))
    question = PlanRequest(chain(1, 1, 1, weight_bytes=10), equal_cluster(3, memory_bytes=19), Pipelining())
    with pytest.raises(
        PlanError, match=r"^The memory of every device .*stages=3.* needs 20 bytes, may use 19"
    ):
        make_plan(question)
    assert asked == [3]


def documented() -> list[tuple[str, str]]:
    """Return the commands in docs/planning.md, each with the output shown there."""
    text = (ROOT / "docs" / "planning.md").read_text()
    return re.findall(r"```\n\$ hvpipe plan ([^\n]*)\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), documented())
def test_the_page_shows_the_real_output(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli.os, "environ", {"COLUMNS": "110"})
    cli.main(["plan", *shlex.split(command)])
    printed = capsys.readouterr()
    assert printed.out + printed.err == output


def test_the_cluster_and_python_on_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    described = (ROOT / "docs" / "planning" / "cluster.toml").read_text()
    assert f"```toml\n{described}```" in text
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(described)
    profile = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    assert [layer.name for layer in Profile.from_json(profile).layers] == ["dense", "relu"]
    Profile.read(GNMT).write("profile.json")
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = [code for code in codes if "from hvpipe.plan import" in code]
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["best"].step_s <= found["step"].step_s
    assert Schedule.read("schedule.json").stages == 4
    assert Trace.read("trace.json").of("forward")


def colours_of(text: str) -> Sequence[str]:
    return re.findall(r"\033\[([\d;]+)m", text)


def test_colours_only_on_a_terminal(
    cluster: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True)
    arguments = (GNMT, "--cluster", cluster, "--no-baselines")
    assert set(colours_of(printed(capsys, *arguments))) == {"44;97", "42;30", "0"}
    monkeypatch.setitem(cli.os.environ, "NO_COLOR", "1")
    assert not colours_of(printed(capsys, *arguments))


def test_a_large_plan_is_summarised() -> None:
    profile = chain(*[1] * 12)
    large = PlanRequest(profile, equal_cluster(40), Pipelining("1f1b", 40), mode="data")
    text = to_text(make_plan(large, with_baselines=False), lambda one: "the drawing\n")
    assert "the drawing" not in text
    assert "... 23 more" in text or "... 24 more" in text
    assert "The timeline is left out: 40 devices." in text


def test_a_timeline_of_many_actions_is_left_out() -> None:
    """Regression: the reason was 2 devices."""
    profile, how = chain(1, 1), Pipelining("1f1b", 16_000)
    result = make_plan(PlanRequest(profile, equal_cluster(2), how, 2, method="even"), with_baselines=False)
    assert "The timeline is left out: 64,000 actions." in to_text(result, lambda one: "the drawing\n")


def test_why_a_baseline_is_missing() -> None:
    """Regression: it lacked memory, whatever the reason."""
    how = PipeliningChoice(microbatches=4, recompute=(5,))
    result = make_plan(PlanRequest(chain(*[1] * 12), equal_cluster(12), how, mode="pipeline"), budget=10**6)
    assert result.baselines["even"] is None
    says = "recompute should name stages from 0 to 3. Received: recompute=(5,)"
    assert re.search(rf"\neven +{re.escape(says)}\n", to_text(result, lambda one: ""))
    assert in_flags(says).endswith("from 0 to 3. Received: --recompute-stages 5")
    assert to_json(result)["refused"]["even"] == says


def test_a_model_of_many_layers_has_quick_baselines() -> None:
    """Regression: random ones took minutes."""
    request = PlanRequest(chain(*[1] * 1001), equal_cluster(2), Pipelining("1f1b", 4), 2, method="even")
    assert set(make_plan(request).baselines) == {"pipedream", "m_topo"}


def test_a_failing_command_leaves_files_as_they_are(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the plan was written first, and matplotlib was missed after the search."""
    kept = tmp_path / "plan.json"
    kept.write_text("mine")
    asked = (GNMT, "--cluster", cluster, "--no-baselines", "-o", str(kept))
    assert "Only a pipeline has cuts" in refusal(capsys, *asked, "--method", "round_robin", "--explain")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(plan_request, "find", None)
    assert "needs matplotlib" in refusal(capsys, *asked, "--png", str(tmp_path / "step.png"))
    assert kept.read_text() == "mine"


def test_any_schedule_may_have_the_stages_asked_for() -> None:
    """Regression: only 1f1b was asked, and refused."""
    found = make_plan(PlanRequest(chain(*[1] * 8), equal_cluster(4), PipeliningChoice(), stages=8))
    how = found.chosen.plan.pipelining
    assert (how.schedule, how.chunks, len(found.chosen.plan.stages)) == ("interleaved", 2, 8)


@pytest.mark.parametrize(("microbatches", "drawn"), [(8, "draw_timeline"), (300, "draw_utilization")])
def test_a_picture_of_a_long_step_shows_how_busy_ranks_are(
    microbatches: int,
    drawn: str,
    cluster: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a timeline of 3,072 actions took 10 s to draw."""
    called = []
    for name in ("draw_timeline", "draw_utilization"):
        monkeypatch.setattr(chart, name, lambda *given, name=name: called.append(name))
    chain(1, 2).write(tmp_path / "p.json")
    options = ("--microbatches", str(microbatches), "--stages", "2", "--method", "even", "--png", "x.png")
    printed(capsys, str(tmp_path / "p.json"), "--cluster", cluster, "--no-baselines", *options)
    assert called == [drawn]


def test_remedies_are_flags() -> None:
    message = 'It would fit with schedule="1f1b", or recompute=True.'
    assert in_flags(message) == "It would fit with --schedule 1f1b, or --recompute."
    message = 'with 6 stages and 6 micro-batches, or 16 smaller micro-batches of 4 with schedule="1f1b".'
    flags = "with --stages 6 --microbatches 6, or --batch-size 64 --microbatches 16 --schedule 1f1b."
    assert in_flags(message) == flags
    assert in_flags(message, has_batch_size=True) == flags.replace("--batch-size 64 ", "")
    message = "use partition for more. Received: recompute=(5, 7)"
    assert in_flags(message) == "use --method greedy for more. Received: --recompute-stages 5,7"


@pytest.mark.parametrize(
    ("room_bytes", "options", "says"),
    [
        (70, "--mode data", "Received: data: lacks memory .* It would fit with --mode pipeline."),
        (70, "--mode hybrid", "Received: hybrid: lacks memory .* It would fit with --mode pipeline."),
        (
            54,
            "--method even",
            "Received: --method even; h0: .* fit with --method search --mode pipeline.",
        ),
        (54, "--method random", "placements fits .* It would fit with --method search --mode pipeline."),
        (45, "--mode data", "Nor does it fit with --mode pipeline: .* fit with --stages 6 on 3 more"),
        (45, "--method even", "Nor does it fit with --method search --mode pipeline: .* with --stages 6 on"),
        (70, "--recompute-stages 5", "from 0 to 2. Received: --recompute-stages 5"),
        (70, "--recompute-stages 5 --stages 3", "from 0 to 2. Received: --recompute-stages 5$"),
        (70, "--recompute-stages 6", "Received: stage 6, layers=6$"),
        (45, "--stages 2 --microbatches 2", "with --stages 6 --microbatches 6 on 3 more devices"),
        (45, "--mode pipeline", "Received: --stages 3 --schedule 1f1b --microbatches 8 of 8 samples;"),
    ],
)
def test_a_refusal_names_flags(
    room_bytes: int, options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = tuple(LayerCost(f"l{i}", 1.0, 2.0, 10, 0, 1, 5) for i in range(6))
    profile = Profile(layers, tuple((i, i + 1) for i in range(5)), batch_size=8)
    profile.write(tmp_path / "p.json")
    equal_cluster(3, memory_bytes=room_bytes).write(tmp_path / "c.json")
    arguments = (str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.json"), "--no-baselines")
    message = refusal(capsys, *arguments, *options.split())
    assert re.search(says, message.strip()), message
    assert "recompute=" not in message
