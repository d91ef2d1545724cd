"""The time of one training step."""
