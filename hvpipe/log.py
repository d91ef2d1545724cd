"""hvpipe's log: how much of it is shown, where HVPIPE_LOG_LEVEL says so."""

from __future__ import annotations

import logging

logger = logging.getLogger("hvpipe")


def show(level: str | None, rank: int) -> None:
    """Show what is logged at `level` and above: on stderr, where the program has set up no logging itself.

    None leaves all to Python, which shows warnings and errors.
    """
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
        logger.addHandler(handler)
