"""The inputs of planning: devices, links, and the cost of each layer."""
