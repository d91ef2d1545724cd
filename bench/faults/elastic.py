"""Kill a rank at a random moment under `hvpipe run --elastic`, and see how the others go on."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.faults import elastic_job as job

_LIMIT_S = 240.0
_TOLERANCE = 1e-5
"""Between the weights and those of one process: sums are rounded in another order."""


@dataclass(frozen=True)
class Going:
    """How a job with one kill ended.

    Attributes:
        lost_s: The longest of the first gaps between ends of steps after the kill, less a usual step.
        problem: "" if the others went on with the right weights.
        output: What the job printed, if it failed.
    """

    lost_s: float
    problem: str
    output: str = ""


def run_trial(ranks: int, overlap: str, chance: random.Random) -> Going:
    """Run a job, and kill one of its ranks at a random moment of a random step."""
    step, delay_s = chance.randint(1, job.EPOCHS * (job.BATCHES // ranks)), chance.uniform(0, 0.03)
    kill = f"{chance.randrange(ranks)}:{step}:after{delay_s:.3f}"
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "hvpipe", "run", "--elastic", "--no-summary", "-np", str(ranks)]
        try:
            done = subprocess.run(
                [*command, job.__file__, name, overlap, kill],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Going(0.0, "it hung", f"{overlap} {kill}")
        if done.returncode != 0:
            return Going(0.0, f"it ended with {done.returncode}", f"{overlap} {kill}\n{done.stdout}")
        going = judge(Path(name), ranks)
        return Going(going.lost_s, going.problem, f"{overlap} {kill}")


def judge(folder: Path, ranks: int) -> Going:
    """Return the time lost, and what is wrong with the ranks or their weights."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    changes = [(step, size) for step, size, _ in told[0]["changes"]]
    if not changes:  # killed after its last step, or not at all
        return Going(0.0, "" if len(told) < ranks else "nothing was broken")
    if len(told) != changes[-1][1]:
        return Going(0.0, f"{len(told)} ranks ended, {changes[-1][1]} should have")
    wanted = job.reference(changes, told[0]["epoch_ends"], ranks)
    for path in folder.glob("rank-*.npz"):
        apart = max(float(np.abs(a - b).max()) for a, b in zip(np.load(path).values(), wanted, strict=True))
        if apart > _TOLERANCE:
            return Going(0.0, f"weights differ by {apart:g} from those of one process: {changes}")
    killed_s = min(float(path.read_text()) for path in folder.glob("killed-*"))
    ends_s = told[0]["ends_s"]
    later_s = [end_s for end_s in ends_s if end_s > killed_s]
    if not later_s:  # no step was left
        return Going(0.0, "")
    usual_s = statistics.median(np.diff(ends_s))
    return Going(max(0.0, float(max(np.diff([killed_s, *later_s[:3]]))) - usual_s), "")
