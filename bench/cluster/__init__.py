"""A virtual cluster on one machine: its hosts are network namespaces whose links and CPU time are limited."""

from bench.cluster.spec import ClusterError, ClusterSpec, equal_hosts, read_spec
from bench.cluster.virtual_cluster import Cluster, clean_up

__all__ = ["Cluster", "ClusterError", "ClusterSpec", "clean_up", "equal_hosts", "read_spec"]
