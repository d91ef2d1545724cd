"""The error that every benchmark reports in one line instead of a traceback."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """Raised when hosts, real or virtual, cannot be described, built, reached or used."""
