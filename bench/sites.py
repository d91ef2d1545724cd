"""Where an evaluation's groups run: hosts that exist, virtual clusters, or plain loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cluster import Cluster
from bench.cluster_network import require_privileges
from bench.cluster_spec import ClusterError, ClusterSpec, HostSpec
from bench.outcome import ClusterFacts
from bench.places import Place, RealHosts
from bench.suites import ANYWHERE, Group, PipelineRun, Suite, SuiteError, cluster_spec, named_cluster

_LOOPBACK, _LOOPBACK_RANKS = "loopback", 2
_LIMITED = HostSpec("h0", rate_bits_per_s=1e9)


@dataclass(frozen=True)
class Sites:
    """Where groups run: on `hosts` that exist, all on one virtual `cluster`, on this host (`loopback`), or
    each on the virtual cluster that it names.

    `no_cpus` says why no host of a virtual cluster can have less than a whole CPU here.
    """

    hosts: RealHosts | None = None
    loopback: bool = False
    note: str = ""
    cluster: tuple[str, ClusterSpec] | None = None
    no_cpus: str = ""

    def fit(self, suite: Suite) -> Suite:
        """The suite as far as it can run here; SuiteError where nothing of it can."""
        if self.hosts is not None:
            fitted = suite.on_one_cluster(ANYWHERE, self.hosts.spec.slots)
        elif self.loopback:
            fitted = replace(suite.on_one_cluster(_LOOPBACK, _LOOPBACK_RANKS), pipelines=())
        elif self.cluster is not None:
            name, spec = self.cluster
            fitted = suite.on_one_cluster(name, spec.slots, spec)
        else:
            fitted = self._without_cpus(suite)
            if any(each.cluster == ANYWHERE for each in (*fitted.groups, *fitted.pipelines)):
                raise SuiteError(
                    "Groups and pipelines without clusters need --hosts or --cluster. Received: neither"
                )
        if not fitted.groups and not fitted.pipelines:
            why = "; ".join((*([self.note] if self.note else []), *fitted.notes))
            raise SuiteError(f"A group at least should be able to run here. Received: none, {why}")
        return fitted

    def _without_cpus(self, suite: Suite) -> Suite:
        """Without what needs hosts whose CPU time is limited, where it cannot be."""
        if not self.no_cpus:
            return suite

        def fits(each: Group | PipelineRun) -> bool:
            return each.spec is None or all(host.cpus is None for host in each.spec.hosts)

        left_out = [each.name for each in (*suite.groups, *suite.pipelines) if not fits(each)]
        return replace(
            suite,
            groups=tuple(filter(fits, suite.groups)),
            pipelines=tuple(filter(fits, suite.pipelines)),
            notes=(*suite.notes, *(f"{name} is left out: {self.no_cpus}" for name in left_out)),
        )

    def facts(self, cluster: str, spec: ClusterSpec | None = None) -> ClusterFacts:
        """What is known of a cluster before anything is measured."""
        if self.loopback:
            return ClusterFacts(cluster, "plain loopback, links without limit", 1)
        if self.hosts is not None:
            return ClusterFacts(cluster, self.hosts.spec.describe(), len(self.hosts.spec.hosts))
        spec = cluster_spec(cluster) if spec is None else spec
        return ClusterFacts(cluster, spec.describe(), len(spec.hosts), spec.slowest_rate_bits_per_s)

    @contextmanager
    def place(self, where: Group | PipelineRun) -> Iterator[Place | None]:
        """The place, up inside the block, and taken down however it is left."""
        if self.hosts is not None:
            yield self.hosts
        elif self.loopback:
            yield None
        else:
            with Cluster(cluster_spec(where.cluster) if where.spec is None else where.spec) as virtual:
                yield virtual


def find_sites(hosts: str | None) -> Sites:
    """Hosts that answer, else virtual clusters, else plain loopback with the reason in a note."""
    if hosts is not None:
        real = RealHosts(hosts)
        real.require_answers()
        note = f"on {real.spec.describe()}; links and CPUs as they are"
        real.ask_machines()
        return Sites(hosts=real, note=note)
    try:
        return Sites(no_cpus=_probe())
    except ClusterError as error:
        return Sites(
            loopback=True,
            note=f"on plain loopback, without limits; clusters and pipelines are left out: {error}",
        )


def one_cluster(text: str) -> Sites:
    """A virtual cluster for all of a suite: a TOML file, or a name; ClusterError where it cannot be built."""
    named = named_cluster(text, Path())
    limits_cpus = any(host.cpus is not None for host in named[1].hosts)
    if (why := _probe()) and limits_cpus:
        raise ClusterError(why)
    return Sites(cluster=named)


def _probe() -> str:
    """Why hosts cannot have a part of a CPU; ClusterError where none can be, or no links with a rate."""
    require_privileges()
    try:
        with Cluster(ClusterSpec((replace(_LIMITED, cpus=1.0),))):
            return ""
    except ClusterError as error:
        with Cluster(ClusterSpec((_LIMITED,))):  # root of a container may not be allowed to
            return str(error)
