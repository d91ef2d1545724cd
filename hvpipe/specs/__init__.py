"""The inputs of planning: devices, links, and the cost of each layer."""

from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile, read_pipedream

__all__ = ["Cluster", "Device", "Host", "LayerCost", "Link", "Profile", "equal_cluster", "read_pipedream"]
