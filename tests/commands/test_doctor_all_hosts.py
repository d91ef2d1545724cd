"""What `hvpipe doctor --all-hosts` makes of the facts of hosts."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from hvpipe import cli
from hvpipe.commands import doctor_ranks
from hvpipe.commands.doctor_ranks import to_json
from hvpipe.commands.host_comparison import Row, compare, to_text
from hvpipe.commands.host_facts import UNLIMITED, cores_of_host, facts_of_this_host
from hvpipe.environment.settings import Settings

FACTS: dict[str, Any] = {
    "ranks": 4,
    "size": 8,
    "hvpipe": "0.1.0",
    "code": "0123456789ab",
    "build": "TensorFlow 2.21.0",
    "TensorFlow": "2.21.0",
    "Keras": "3.15.1",
    "MPI": "Open MPI v5.0.11",
    "Python": "3.11.7",
    "NumPy": "2.4.6",
    "mpi4py": "4.1.2",
    "engine": "loads",
    "clock_s": 0.0,
    "kernel": "6.1.0",
    "interfaces": [["eth0", "10.0.0.1/24", 10_000]],
    "card": "",
    "memory_bytes": 256_000_000_000,
    "shared_bytes": 64_000_000_000,
    "shared_free_bytes": 63_000_000_000,
    "open_files": 1024,
    "locked_bytes": 8_388_608,
    "cores": 32,
    "cpu": "EPYC",
    "gpus": [],
    "driver": "",
    "ports": "32768-60999, the kernel chooses",
    "ports_free": None,
}


def hosts(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**FACTS, "host": name, **change} for name, change in zip("abcdefgh", changes, strict=False)]


def not_same(*changes: dict[str, Any]) -> dict[str, Row]:
    return {row.name: row for row in compare(hosts(*changes)) if row.state != "same"}


def test_equal_hosts() -> None:
    same = hosts({}, {"interfaces": [["eno1", "10.0.0.2/24", 10_000]], "clock_s": -0.004})
    rows = {row.name: row for row in compare(same)}
    assert rows["clocks"].values == (("at most 4.0 ms apart", ("a", "b")),)
    # A network is the same, whatever the names of the interfaces are.
    assert [row.name for row in rows.values() if row.state != "same"] == ["networks"]
    assert rows["networks"].state == "differs"
    shown = to_text(same, list(rows.values()), "TCP", colours=False)
    assert shown.startswith("hosts and their ranks: a (4), b (4)\ndata between ranks: TCP\n")
    assert "the same on all 2 hosts:\nok  hvpipe         0.1.0\n" in shown
    assert shown.endswith("Nothing that matters differs.")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hvpipe", {"hvpipe": "0.1.1"}),
        ("code", {"code": "ba9876543210"}),
        ("build", {"build": "TensorFlow 2.20.0"}),
        ("TensorFlow", {"TensorFlow": "2.20.0"}),
        ("Keras", {"Keras": "3.14.0"}),
        ("MPI", {"MPI": "Open MPI v5.0.10"}),
        ("Python", {"Python": "3.12.1"}),
        ("engine", {"engine": "does not load: libmpi.so.40"}),
        ("fast card", {"card": "mlx5_0", "locked_bytes": UNLIMITED}),
        ("clocks", {"clock_s": 2.0}),
        ("clocks", {"clock_s": -2.0}),
        ("/dev/shm", {"shared_bytes": 64_000_000, "shared_free_bytes": 64_000_000}),
        ("open files", {"open_files": 256}),
        ("ports", {"ports": "40000-40100", "ports_free": 0}),
        ("GPUs", {"gpus": ["H200"] * 4}),
    ],
)
def test_what_matters(name: str, change: dict[str, Any]) -> None:
    found = not_same({}, {}, change)
    problems = [row.name for row in found.values() if row.state == "problem"]
    assert problems == [name]
    assert found[name].advice
    assert {each for _, names in found[name].values for each in names} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Python", {"Python": "3.11.2"}),
        ("NumPy", {"NumPy": "2.4.5"}),
        ("cores a rank", {"cores": 16}),
        ("CPU", {"cpu": "Xeon"}),
        ("memory", {"memory_bytes": 128_000_000_000}),
        ("kernel", {"kernel": "5.15.0"}),
        ("locked memory", {"locked_bytes": UNLIMITED}),
        ("networks", {"interfaces": [["eth0", "10.0.1.1/24", 10_000]]}),
        ("networks", {"interfaces": [["eth0", "10.0.0.9/32", 10_000]]}),  # of a pod, behind routers
        ("networks", {"interfaces": []}),
        ("open files", {"open_files": UNLIMITED}),
        ("/dev/shm", {"shared_bytes": 32_000_000_000}),
    ],
)
def test_what_may_differ(name: str, change: dict[str, Any]) -> None:
    found = not_same({}, {}, change)
    assert {row.name: row.state for row in found.values()} == {name: "differs"}
    assert [names for _, names in found[name].values] == [("a", "b"), ("c",)]


def test_networks_matter_where_nothing_carries_data() -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"interfaces": [["eth0", "10.0.1.1/24", 0]]})
    rows = {row.name: row for row in compare(hosts(*changes), "b does not answer")}
    assert rows["networks"].state == "differs"
    assert (rows["data"].state, rows["data"].values) == ("problem", (("b does not answer", ("a", "b")),))
    rows = {row.name: row for row in compare(hosts({}, {"interfaces": []}), "b does not answer")}
    assert rows["networks"].state == "problem"
    assert rows["networks"].values[1] == ("none but loopback", ("b",))
    assert "--net" in rows["networks"].advice


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        ([([0, 1], None), ([2, 3], None), ([4, 5], None)], 6),  # bound, as by srun -c 2
        ([(range(64), None)] * 4, 64),
        ([(range(64), 6.5)] * 4, 6),  # in a container with a limit
        ([([0, 1], 0.5), ([2, 3], 0.5)], 1),
    ],
)
def test_cores_of_a_host(ranks: list[tuple[Sequence[int], float | None]], cores: int) -> None:
    assert cores_of_host(ranks) == cores


def test_too_little_matters_on_equal_hosts_too() -> None:
    small = {"shared_bytes": 64_000_000, "shared_free_bytes": 64_000_000, "open_files": 200}
    assert {row.name for row in not_same(small, small).values()} == {"/dev/shm", "open files"}
    alone = {**small, "ranks": 1, "open_files": UNLIMITED}  # ranks of a host share memory
    assert not_same(alone, alone) == {}


def test_a_missing_package_is_named_with_its_host() -> None:
    found = not_same({}, {"Keras": "not installed"})
    assert found["packages"].values == (("no Keras", ("b",)),)
    assert found["Keras"].state == "problem"


def test_cards_pin_memory() -> None:
    card = {"card": "mlx5_0", "interfaces": []}
    assert not_same(card, card).keys() == {"locked memory"}
    free = {**card, "locked_bytes": UNLIMITED}
    assert not_same(free, free) == {}


def test_a_rank_without_its_own_gpu() -> None:
    two = {"gpus": ["H200", "H200"], "driver": "575.1"}
    assert not_same(two, two).keys() == {"GPUs"}
    four = {**two, "gpus": ["H200"] * 4}
    assert not_same(four, {**four, "driver": "570.1"}).keys() == {"GPU driver"}


def test_many_hosts_are_grouped_by_what_they_have() -> None:
    facts = [
        {**FACTS, "host": f"n{number}", "Keras": "3.14.0" if number == 3 else "3.15.1"} for number in range(9)
    ]
    shown = to_text(facts, compare(facts), "TCP", colours=False)
    assert "!!  Keras          3.15.1  n0, n1, n2, n4, n5, n6 and 2 more\n" in shown
    assert "                   3.14.0  n3\n" in shown
    assert shown.endswith("Matters: 1.")
    assert "\033[31m!! \033[0m Keras" in to_text(facts, compare(facts), "TCP", colours=True)


def test_json() -> None:
    found = hosts({}, {"Keras": "3.14.0"})
    told = json.loads(json.dumps(to_json(found, compare(found), "TCP")))
    assert (told["ok"], told["network"], told["hosts"]) == (False, "TCP", found)
    (row,) = (each for each in told["rows"] if each["state"] == "problem")
    assert row["values"] == [{"value": "3.15.1", "hosts": ["a"]}, {"value": "3.14.0", "hosts": ["b"]}]


def test_facts_of_this_machine() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        facts = facts_of_this_host(Settings(ports=range(port - 3, port + 1)))
    assert FACTS.keys() - {"ranks", "size", "cores", "MPI", "clock_s"} <= facts.keys()
    assert facts["ports"] == f"{port - 3}-{port}"
    assert facts["ports_free"] <= 3


def test_ranks_of_horovodrun_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MPI would make each of them a job of one rank, whose hosts are all the same."""
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1")
    assert cli.main(["doctor", "--all-hosts"]) == 2
    assert "Start it without horovodrun" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--hosts", "a:2,b:2"], ["-np", "2"], ["--net", "eth1"], ["--dry-run"]])
