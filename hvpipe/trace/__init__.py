"""Timelines of all ranks, as files, figures and pictures."""
