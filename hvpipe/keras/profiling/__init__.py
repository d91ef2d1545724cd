"""Measured costs: of each layer, of a stage, of the devices and links of these ranks."""
