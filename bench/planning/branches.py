"""What parallel branches on different devices could gain at most, by the simulated step.

``python -m bench.planning.branches``. hvpipe's stages are runs of the layers in one order. If branches ran
side by side, a micro-batch would pass fewer devices one after the other. This splits each model ideally: into
equal stages without transfers, in as few levels as its longest path of layers allows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hvpipe.forecast.simulate import StageTimes, simulate
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import Dataflow
from hvpipe.schedule.schedule import Schedule, make_schedule
from hvpipe.specs.profile import Profile

_PROFILES = Path(__file__).parents[2] / "tests" / "data" / "profiles"
_MODELS = ("alexnet", "gnmt", "inception_v3", "resnet50", "vgg16")


def longest_share(profile: Profile) -> float:
    """Return the share of the compute time, 0 to 1, that lies on the longest path of layers."""
    path_s: list[float] = []
    for layer, makers in zip(profile.layers, profile.makers, strict=True):
        path_s.append(layer.compute_s + max((path_s[maker] for maker in makers), default=0.0))
    return max(path_s) / profile.compute_s


def levelled(devices: int, levels: int, microbatches: int) -> tuple[Schedule, Dataflow]:
    """Return 1F1B on devices in levels; each device sends to all devices of the next level."""
    level_of = [device * levels // devices for device in range(devices)]
    orders = make_schedule("1f1b", levels, microbatches).actions
    actions = tuple(
        tuple(Action(action.kind, action.microbatch, device) for action in orders[level])
        for device, level in enumerate(level_of)
    )
    pairs = product(range(devices), repeat=2)
    edges = (pair for pair in pairs if level_of[pair[1]] == level_of[pair[0]] + 1)
    return Schedule("levels", devices, microbatches, actions), Dataflow(devices, tuple(edges))


def gain(share: float, devices: int, microbatches: int) -> float:
    """Return how many times as long the step of a chain is as that of ideal branches."""
    levels = max(1, math.ceil(share * devices - 1e-9))
    costs = [StageTimes(1.0, 2.0)] * devices
    chain_s = simulate(make_schedule("1f1b", devices, microbatches), costs).makespan_s
    schedule, dataflow = levelled(devices, levels, microbatches)
    return chain_s / simulate(schedule, costs, dataflow).makespan_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print the gains of five models; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning.branches", description=__doc__)
    parser.parse_args(argv)
    cases = list(product((4, 8), (8, 32)))
    print(f"{'model':14}{'longest path':>14}", *(f"{p} devices, m = {m:2}" for p, m in cases), sep="  ")
    for model in _MODELS:
        share = longest_share(Profile.read(_PROFILES / f"{model}.txt"))
        gains = [f"{gain(share, devices, microbatches):17.3f}x" for devices, microbatches in cases]
        print(f"{model:14}{share:14.1%}", *gains, sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
