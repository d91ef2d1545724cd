"""Collectives on tensors that ranks call by name: eager and in graphs, in any order, on any set of ranks."""
