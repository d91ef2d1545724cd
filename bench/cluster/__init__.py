"""A virtual cluster on one machine: its hosts are network namespaces with limited links and CPU time."""

from bench.cluster.spec import ClusterSpec, equal_hosts, read_spec
from bench.cluster.virtual_cluster import VirtualCluster, clean_up
from bench.errors import BenchError

__all__ = ["BenchError", "ClusterSpec", "VirtualCluster", "clean_up", "equal_hosts", "read_spec"]
