"""Starts processes and ranks, and ends everything that was started."""
