"""A virtual cluster on one machine: its hosts are network namespaces with limited links and CPU time."""

from bench.cluster.spec import equal_hosts
from bench.cluster.virtual_cluster import VirtualCluster

__all__ = ["VirtualCluster", "equal_hosts"]
