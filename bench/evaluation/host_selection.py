"""Which hosts an evaluation's groups run on: real hosts, virtual clusters, or plain loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cluster.network import require_privileges
from bench.cluster.spec import ClusterSpec, HostSpec, cluster_spec, named_cluster
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.evaluation.outcome import ClusterFacts
from bench.evaluation.suite import (
    ANYWHERE,
    LOOPBACK,
    Group,
    Suite,
)
from bench.hosts.real_hosts import Hosts, RealHosts

_LIMITED = HostSpec("h0", rate_bits_per_s=1e9)


@dataclass(frozen=True)
class HostSelection:
    """The hosts of all groups: real `hosts`, one virtual `cluster` for all, this host (`loopback`), or for
    each group the virtual cluster that it names.

    `counts` are numbers of real hosts: groups that show scaling also run on only that many. `no_cpus` is the
    reason why no host of a virtual cluster can have less than a whole CPU here.
    """

    hosts: RealHosts | None = None
    loopback: bool = False
    note: str = ""
    cluster: tuple[str, ClusterSpec] | None = None
    no_cpus: str = ""
    counts: tuple[int, ...] = ()
    loopback_ranks: int = 2

    def on_counts(self, text: str) -> HostSelection:
        """Return the same with the host counts of a text such as "1,2,4", and with all hosts.

        BenchError if there are fewer hosts than a count.
        """
        if self.hosts is None:
            raise BenchError(f"--host-counts goes with --hosts. Received: --host-counts {text!r} alone")
        there = len(self.hosts.spec.hosts)
        words = [word.strip() for word in text.split(",")]
        if not all(word.isdecimal() and 1 <= int(word) <= there for word in words):
            raise BenchError(
                f"Counts should be numbers from 1 to {there}, the number of --hosts, as in 1,2. "
                f"Received: --host-counts {text!r}"
            )
        return replace(self, counts=tuple(sorted({*map(int, words), there})))

    def fit(self, suite: Suite) -> Suite:
        """Return the part of the suite that can run here. BenchError if nothing can."""
        if self.hosts is not None:
            fitted = self._on_hosts(suite, self.hosts)
        elif self.loopback:
            fitted = suite.on_one_cluster(LOOPBACK, self.loopback_ranks)
        elif self.cluster is not None:
            name, spec = self.cluster
            fitted = suite.on_one_cluster(name, spec.slots, spec)
        else:
            fitted = self._without_cpus(suite)
            if any(each.cluster == ANYWHERE for each in fitted.groups):
                raise BenchError("Groups without clusters need --hosts or --cluster. Received: neither")
        if not fitted.groups:
            why = "; ".join((*([self.note] if self.note else []), *fitted.notes))
            raise BenchError(f"At least one group should be able to run here. Received: none, {why}")
        return fitted

    def _on_hosts(self, suite: Suite, hosts: RealHosts) -> Suite:
        """Run all groups on all hosts, and those that show scaling on fewer hosts as well."""
        names = [_of_count(count) for count in self.counts]
        if not names:
            return suite.on_one_cluster(ANYWHERE, hosts.spec.slots)
        if all(each.cluster in names for each in suite.groups):
            return suite  # already fitted
        scaling = tuple(each for each in suite.groups if not (each.task.shares or each.task.epochs))
        part = replace(suite, groups=scaling)
        fewer = [
            part.on_one_cluster(name, hosts.first(count).spec.slots)
            for name, count in zip(names[:-1], self.counts[:-1], strict=True)
        ]
        most = suite.on_one_cluster(names[-1], hosts.spec.slots)
        groups = tuple(group for each in (*fewer, most) for group in each.groups)
        notes = tuple(dict.fromkeys(note for each in (*fewer, most) for note in each.notes))
        return replace(most, groups=groups, notes=notes)

    def _hosts_of(self, cluster: str) -> RealHosts | None:
        count = next((count for count in self.counts if _of_count(count) == cluster), None)
        return self.hosts if self.hosts is None or count is None else self.hosts.first(count)

    def _without_cpus(self, suite: Suite) -> Suite:
        """Leave out groups that need hosts with limited CPU time, if it cannot be limited."""
        if not self.no_cpus:
            return suite

        def fits(each: Group) -> bool:
            return each.spec is None or all(host.cpus is None for host in each.spec.hosts)

        left_out = [each.name for each in suite.groups if not fits(each)]
        return replace(
            suite,
            groups=tuple(filter(fits, suite.groups)),
            notes=(*suite.notes, *(f"{name} is left out: {self.no_cpus}" for name in left_out)),
        )

    def facts(self, cluster: str, spec: ClusterSpec | None = None) -> ClusterFacts:
        """Return what is known of a cluster before anything is measured."""
        if self.loopback:
            return ClusterFacts(cluster, "plain loopback, links without limit", 1)
        if (hosts := self._hosts_of(cluster)) is not None:
            return ClusterFacts(cluster, hosts.spec.describe(), len(hosts.spec.hosts))
        spec = cluster_spec(cluster) if spec is None else spec
        return ClusterFacts(cluster, spec.describe(), len(spec.hosts), spec.slowest_rate_bits_per_s)

    @contextmanager
    def bring_up(self, where: Group) -> Iterator[Hosts | None]:
        """Yield the hosts, up inside the block. They are taken down in any case."""
        if (hosts := self._hosts_of(where.cluster)) is not None:
            yield hosts
        elif self.loopback:
            yield None
        else:
            with VirtualCluster(cluster_spec(where.cluster) if where.spec is None else where.spec) as virtual:
                yield virtual


def _of_count(count: int) -> str:
    """Return the name of the first `count` hosts in results, of the form of 2x1gbit for the scaling plots."""
    return f"{count}xhosts"


def select_hosts(hosts: str | None) -> HostSelection:
    """Return real hosts that answer, else virtual clusters, else plain loopback with the reason in a note."""
    if hosts is not None:
        real = RealHosts(hosts)
        real.require_answers()
        note = f"on {real.spec.describe()}; links and CPUs as they are"
        real.ask_machines()
        return HostSelection(hosts=real, note=note)
    try:
        return HostSelection(no_cpus=_probe())
    except BenchError as error:
        return HostSelection(
            loopback=True,
            note=f"on plain loopback, without limits; clusters are left out: {error}",
        )


def one_cluster(text: str) -> HostSelection:
    """Return one virtual cluster for all of a suite, from a TOML file or a name. BenchError if it cannot be
    built.
    """
    named = named_cluster(text, Path())
    limits_cpus = any(host.cpus is not None for host in named[1].hosts)
    if (why := _probe()) and limits_cpus:
        raise BenchError(why)
    return HostSelection(cluster=named)


def _probe() -> str:
    """Return why hosts cannot have a part of a CPU, or "". BenchError if no cluster with rates can be
    built.
    """
    require_privileges()
    try:
        with VirtualCluster(ClusterSpec((replace(_LIMITED, cpus=1.0),))):
            return ""
    except BenchError as error:
        with VirtualCluster(ClusterSpec((_LIMITED,))):  # root in a container may lack the rights
            return str(error)
