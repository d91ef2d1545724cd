"""Kill a rank at a random moment under `hvpipe run --elastic`, and see how the others go on."""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.faults import elastic_job as job
from bench.faults.jobs import Trial, run_to_end

_LIMIT_S = 240.0
_TOLERANCE = 1e-5
"""Between the weights and those of one process: sums are rounded in another order."""


def run_trial(ranks: int, overlap: str, chance: random.Random) -> Trial:
    """Run a job, and kill one of its ranks at a random moment of a random step."""
    step, delay_s = chance.randint(1, job.EPOCHS * (job.BATCHES // ranks)), chance.uniform(0, 0.03)
    kill = f"{chance.randrange(ranks)}:{step}:after{delay_s:.3f}"
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "hvpipe", "run", "--elastic", "--no-summary", "-np", str(ranks)]
        line = [*command, job.__file__, name, overlap, kill]
        ended = run_to_end(line, {"TF_CPP_MIN_LOG_LEVEL": "3"}, _LIMIT_S)
        if ended.code != 0:
            problem = "it hung" if ended.code is None else f"it ended with {ended.code}"
            return Trial(problem, output=f"{overlap} {kill}\n{ended.output}")
        return replace(judge(Path(name), ranks), output=f"{overlap} {kill}")


def judge(folder: Path, ranks: int) -> Trial:
    """Return what is wrong with the ranks or their weights, and the time lost.

    That is the longest of the first gaps between ends of steps after the kill, less a usual step.
    """
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    changes = [(step, size) for step, size, _ in told[0]["changes"]]
    if not changes:  # killed after its last step, or not at all
        return Trial("" if len(told) < ranks else "nothing was broken")
    if len(told) != changes[-1][1]:
        return Trial(f"{len(told)} ranks ended, {changes[-1][1]} should have")
    wanted = job.reference(changes, told[0]["epoch_ends"], ranks)
    for path in folder.glob("rank-*.npz"):
        apart = max(float(np.abs(a - b).max()) for a, b in zip(np.load(path).values(), wanted, strict=True))
        if apart > _TOLERANCE:
            return Trial(f"weights differ by {apart:g} from those of one process: {changes}")
    killed_s = min(float(path.read_text()) for path in folder.glob("killed-*"))
    ends_s = told[0]["ends_s"]
    later_s = [end_s for end_s in ends_s if end_s > killed_s]
    if not later_s:  # no step was left
        return Trial("")
    usual_s = statistics.median(np.diff(ends_s))
    return Trial("", max(0.0, float(max(np.diff([killed_s, *later_s[:3]]))) - usual_s), "")
