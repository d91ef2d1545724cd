"""The error that every benchmark reports in one line instead of a traceback."""

from __future__ import annotations

from hvpipe.errors import HvpipeError


class BenchError(HvpipeError):
    """A cluster, suite, file or command line that cannot be used."""
