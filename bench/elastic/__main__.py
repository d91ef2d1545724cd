"""`python -m bench.elastic`: kill random ranks at random moments, and see how training goes on.

The time lost: the longest of the first gaps between ends of steps after the kill, less a usual step.
"""

from __future__ import annotations

import argparse
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

from bench.elastic import job

_LIMIT_S = 240.0
_TOLERANCE = 1e-5
"""Between the weights and those of one process: sums are rounded in another order."""


@dataclass(frozen=True)
class Trial:
    """How a job with one kill ended: `lost_s` is None if it did not go on with the right weights."""

    kill: str
    lost_s: float | None
    why: str


def main() -> int:
    """Run the trials."""
    parser = argparse.ArgumentParser(prog="python -m bench.elastic", description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("-np", dest="ranks", type=int, default=4)
    parser.add_argument("--overlap", default="none,step", help="taken in turn")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice, overlaps = random.Random(options.seed), options.overlap.split(",")
    trials = []
    for number in range(options.trials):
        trial = run_trial(options.ranks, overlaps[number % len(overlaps)], dice)
        trials.append(trial)
        print(f"{number + 1:4} {trial.kill:24} {trial.why}", flush=True)
    lost = sorted(trial.lost_s for trial in trials if trial.lost_s is not None)
    print(f"{len(lost)} of {len(trials)} jobs went on with the right weights on the ranks that were left")
    if lost:
        print(f"time lost: median {statistics.median(lost):.2f} s, worst {lost[-1]:.2f} s")
    return 0 if len(lost) == len(trials) else 1


def run_trial(ranks: int, overlap: str, dice: random.Random) -> Trial:
    """Run a job, and kill one of its ranks at a random moment of a random step."""
    step, delay_s = dice.randint(1, job.EPOCHS * (job.BATCHES // ranks)), dice.uniform(0, 0.03)
    kill = f"{dice.randrange(ranks)}:{step}:after{delay_s:.3f}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "hvpipe", "run", "--elastic", "--no-summary", "-np", str(ranks)]
        try:
            done = subprocess.run(
                [*command, job.__file__, name, overlap, kill],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Trial(f"{overlap} {kill}", None, "hung")
        if done.returncode != 0:
            return Trial(f"{overlap} {kill}", None, f"exit code {done.returncode}: {done.stderr[-2000:]}")
        return Trial(f"{overlap} {kill}", *judge(folder, ranks))


def judge(folder: Path, ranks: int) -> tuple[float | None, str]:
    """Return the time lost, None if the weights are not right, and what happened."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    changes = [(step, size) for step, size, _ in told[0]["changes"]]
    if not changes:
        return (0.0, "killed after its last step") if len(told) < ranks else (None, "nobody was killed")
    if len(told) != changes[-1][1]:
        return None, f"{len(told)} ranks ended, {changes[-1][1]} should have"
    wanted = job.reference(changes, told[0]["epoch_ends"], ranks)
    for path in folder.glob("rank-*.npz"):
        apart = max(float(np.abs(a - b).max()) for a, b in zip(np.load(path).values(), wanted, strict=True))
        if apart > _TOLERANCE:
            return None, f"weights differ by {apart:g} from those of one process: {changes}"
    killed_s = min(float(path.read_text()) for path in folder.glob("killed-*"))
    ends_s = told[0]["ends_s"]
    later_s = [end_s for end_s in ends_s if end_s > killed_s]
    if not later_s:  # no step was left
        return 0.0, f"went on after step {changes[0][0]}, the last one"
    usual_s = statistics.median(np.diff(ends_s))
    lost_s = max(0.0, float(max(np.diff([killed_s, *later_s[:3]]))) - usual_s)
    return lost_s, f"went on after step {changes[0][0]}, {lost_s:.2f} s lost"


if __name__ == "__main__":
    sys.exit(main())
