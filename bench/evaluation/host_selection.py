"""Which hosts an evaluation's groups run on: real hosts, virtual clusters, or this host alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.cluster import network
from bench.cluster.spec import cluster_spec, equal_hosts
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.evaluation.outcome import ClusterFacts
from bench.evaluation.suite import ANYWHERE, LOOPBACK, Group, Suite
from bench.hosts.hosts import Hosts, ThisHost
from bench.hosts.rank_benchmark import hosts_of


@dataclass(frozen=True)
class HostSelection:
    """The hosts of all groups and their name in results; without `hosts`, each group has the virtual cluster
    that it names.
    """

    hosts: Hosts | None = None
    name: str = ""
    note: str = ""

    def fit(self, suite: Suite) -> Suite:
        """Return the part of the suite that can run here. BenchError if nothing can."""
        if self.hosts is None:
            if any(each.cluster == ANYWHERE for each in suite.groups):
                raise BenchError("Groups without clusters need --hosts or --cluster. Received: neither")
            return suite
        spec = self.hosts.spec if isinstance(self.hosts, VirtualCluster) else None
        fitted = suite.on_one_cluster(self.name, self.hosts.spec.slots, spec)
        if not fitted.groups:
            why = "; ".join((*([self.note] if self.note else []), *fitted.notes))
            raise BenchError(f"At least one group should be able to run here. Received: none, {why}")
        return fitted

    def hosts_of(self, group: Group) -> Hosts:
        return self.hosts or VirtualCluster(group.spec or cluster_spec(group.cluster))

    def facts(self, group: Group) -> ClusterFacts:
        """Return what is known of a group's hosts before anything is measured."""
        hosts = self.hosts_of(group)
        rate = hosts.spec.slowest_rate_bits_per_s
        return ClusterFacts(group.cluster, hosts.describe(), len(hosts.spec.hosts), rate)


def chosen_hosts(cluster: str | None, hosts: str | None) -> HostSelection | None:
    """Return the cluster or the real hosts that options name, for all groups; None if they name neither."""
    if cluster is None and hosts is None:
        return None
    if cluster is not None:
        network.require_privileges()
    found = hosts_of(cluster, hosts)
    if cluster is None:
        return HostSelection(found, ANYWHERE, "on real hosts; links and CPUs as they are")
    return HostSelection(found, Path(cluster).name)


def virtual_clusters() -> HostSelection:
    """Return a virtual cluster for each group, or this host with the reason in a note."""
    try:
        with VirtualCluster(equal_hosts(1, "1gbit")):  # root in a container may lack the rights
            return HostSelection()
    except BenchError as error:
        return this_host(note=f"on plain loopback, without limits; clusters are left out: {error}")


def this_host(ranks: int = 2, note: str = "") -> HostSelection:
    return HostSelection(ThisHost(ranks), LOOPBACK, note)
