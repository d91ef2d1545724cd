"""Measured costs: of each layer, of a stage, and of this run's devices and links."""
