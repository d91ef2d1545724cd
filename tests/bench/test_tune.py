"""The search for settings: what is tried and what is stored. No round runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from bench import __main__ as bench_command
from bench import tune
from bench.hosts.real_hosts import RealHosts
from bench.rounds.record import Case, Round
from bench.systems import SYSTEMS, System
from bench.systems.system import keep_tuned, read_tuned
from bench_rounds import finished


def test_systems_run_with_the_stored_settings() -> None:
    kept = read_tuned()
    assert set(kept) == set(tune.VALUES)
    for name, (values, source) in kept.items():
        settings = {**SYSTEMS[name].options, **SYSTEMS[name].environment}
        assert values.items() <= settings.items()
        assert set(values) == set(tune.VALUES[name])
        assert source in SYSTEMS[name].notes[-1]


def test_settings_become_options_or_environment_as_the_system_defines() -> None:
    packs = SYSTEMS["tf-mwms"].tuned({"bytes_per_pack": "7"})
    assert (packs.options["bytes_per_pack"], packs.environment) == ("7", {})
    horovod = SYSTEMS["horovod-tuned"].tuned({"HOROVOD_CYCLE_TIME": "9"})
    assert horovod.environment == {**SYSTEMS["horovod-tuned"].environment, "HOROVOD_CYCLE_TIME": "9"}
    assert horovod.options == {}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let a round take a second for each MiB of a pack, and keep the fastest in a file of the test."""

    def run_round(of: Case, number: int, *_: object, systems: Mapping[str, System], **__: object) -> Round:
        system = systems[of.system]
        return finished(of, int(system.options["bytes_per_pack"]) / (1 << 20), number=number)

    file = tmp_path / "tuned.json"
    file.write_text('{"other": {"values": {"a": "1"}, "source": "a book"}}')
    monkeypatch.setattr("bench.rounds.round.run_round", run_round)
    monkeypatch.setattr(System, "missing", lambda self, python: "")
    monkeypatch.setattr(bench_command, "warn_if_busy", lambda: None)
    monkeypatch.setattr(tune, "keep_tuned", partial(keep_tuned, file=file))
    return bench_command


WORDS = ["tune", "--system", "tf-mwms-tuned", "--workload", "text", "--threads", "1", "--rounds", "1"]


def test_the_command_stores_the_fastest_with_its_source(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuned.json"
    assert command.main([*WORDS, "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert sorted(each["step_s"] for each in cases) == [0.25, 1.0, 4.0, 16.0, 50.0]
    assert set(read_tuned(file)) == {"other"}
    assert command.main([*WORDS, "--keep"]) == 0
    assert "fastest: bytes_per_pack=262144" in capsys.readouterr().err
    assert read_tuned(file) == {
        "other": ({"a": "1"}, "a book"),
        "tf-mwms-tuned": (
            {"bytes_per_pack": str(256 << 10)},
            "the fastest of 5 by `hvpipe bench tune`: text, plain loopback, links without limit, batch 8 a "
            "rank, 1 thread an operation, 1 round of 3 + 8 steps, seed 20",
        ),
    }
    assert command.main([*WORDS[:-1], "0"]) == 2
    assert "rounds should be a whole number of at least 1. Received: rounds=0" in capsys.readouterr().err


def test_nothing_is_kept_if_a_round_fails(
    command: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "bench.rounds.round.run_round", lambda of, number, *_, **__: Round(of, number, error="boom")
    )
    assert command.main([*WORDS, "--keep"]) == 1
    assert "failed, boom" in capsys.readouterr().out
    assert set(read_tuned(tmp_path / "tuned.json")) == {"other"}


def test_settings_are_searched_for_on_real_hosts(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()

    def run_round(of: Case, number: int, hosts: RealHosts, *_: object, python: str, **__: object) -> Round:
        found.add((of.ranks, of.task.threads, hosts.spec.slots, python))
        return finished(of, 1.0, number=number)

    monkeypatch.setattr("bench.rounds.round.run_round", run_round)
    answers = {name: {"cores": cores, "machine": "A CPU"} for name, cores in (("a", 9), ("b", 8))}
    monkeypatch.setattr(RealHosts, "require_answers", lambda self: self._answers.update(answers))
    monkeypatch.setattr("bench.evaluation.run.links.measure", lambda hosts, cluster: ())
    words = ["tune", "--system", "tf-mwms-tuned", "--rounds", "1", "--hosts", "a:2,b"]
    assert command.main([*words, "--python", sys.executable]) == 0
    assert found == {(3, 4, 3, os.path.abspath(sys.executable))}  # 9 cores for two ranks
