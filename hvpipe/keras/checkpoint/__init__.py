"""Checkpoints of training: copied between steps, written in the background, resumed at the exact batch."""
