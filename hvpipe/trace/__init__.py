"""Timelines: what every rank did when, in files, in figures and in pictures."""
