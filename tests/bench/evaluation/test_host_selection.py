"""Which hosts an evaluation runs on, and what is known of them and of their links."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.cluster import link_rate
from bench.cluster.spec import ClusterSpec, HostSpec, equal_hosts
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.evaluation import host_selection
from bench.evaluation.host_selection import HostSelection, one_cluster, select_hosts
from bench.evaluation.suite import Group, Suite
from bench.hosts import links
from bench.hosts.real_hosts import RealHosts
from bench.launch import mpirun
from bench.rounds.record import Task

SUITE = Suite("mine", "Mine", (Group(Task("digits", 8), "loopback", 2, ("a", "b"), rounds=2),))


def test_without_root_plain_loopback_is_used_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise BenchError("root is wanted")

    monkeypatch.setattr(host_selection, "require_privileges", refuse)
    found = select_hosts(None)
    assert found.loopback
    assert "plain loopback" in found.note
    assert "root is wanted" in found.note
    with found.bring_up(SUITE.groups[0]) as hosts:
        assert hosts is None
    assert found.facts("loopback").slowest_bits_per_s is None
    with pytest.raises(BenchError, match="root is wanted"):
        one_cluster("2x1gbit")  # a request for a cluster never falls back to loopback


def test_root_without_the_right_to_make_namespaces_uses_plain_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: VirtualCluster) -> None:
        raise BenchError("`ip netns add` failed: Operation not permitted.")

    monkeypatch.setattr(host_selection, "require_privileges", lambda: None)
    monkeypatch.setattr(VirtualCluster, "up", refuse)
    found = select_hosts(None)
    assert found.loopback
    assert "not permitted" in found.note


@pytest.mark.parametrize(("lacking", "loopback"), [("rate", True), ("cpus", False)])
def test_limits_that_do_not_work_here_are_noted_once(
    lacking: str, loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def up(self: VirtualCluster) -> None:
        (host,) = self.spec.hosts
        if lacking == "rate" and host.rate_bits_per_s is not None:
            raise BenchError("no token bucket")
        if lacking == "cpus" and host.cpus is not None:
            raise BenchError("no cpu controller")

    monkeypatch.setattr(host_selection, "require_privileges", lambda: None)
    monkeypatch.setattr(VirtualCluster, "up", up)
    monkeypatch.setattr(VirtualCluster, "down", lambda self: None)
    found = select_hosts(None)
    assert found.loopback == loopback
    if loopback:
        assert "no token bucket" in found.note
        return
    half = ClusterSpec((HostSpec("h0", cpus=0.5), HostSpec("h1")))
    limited = Group(Task("digits", 8), "half", 2, ("a",), spec=half)
    fitted = found.fit(Suite("mine", "Mine", (*SUITE.groups, limited)))
    assert fitted.groups == SUITE.groups
    assert fitted.notes == ("digits-64/8/half-2/weak is left out: no cpu controller",)
    with pytest.raises(BenchError, match="no cpu controller"):
        one_cluster("slow-cpu")
    assert one_cluster("2x1gbit").cluster == ("2x1gbit", equal_hosts(2, "1gbit"))


def test_a_suite_without_clusters_needs_hosts_or_a_cluster() -> None:
    suite = Suite("mine", "Mine", (Group(Task("digits", 8), "hosts", 1, ("a",)),))
    with pytest.raises(BenchError, match=r"need --hosts or --cluster\. Received: neither"):
        HostSelection().fit(suite)
    spec = equal_hosts(3, "1gbit")
    (group,) = HostSelection(cluster=("mine.toml", spec)).fit(suite).groups
    assert (group.name, group.spec) == ("digits-64/8/mine.toml-3/weak", spec)
    assert [each.ranks for each in HostSelection(hosts=RealHosts("a:2,b")).fit(suite).groups] == [3]
    assert HostSelection().facts("mine.toml", spec).slowest_bits_per_s == 1e9


def test_a_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        status = 1 if "b:1" in command else 0
        said = "" if "d:1" in command else "a banner\n12\n" if "a:1" in command else "8\n"
        return subprocess.CompletedProcess(command, status, said, "-----\nssh: no route to host\n")

    monkeypatch.setattr("bench.launch.mpirun.run", answer)
    monkeypatch.setattr("bench.launch.mpirun.find_mpirun", lambda program: f"/{Path(program).name}/mpirun")
    monkeypatch.setattr("hvpipe.commands.mpirun.ask_version", lambda _: "mpirun (Open MPI) 5.0.11")
    with pytest.raises(BenchError, match=r"Received: host='b', ssh: no route to host"):
        select_hosts("a:2,b:2")
    with pytest.raises(BenchError, match="Received: --hosts 'a:x'"):
        select_hosts("a:x")
    hosts = RealHosts("a:2,c")
    hosts.require_answers()
    assert hosts.spec.slots == 3
    assert hosts.cores_of_rank() == 6  # 12 cores for two ranks, 8 for one
    silent = RealHosts("a,d")
    silent.require_answers()
    with pytest.raises(BenchError, match=r"or give --threads. Received: host='d', ''"):
        silent.cores_of_rank()
    command = hosts.mpirun_command(3, ["python", "x.py"])
    assert command[:3] == ["/python/mpirun", "-np", "3"]
    assert command[-2:] == ["python", "x.py"]
    assert "a:2,c:1" in command
    # The MPI beside the peers' Python starts the peers' ranks.
    command = hosts.mpirun_command(3, ["env", "PYTHONPATH=/x", "/peers/bin/peers-python", "x.py"])
    assert command[0] == "/peers-python/mpirun"
    # With a terminal, processes left on a host end with the connection.
    assert "-tt" in hosts.host_command("a", ["serve"])


def test_a_host_that_does_not_share_the_current_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if command[-2] != "ls":
            return subprocess.CompletedProcess(command, 0, "8\n", "")
        there = Path(command[-1])
        assert there.parent == tmp_path
        assert there.exists()
        status = 2 if "b:1" in command else 0
        return subprocess.CompletedProcess(command, status, "", "ls: cannot access it\n")

    monkeypatch.setattr("bench.launch.mpirun.run", answer)
    monkeypatch.setattr("hvpipe.commands.mpirun.ask_version", lambda _: "mpirun (Open MPI) 5.0.11")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BenchError, match=r"the current folder.*Received: host='b'.*ls: cannot access it"):
        select_hosts("a:2,b:2")
    assert list(tmp_path.iterdir()) == []
    RealHosts("a:2,c").require_answers()


def test_the_hardware_of_hosts_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "bench.hosts.hardware" not in command:
            return subprocess.CompletedProcess(command, 0, "8\n", "")
        if "d:1" in command:
            raise subprocess.TimeoutExpired(command, 60)
        said = "a banner\n64 cores (Another CPU)\n" if "c:1" in command else "8 cores (A CPU)\n"
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr("bench.launch.mpirun.run", answer)
    monkeypatch.setattr("hvpipe.commands.mpirun.ask_version", lambda _: "mpirun (Open MPI) 5.0.11")
    found = select_hosts("a:2,b:2,c,d")
    assert found.note == "on hosts a:2, b:2, c:1, d:1; links and CPUs as they are"
    described = found.facts("hosts").description
    assert described == "hosts a:2, b:2, c:1, d:1; a, b: 8 cores (A CPU); c: 64 cores (Another CPU)"


def test_links_of_real_hosts_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    # Real hosts: this one, reached without ssh.
    monkeypatch.setattr(RealHosts, "host_command", lambda self, host, command: command)
    monkeypatch.setattr(
        RealHosts, "execute", lambda self, host, command, timeout_s: mpirun.run(command, timeout_s=timeout_s)
    )
    monkeypatch.setattr(link_rate, "_PORT", 20201)
    hosts = RealHosts("a:2,localhost")
    (found,) = links.measure(hosts, "hosts", seconds=0.2)
    assert found.second == "localhost"
    assert found.two_way_bits_per_s is not None
    assert found.two_way_bits_per_s > 1e6
    # A host may accept no other connections.
    monkeypatch.setattr(links, "measure_two_way", lambda *_, **__: json.loads("refused"))
    (found,) = links.measure(hosts, "hosts")
    assert (found.why, found.two_way_bits_per_s) == ("Expecting value: line 1 column 1 (char 0)", None)
