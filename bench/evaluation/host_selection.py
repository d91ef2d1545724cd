"""Which hosts an evaluation's groups run on: real hosts, virtual clusters, or plain loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import network
from bench.cluster.spec import ClusterSpec, cluster_spec, equal_hosts, named_cluster
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.evaluation.outcome import ClusterFacts
from bench.evaluation.suite import ANYWHERE, LOOPBACK, Group, Suite
from bench.hosts.real_hosts import Hosts, RealHosts


@dataclass(frozen=True)
class HostSelection:
    """The hosts of all groups: real `hosts`, one virtual `cluster` for all, this host (`loopback`), or for
    each group the virtual cluster that it names.
    """

    hosts: RealHosts | None = None
    loopback: bool = False
    note: str = ""
    cluster: tuple[str, ClusterSpec] | None = None
    loopback_ranks: int = 2

    def fit(self, suite: Suite) -> Suite:
        """Return the part of the suite that can run here. BenchError if nothing can."""
        fitted = suite
        if self.hosts is not None:
            fitted = suite.on_one_cluster(ANYWHERE, self.hosts.spec.slots)
        elif self.loopback:
            fitted = suite.on_one_cluster(LOOPBACK, self.loopback_ranks)
        elif self.cluster is not None:
            name, spec = self.cluster
            fitted = suite.on_one_cluster(name, spec.slots, spec)
        elif any(each.cluster == ANYWHERE for each in suite.groups):
            raise BenchError("Groups without clusters need --hosts or --cluster. Received: neither")
        if not fitted.groups:
            why = "; ".join((*([self.note] if self.note else []), *fitted.notes))
            raise BenchError(f"At least one group should be able to run here. Received: none, {why}")
        return fitted

    def facts(self, cluster: str, spec: ClusterSpec | None = None) -> ClusterFacts:
        """Return what is known of a cluster before anything is measured."""
        if self.loopback:
            return ClusterFacts(cluster, "plain loopback, links without limit", 1)
        if self.hosts is not None:
            return ClusterFacts(cluster, self.hosts.spec.describe(), len(self.hosts.spec.hosts))
        spec = cluster_spec(cluster) if spec is None else spec
        return ClusterFacts(cluster, spec.describe(), len(spec.hosts), spec.slowest_rate_bits_per_s)

    @contextmanager
    def bring_up(self, where: Group) -> Iterator[Hosts | None]:
        """Yield the hosts, up inside the block. They are taken down in any case."""
        if self.hosts is not None:
            yield self.hosts
        elif self.loopback:
            yield None
        else:
            with VirtualCluster(cluster_spec(where.cluster) if where.spec is None else where.spec) as virtual:
                yield virtual


def select_hosts(hosts: str | None) -> HostSelection:
    """Return real hosts that answer, else virtual clusters, else plain loopback with the reason in a note."""
    if hosts is not None:
        real = RealHosts(hosts)
        note = f"on {real.spec.describe()}; links and CPUs as they are"
        real.require_answers()
        return HostSelection(hosts=real, note=note)
    try:
        with VirtualCluster(equal_hosts(1, "1gbit")):  # root in a container may lack the rights
            return HostSelection()
    except BenchError as error:
        note = f"on plain loopback, without limits; clusters are left out: {error}"
        return HostSelection(loopback=True, note=note)


def one_cluster(text: str) -> HostSelection:
    """Return one virtual cluster for all of a suite, from a TOML file or a name. BenchError without root."""
    network.require_privileges()
    return HostSelection(cluster=named_cluster(text, Path()))
