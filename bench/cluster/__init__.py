"""A virtual cluster on one machine."""