def test_options_of_all_hosts_without_it_are_refused(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *option]) == 2
    assert f"Only hvpipe doctor --all-hosts takes {option[0]}\n" in capsys.readouterr().err


def test_options_that_a_rank_cannot_follow_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert cli.main(["doctor", "--all-hosts", "--net", "eth1", "--ports", "40000-40100"]) == 2
    error = capsys.readouterr().err
    assert "a rank that mpirun has started, where --net, --ports would come too late" in error


def test_the_number_of_ranks_is_asked_for_with_all_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--all-hosts"]) == 2
    assert "hvpipe doctor --all-hosts -np 2 ..., or --hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "option", "told"),
    [("", [], "60"), ("300", [], ""), ("300", ["--timeout", "9"], "9")],
)
def test_timeout(
    variable: str,
    option: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HVPIPE_TIMEOUT", variable)
    assert cli.main(["doctor", "--all-hosts", "-np", "2", "--dry-run", *option]) == 0
    _, found, after = capsys.readouterr().out.partition("HVPIPE_TIMEOUT=")
    assert (after.split()[0] if found else "") == told


def test_a_report_amid_what_others_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_ranks, "compared", lambda **_: ("{\n}", True))
    doctor_ranks.main(["--json"])
    report = capsys.readouterr().out
    assert doctor_ranks.split(f"before\n{report}after\n") == ("{\n}\n", True, "before\nafter\n")
    cut = f"before\n{report[:-2]}"
    assert doctor_ranks.split(cut) == ("", None, cut)
