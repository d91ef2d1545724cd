"""Measurements of hvpipe: a virtual cluster, all-reduce bandwidth, and the time of a training step."""
