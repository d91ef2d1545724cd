"""What Slurm says of the allocation that `hvpipe run` is in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

_LIMIT_S = 30.0


def slots(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the number of tasks of each node, as in SLURM_TASKS_PER_NODE=2(x3),1; () outside of Slurm."""
    found: list[int] = []
    for part in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return ()
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)
