"""The search for settings: what is tried, in which order, what is stored. No round runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import tune
from bench.errors import ClusterError
from bench.hosts.real_hosts import RealHosts
from bench.rounds.record import Case, Round
from bench.systems import SYSTEMS, System
from bench.systems.tuned import Tuned, keep_tuned, read_tuned
from bench_rounds import case, finished, rank

GRID = {"HOROVOD_CYCLE_TIME": ("1", "3.5"), "HOROVOD_FUSION_THRESHOLD": ("8",)}


def test_systems_run_with_the_stored_settings() -> None:
    kept = read_tuned()
    assert set(kept) == set(tune.VALUES)
    for name, tuned in kept.items():
        settings = {**SYSTEMS[name].options, **SYSTEMS[name].environment}
        assert tuned.values.items() <= settings.items()
        assert set(tuned.values) == set(tune.VALUES[name])
        assert tuned.source in SYSTEMS[name].notes[-1]


def test_settings_become_options_or_environment_as_the_system_defines() -> None:
    packs = SYSTEMS["tf-mwms"].tuned({"bytes_per_pack": "7"})
    assert (packs.options["bytes_per_pack"], packs.environment) == ("7", {})
    horovod = SYSTEMS["horovod-tuned"].tuned({"HOROVOD_CYCLE_TIME": "9"})
    assert horovod.environment == {**SYSTEMS["horovod-tuned"].environment, "HOROVOD_CYCLE_TIME": "9"}
    assert horovod.options == {}


def test_combinations_take_turns_and_the_fastest_is_first() -> None:
    order = []

    def run(system: System, number: int) -> Round:
        cycle = system.environment["HOROVOD_CYCLE_TIME"]
        order.append((number, cycle))
        slow = rank([2.0, 2.2] if cycle == "1" else [1.0, 1.2])
        return replace(finished(case("horovod-tuned"), 0.5, number=number), ranks=(rank([0.5]), slow))

    tried = tune.search(SYSTEMS["horovod-tuned"], GRID, 2, run)
    assert order == [(0, "1"), (0, "3.5"), (1, "3.5"), (1, "1")]
    assert [each.values["HOROVOD_CYCLE_TIME"] for each in tried] == ["3.5", "1"]
    assert [each.step_s for each in tried] == pytest.approx([1.1, 2.1])
    assert tried[0].rounds == ((1.0, 1.2), (1.0, 1.2))
    assert "3.5" in tune.describe(tried).splitlines()[1]


def test_a_failed_round_ends_the_search() -> None:
    with pytest.raises(ClusterError, match=r"Received: {'HOROVOD_CYCLE_TIME': '1'.*}, boom"):
        tune.search(
            SYSTEMS["horovod-tuned"], GRID, 1, lambda *_: Round(case("horovod-tuned"), 0, error="boom")
        )


def test_the_command_stores_the_fastest_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_round(of: object, number: int, *_: object, system: System, **__: object) -> Round:
        return finished(
            case("tf-mwms-tuned"), int(system.options["bytes_per_pack"]) / (1 << 20), number=number
        )

    file = tmp_path / "tuned.json"
    file.write_text('{"other": {"values": {"a": "1"}, "source": "a book"}}')
    monkeypatch.setattr(tune, "run_round", run_round)
    monkeypatch.setattr(tune, "warn_if_busy", lambda: None)
    monkeypatch.setattr(tune, "keep_tuned", lambda system, tuned: keep_tuned(system, tuned, file))
    words = ["--system", "tf-mwms-tuned", "--workload", "lstm", "--threads", "1", "--rounds", "1"]
    assert tune.main([*words, "--json"]) == 0
    assert [each["step_s"] for each in json.loads(capsys.readouterr().out)] == [0.25, 1.0, 4.0, 16.0, 50.0]
    assert set(read_tuned(file)) == {"other"}
    assert tune.main([*words, "--keep"]) == 0
    assert read_tuned(file) == {
        "other": Tuned({"a": "1"}, "a book"),
        "tf-mwms-tuned": Tuned(
            {"bytes_per_pack": str(256 << 10)},
            "the fastest of 5 by `python -m bench.tune`: lstm, one host, batch 8 a rank, 1 thread "
            "an operation, 1 round of 3 + 8 steps, seed 20",
        ),
    }
    assert tune.main([*words[:-1], "0"]) == 1
    assert "--rounds should be at least 1. Received: --rounds 0" in capsys.readouterr().err


def test_settings_are_searched_for_on_real_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = set()

    def run_round(of: Case, number: int, hosts: RealHosts, *_: object, python: str, **__: object) -> Round:
        found.add((of.cluster, of.ranks, of.task.threads, hosts.spec.slots, python))
        return finished(case("tf-mwms-tuned"), 1.0, number=number)

    monkeypatch.setattr(tune, "run_round", run_round)
    monkeypatch.setattr(tune, "warn_if_busy", lambda: None)
    monkeypatch.setattr(RealHosts, "require_answers", lambda self: self._cores.update(a="9", b="8"))
    monkeypatch.chdir(tmp_path)
    words = ["--system", "tf-mwms-tuned", "--rounds", "1", "--on", "a:2,b", "--python", "bin/python"]
    assert tune.main(words) == 0
    assert found == {("hosts a:2, b:1", 3, 4, 3, str(tmp_path / "bin" / "python"))}  # 9 cores for two ranks
    assert tune.main([*words, "--hosts", "2"]) == 1
    assert (
        "Give --on, or --hosts or --spec, but not both. Received: also --on a:2,b" in capsys.readouterr().err
    )
