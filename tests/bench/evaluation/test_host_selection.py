"""Which hosts an evaluation runs on, and what is known of them and of their links."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.cluster import network
from bench.cluster.spec import equal_hosts
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.evaluation.host_selection import HostSelection, chosen_hosts, virtual_clusters
from bench.evaluation.suite import Group, Suite
from bench.hosts import links
from bench.hosts.hosts import ThisHost
from bench.hosts.real_hosts import RealHosts
from bench.rounds.record import Task
from hvpipe.commands.mpirun import Mpirun

SUITE = Suite("mine", "Mine", (Group(Task("digits", 8), "loopback", 2, ("a", "b"), rounds=2),))


def test_without_root_plain_loopback_is_used_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise BenchError("root is wanted")

    monkeypatch.setattr(network, "require_privileges", refuse)
    found = virtual_clusters()
    assert isinstance(found.hosts, ThisHost)
    assert "plain loopback" in found.note
    assert "root is wanted" in found.note
    assert found.facts(SUITE.groups[0]).slowest_bits_per_s is None
    with pytest.raises(BenchError, match="root is wanted"):
        chosen_hosts("2x1gbit", None)  # a request for a cluster never falls back to loopback


def test_root_without_the_right_to_make_namespaces_uses_plain_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: VirtualCluster) -> None:
        raise BenchError("`ip netns add` failed: Operation not permitted.")

    monkeypatch.setattr(VirtualCluster, "up", refuse)
    found = virtual_clusters()
    assert isinstance(found.hosts, ThisHost)
    assert "not permitted" in found.note


def test_a_suite_without_clusters_needs_hosts_or_a_cluster() -> None:
    suite = Suite("mine", "Mine", (Group(Task("digits", 8), "hosts", 1, ("a",)),))
    with pytest.raises(BenchError, match=r"need --hosts or --cluster\. Received: neither"):
        HostSelection().fit(suite)
    spec = equal_hosts(3, "1gbit")
    (group,) = HostSelection(VirtualCluster(spec), "mine.toml").fit(suite).groups
    assert (group.name, group.spec) == ("digits-64/8/mine.toml-3/weak", spec)
    assert [each.ranks for each in HostSelection(RealHosts("a:2,b"), "hosts").fit(suite).groups] == [3]
    assert HostSelection().facts(group).slowest_bits_per_s == 1e9


def answering(monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """Let each host print a text, and end with 1 without one."""

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (host,) = {f"{name}:1" for name in answers} & {*command}
        said = answers[host[0]]
        return subprocess.CompletedProcess(command, int(not said), said, "-----\nssh: no route to host\n")

    monkeypatch.setattr("bench.launch.processes.run", answer)
    monkeypatch.setattr(
        "bench.launch.mpirun.mpirun_of",
        lambda program: Mpirun(f"/{Path(program).name}/mpirun", "Open MPI", (5,)),
    )


def hardware(cores: int, machine: str, sees: bool = True) -> str:
    return json.dumps({"cores": cores, "machine": machine, "sees": sees}) + "\n"


def test_a_host_that_does_not_answer_or_share_the_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, a=hardware(8, "A CPU"), b="", c="a banner\n", d=hardware(8, "A CPU", sees=False))
    for hosts, says in (
        ("a:2,b:2", "Received: host='b', ssh: no route to host"),
        ("a:2,c", "Received: host='c', 'a banner'"),
        ("a:2,d", "share the current folder.*Received: host='d'"),
        ("a:x", "Received: --hosts 'a:x'"),
    ):
        with pytest.raises(BenchError, match=says):
            chosen_hosts(None, hosts)


def test_hosts_are_described_and_have_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(
        monkeypatch, a=hardware(12, "A CPU"), b=hardware(12, "A CPU"), c="a banner\n" + hardware(8, "Another")
    )
    found = chosen_hosts(None, "a:2,b:2,c")
    assert found is not None
    assert found.facts(SUITE.groups[0]).description == "hosts a:2, b:2, c:1; a, b: A CPU; c: Another"
    hosts = found.hosts
    assert hosts is not None
    assert hosts.cores_of_rank() == 6  # 12 cores for two ranks, 8 for one
    command = hosts.mpirun_command(3, ["python", "x.py"])
    assert command[:3] == ["/python/mpirun", "-np", "3"]
    assert command[-2:] == ["python", "x.py"]
    assert "a:2,b:2,c:1" in command
    # The MPI beside the peers' Python starts the peers' ranks.
    command = hosts.mpirun_command(3, ["env", "PYTHONPATH=/x", "/peers/bin/peers-python", "x.py"])
    assert command[0] == "/peers-python/mpirun"
    # With a terminal, processes left on a host end with the connection.
    assert "-tt" in hosts.host_command("a", ["serve"])


def test_links_of_real_hosts_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    # Real hosts: this one, reached without ssh.
    monkeypatch.setattr(RealHosts, "plain_command", lambda self, host, command: command)
    hosts = RealHosts("127.0.0.1:2,localhost")
    (found,) = links.measure(hosts, "hosts", seconds=0.2)
    assert found.second == "localhost"
    assert found.two_way_bits_per_s is not None
    assert found.two_way_bits_per_s > 1e6
    # A host may accept no other connections.
    monkeypatch.setattr(links, "measure_two_way", lambda *_, **__: json.loads("refused"))
    (found,) = links.measure(hosts, "hosts")
    assert (found.why, found.two_way_bits_per_s) == ("Expecting value: line 1 column 1 (char 0)", None)
