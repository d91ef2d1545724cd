"""Suites: what comes with the benchmarks can be read and fits its budget; what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cluster_spec import ClusterError
from bench.estimates import round_s, suite_s
from bench.suites import SuiteError, cluster_spec, proportional_shares, read_suite, suite_names

SYSTEMS = (
    *("single", "tf-ps", "tf-mwms", "horovod", "horovod-tuned"),
    *("hvpipe-none", "hvpipe-backward", "hvpipe-step", "hvpipe-stale"),
)
GROUP = '[[group]]\nworkload = "resnet50"\nbatch = 8\nclusters = ["2x1gbit"]\nsystems = "all"\n'
PIPELINE = '[[pipeline]]\ncluster = "2x1gbit"\nmodel = "vgg16"\n'


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("name", "minutes"), [("quick", 10), ("newest", 10), ("full", 90)])
def test_the_suites_fit_their_budgets(name: str, minutes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert suite_s(read_suite(name, SYSTEMS)) < 60 * minutes


def test_full_has_what_was_asked_for() -> None:
    suite = read_suite("full", SYSTEMS)
    clusters = {group.cluster for group in suite.groups}
    assert {
        "2x300mbit",
        "2x1gbit",
        "4x1gbit",
        "2xunlimited",
        "slow-cpu",
        "slow-link",
        "slow-both",
    } <= clusters
    assert {group.scaling for group in suite.groups} == {"weak", "strong"}
    (accuracy,) = [group for group in suite.groups if group.task.epochs]
    assert accuracy.systems == SYSTEMS
    # Half the CPU: of 16 samples, 10.67 and 5.33.
    assert [group.task.shares for group in suite.groups if group.task.shares] == [(11, 5)]
    # The best native mode is the better of both wherever both can run: not with unequal shares.
    timed = [group for group in suite.groups if not group.task.shares]
    for group in timed:
        assert "tf-ps" in group.systems
        assert any(name.startswith("tf-mwms") for name in group.systems)
    assert suite_names() == ["full", "newest", "quick"]


def test_systems_take_turns_and_none_is_always_first(tmp_path: Path) -> None:
    (group,) = read_suite(written(tmp_path, GROUP + "rounds = 3"), ("a", "b", "c")).groups
    order = "".join(case.system for _, case in group.turns())
    assert order == "abcbcacab"
    assert [number for number, _ in group.turns()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_slower_links_and_crowds_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    text = GROUP.replace('["2x1gbit"]', '["2xunlimited", "2x1gbit", "2x100mbit"]')
    unlimited, fast, slow = map(round_s, read_suite(written(tmp_path, text), ("a",)).groups)
    # 95 MB are 0.76 Gb: 0.76 s at 1 Gb/s, 7.6 s at 100 Mb/s, in each of 3 + 8 steps.
    assert fast - unlimited == pytest.approx(11 * 0.76)
    assert slow - unlimited == pytest.approx(11 * 7.6)
    crowded = read_suite(written(tmp_path, GROUP.replace("2x1gbit", "4xunlimited")), ("a",)).groups[0]
    assert round_s(crowded) == pytest.approx(2 * unlimited)


def test_on_one_cluster_tasks_are_run_once_and_shares_left_out() -> None:
    suite = read_suite("full", SYSTEMS).on_one_cluster("hosts", 4)
    names = [group.name for group in suite.groups]
    assert len(set(names)) == len(names)
    assert {(group.cluster, group.ranks) for group in suite.groups} == {("hosts", 4)}
    assert not any(group.task.shares for group in suite.groups)
    assert not suite.pipelines
    biggest = next(g for g in suite.groups if g.name == "resnet50-64/8/hosts-4/weak")
    assert set(biggest.systems) == set(SYSTEMS)


def test_some_systems_only() -> None:
    suite = read_suite("quick", SYSTEMS).only_systems(["tf-ps"])
    assert {group.systems for group in suite.groups} == {("tf-ps",)}
    with pytest.raises(SuiteError, match=r"Systems of this suite are single.*Received: \['hvpipe-stpe'\]"):
        read_suite("quick", SYSTEMS).only_systems(["hvpipe-stpe", "tf-ps"])


@given(st.integers(1, 64), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_shares_add_up_and_follow_speed(batch: int, speeds: list[float]) -> None:
    shares = proportional_shares(batch, speeds)
    assert len(shares) == len(speeds)
    assert min(shares) >= 1
    total = batch * len(speeds)
    assert sum(shares) >= total
    for share, speed in zip(shares, speeds, strict=True):
        assert share <= max(1, total * speed / sum(speeds) + 1)
    if min(total * speed / sum(speeds) for speed in speeds) >= 1:
        assert sum(shares) == total


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Received: none"),
        ("[group", "should be TOML"),
        (GROUP + "colour = 1", "Received: colour"),
        (GROUP.replace("batch = 8\n", ""), "a group has workload, batch"),
        (GROUP.replace('"all"', '["tf-ps", "absent"]'), r"Received: \['absent'\]"),
        (GROUP.replace('"all"', "[]"), r"Received: \[\]"),
        (GROUP.replace('"all"', '"single"'), "systems should be a list of names.*Received: 'single'"),
        (GROUP.replace('"all"', '["tf-ps", "tf-ps"]'), "each once"),
        (GROUP.replace('"all"', "5"), "Received: 5"),
        (GROUP.replace('["2x1gbit"]', '"2x1gbit"'), "clusters should be a list of names"),
        (GROUP.replace('["2x1gbit"]', "[2]"), "clusters should be a list of names"),
        (GROUP.replace("resnet50", "resnet51"), "workload='resnet51'"),
        (GROUP.replace('"resnet50"', "[]"), r"the workload should be a name. Received: \[\]"),
        (GROUP.replace("batch = 8", 'batch = "8"'), "batch should be a whole number. Received: '8'"),
        (GROUP.replace("batch = 8", "batch = true"), "Received: True"),
        (GROUP.replace("batch = 8", "batch = 0"), "batch=0"),
        (GROUP + "steps = 2.5", "steps should be a whole number"),
        (GROUP.replace("resnet50", "digits") + "epochs = -1", "epochs=-1"),
        (GROUP + "rounds = 0", "rounds should be a whole number of at least 1. Received: 0"),
        (GROUP + 'rounds = "2"', "Received: '2'"),
        (GROUP + 'scaling = "medium"', "Received: 'medium'"),
        (GROUP + 'shares = "ab"', "Received: 'ab'"),
        (GROUP + "shares = [16, 0]", r"shares=\(16, 0\)"),
        (GROUP + "shares = 8", "Received: 8"),
        ("group = 5", r"\[\[group\]\] should be tables. Received: 5"),
        (GROUP.replace("[[group]]", "[group]"), "should be tables"),
        ("title = 5\n" + GROUP, "title should be a text. Received: 5"),
        (PIPELINE.replace('model = "vgg16"', ""), "model should be one of .*Received: None"),
        (PIPELINE.replace("vgg16", "vgg61"), "Received: 'vgg61'"),
        (PIPELINE.replace('cluster = "2x1gbit"', ""), "has a cluster"),
        (PIPELINE + 'batch = "32"', "Received: '32'"),
        (PIPELINE + 'microbatches = "many"', "Received: 'many'"),
        (PIPELINE + "methods = []", r"Received: \[\]"),
        (GROUP + "shares = [1, 2, 3]", "one for each of 2 ranks"),
        (GROUP + GROUP, "each once. Received: .'resnet50-64/8/2x1gbit-2/weak'"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=says):
        read_suite(written(tmp_path, text), SYSTEMS)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"title = '\xff'")
    with pytest.raises(SuiteError, match=r"mine\.toml should be TOML"):
        read_suite(str(tmp_path / "mine.toml"), SYSTEMS)


def test_a_pipeline_may_choose_its_micro_batches(tmp_path: Path) -> None:
    (run,) = read_suite(written(tmp_path, PIPELINE + 'microbatches = "auto"'), SYSTEMS).pipelines
    assert run.words()[run.words().index("--microbatches") + 1] == "auto"


def test_names_that_nobody_knows() -> None:
    with pytest.raises(SuiteError, match=r"one of full, newest, quick, or a TOML file. Received: 'fast'"):
        read_suite("fast", SYSTEMS)
    with pytest.raises(ClusterError, match=r"homogeneous-2.*Received: 'cloud'"):
        cluster_spec("cloud")
    assert cluster_spec("2x300mbit").slowest_rate_bits_per_s == 300e6
    assert [host.cpus for host in cluster_spec("slow-both").hosts] == [1.0, 0.5]
