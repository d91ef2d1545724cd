"""Suites: those that come with the benchmarks are valid; errors are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cluster.spec import cluster_spec, cores_of_rank, named_cluster, read_spec
from bench.evaluation.suite import Group, read_suite, suite_names
from bench.rounds.record import Task
from bench.systems import SYSTEMS as ALL_SYSTEMS
from hvpipe.errors import HvpipeError

SYSTEMS = (
    *("single", "tf-ps", "tf-mwms", "tf-mwms-tuned", "horovod", "horovod-tuned"),
    *("hvpipe-none", "hvpipe-backward", "hvpipe-step", "hvpipe-stale"),
)
GROUP = '[[group]]\nworkload = "resnet50"\nbatch = 8\nclusters = ["2x1gbit"]\nsystems = "all"\n'


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_the_suites_are_valid_and_name_systems_that_exist() -> None:
    assert suite_names() == ["accuracy", "curve", "quick", "rivals", "rivals-large"]
    for name in suite_names():
        assert read_suite(name, tuple(ALL_SYSTEMS)).groups


def test_groups_have_the_defaults_of_the_suite(tmp_path: Path) -> None:
    text = '[defaults]\nbatch = 4\nrounds = 3\n[[group]]\nworkload = "vgg16"\nsystems = "all"\n'
    mine, own = read_suite(written(tmp_path, text + GROUP), SYSTEMS).groups
    assert [(each.task.batch, each.rounds) for each in (mine, own)] == [(4, 3), (8, 3)]


def test_systems_take_turns_at_being_first(tmp_path: Path) -> None:
    (group,) = read_suite(written(tmp_path, GROUP + "rounds = 3"), ("a", "b", "c")).groups
    order = "".join(case.system for _, case in group.turns())
    assert order == "abcbcacab"
    assert [number for number, _ in group.turns()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_systems_in_once_take_part_only_in_the_first_round(tmp_path: Path) -> None:
    text = GROUP + 'rounds = 3\nonce = ["b"]'
    suite = read_suite(written(tmp_path, text), ("a", "b", "c"))
    assert "".join(case.system for _, case in suite.groups[0].turns()) == "abc" + "ca" + "ca"
    group = suite.groups[0]
    described = group.task.describe([group.rounds_of(name) for name in group.systems])
    assert described == "batch 8 a rank, 1 thread an operation, 1 to 3 rounds of 3 + 8 steps, seed 20"
    assert suite.only_systems("ac").groups[0].once == ()
    assert suite.on_one_cluster("hosts", 2).groups[0].once == ("b",)


def test_groups_of_one_round_start_with_different_systems(tmp_path: Path) -> None:
    text = GROUP.replace('["2x1gbit"]', '["2x1gbit", "4x1gbit", "slow-cpu", "slow-link"]') + "rounds = 1"
    suite = read_suite(written(tmp_path, text), ("a", "b", "c"))
    assert ["".join(case.system for _, case in group.turns()) for group in suite.groups] == [
        *("abc", "bca", "cab", "abc")
    ]
    assert [case.system for _, case in suite.only_systems("ac").groups[1].turns()] == ["c", "a"]


def test_on_one_cluster_tasks_run_once(tmp_path: Path) -> None:
    two = read_suite(written(tmp_path, GROUP.replace("2x1gbit", '2x1gbit", "4x1gbit')), SYSTEMS)
    suite = two.on_one_cluster("hosts", 4)
    assert [(group.name, group.ranks) for group in suite.groups] == [("resnet50-64/8/hosts-4/weak", 4)]
    assert suite.on_one_cluster("hosts", 4) == suite


def test_epochs_need_more_steps_than_the_warm_up(tmp_path: Path) -> None:
    digits = GROUP.replace("resnet50", "digits").replace("batch = 8", "batch = 32") + "epochs = 4\n"
    most = read_suite(written(tmp_path, digits), SYSTEMS).on_one_cluster("hosts", 400)
    assert not most.groups
    assert "examples should have more steps than the warm-up's 3" in most.notes[0]
    with pytest.raises(
        HvpipeError, match=r"mine\.toml: .*: epochs .* Received: 32 samples on each of 60 ranks"
    ):
        read_suite(written(tmp_path, digits.replace("2x1gbit", "60x1gbit")), SYSTEMS)


MINE = '[[host]]\nrate = "1.5gbit"\n[[host]]\nrate = "100mbit"\ncpus = 0.5\n'


def test_a_cluster_may_be_a_file_beside_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine.toml").write_text(MINE)
    text = GROUP.replace("2x1gbit", "theirs/mine.toml")
    (group,) = read_suite(written(tmp_path, text), SYSTEMS).groups
    assert (group.name, group.ranks) == ("resnet50-64/8/mine.toml-2/weak", 2)
    assert group.spec == read_spec(tmp_path / "theirs" / "mine.toml")
    monkeypatch.chdir(tmp_path)
    assert named_cluster("theirs/mine.toml", Path()) == ("mine.toml", group.spec)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.toml").write_text(MINE.replace("1.5", "1"))
    both = GROUP.replace('"2x1gbit"', '"theirs/mine.toml", "other/mine.toml"')
    with pytest.raises(HvpipeError, match="Received: "):
        read_suite(written(tmp_path, both), SYSTEMS)
    apart = GROUP.replace("2x1gbit", "theirs/mine.toml") + GROUP.replace("resnet50", "vgg16").replace(
        "2x1gbit", "other/mine.toml"
    )
    with pytest.raises(HvpipeError, match=r"different file names. Received: 'mine\.toml'"):
        read_suite(written(tmp_path, apart), SYSTEMS)


def test_auto_threads_follow_from_the_cores_of_a_rank(tmp_path: Path) -> None:
    text = GROUP.replace('"2x1gbit"', '"2x1gbit", "4x1gbit", "slow-cpu"')
    suite = read_suite(written(tmp_path, text), ("a",))

    def settled(given: int | None) -> list[int]:
        found = suite.with_threads(given, lambda group: cores_of_rank(cluster_spec(group.cluster), 8))
        return [group.task.threads for group in found.groups]

    # Of 8 cores, 2 ranks get 4 each and 4 ranks 2 each. The hosts of slow-cpu have quotas of 1 and 0.5 cores.
    assert settled(None) == [4, 2, 1]
    assert settled(3) == [3, 3, 3]


def test_selecting_systems() -> None:
    suite = read_suite("quick", SYSTEMS).only_systems(["tf-ps"])
    assert {group.systems for group in suite.groups} == {("tf-ps",)}
    with pytest.raises(HvpipeError, match=r"Systems of this suite are single.*Received: \['hvpipe-stpe'\]"):
        read_suite("quick", SYSTEMS).only_systems(["hvpipe-stpe", "tf-ps"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("group = []", "Received: none"),
        ("[group", "should be TOML"),
        (GROUP + "colour = 1", r"mine\.toml: group\[0\] should have only .*Received: 'colour'"),
        ("[defaults]\ncolour = 1\n" + GROUP, "Received: 'colour'"),
        (GROUP.replace("batch = 8\n", ""), "batch is missing, and should be a number"),
        (GROUP.replace('"all"', '["tf-ps", "absent"]'), r"systems should be names of single.*'absent'\]"),
        (GROUP.replace('"all"', '["tf-ps", "tf-ps"]'), "each once"),
        (GROUP.replace('"all"', "[]"), r"Received: \[\]"),
        (GROUP.replace("resnet50", "resnet51"), r"group\[0\]: The workload .* workload='resnet51'"),
        (GROUP.replace("batch = 8", "batch = 0"), "batch=0"),
        (GROUP + 'once = ["absent"]', r"once should be names of .*Received: \['absent'\]"),
        (GROUP + GROUP, "each once. Received: .'resnet50-64/8/2x1gbit-2/weak'"),
    ],
)
def test_errors_in_a_suite_are_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(HvpipeError, match=says):
        read_suite(written(tmp_path, text), SYSTEMS)


def test_unknown_names() -> None:
    with pytest.raises(HvpipeError, match=r"accuracy, curve, .*, or a TOML file. Received: 'fast'"):
        read_suite("fast", SYSTEMS)
    with pytest.raises(HvpipeError, match=r"gigabit-2.*Received: 'cloud'"):
        cluster_spec("cloud")
    for path in ("/tmp/x", "slow-cpu/", "../clusters/slow-cpu"):
        with pytest.raises(HvpipeError, match=r"gigabit-2.* or a TOML file, as in mine\.toml\. Received"):
            cluster_spec(path)
    with pytest.raises(HvpipeError, match=r"absent\.toml should be a TOML file"):
        named_cluster("absent.toml", Path())
    assert cluster_spec("2x1.5gbit").slowest_rate_bits_per_s == 1.5e9
    assert cluster_spec("2x300mbit").slowest_rate_bits_per_s == 300e6
    assert [host.cpus for host in cluster_spec("slow-both").hosts] == [1.0, 0.5]


def test_at_most_some_rounds(tmp_path: Path) -> None:
    suite = read_suite(written(tmp_path, GROUP + "rounds = 3"), ("a", "b", "c"))
    assert [suite.at_most(rounds).groups[0].rounds for rounds in (1, 5)] == [1, 3]
    with pytest.raises(HvpipeError, match=r"at least one round\. Received: 0"):
        suite.at_most(0)


@pytest.mark.parametrize(("epochs", "steps"), [(0, 24), (2, 8)])
def test_a_round_of_local_averages_three_times(epochs: int, steps: int) -> None:
    group = Group(Task("digits", 8, epochs=epochs), "2x1gbit", 2, ("hvpipe-step", "hvpipe-local"))
    assert [group.case(name).task.steps for name in group.systems] == [8, steps]
