"""hvpipe's logger, and the level that HVPIPE_LOG_LEVEL sets for it."""

from __future__ import annotations

import logging

logger = logging.getLogger("hvpipe")


def set_log_level(level: str | None, rank: int) -> None:
    """Log at this level and above, on stderr if the program has set up no logging itself.

    Args:
        level: "debug", "info", "warning" or "error". None changes nothing: Python shows warnings and errors.
        rank: This rank's number, shown in each line.
    """
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
        logger.addHandler(handler)
