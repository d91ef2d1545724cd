"""Measurements of hvpipe: a virtual cluster, all-reduce bandwidth, and the time of a training step."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
