"""The chosen plan of small random cases against every plan that the tool offers, by the simulated step.

``python -m bench.planning.brute_force --cases 200``. ``--moves`` leaves out the search of every layout, to
look at what larger cases rely on. ``--larger`` plans 24 layers on 8 devices, which have too many plans to
try, and compares with a search of ten times the work.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from statistics import geometric_mean
from unittest import mock

from hvpipe.commands.plan_request import PlanRequest, PlanResult, make_plan
from hvpipe.errors import PlanError
from hvpipe.forecast.data_parallel import forecast_data_parallel
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import Group
from hvpipe.search import exhaustive
from hvpipe.search.choice import candidates, find
from hvpipe.search.judge import Judge
from hvpipe.search.layout import StageLayout
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import BUDGET
from hvpipe.specs.cluster import Cluster, Device, Host, Link
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile


def random_case(seed: int, layers: int, devices: int) -> PlanRequest:
    """Draw layers, skips, branches, micro-batches, and hosts that are equal, grouped or measured."""
    draw = random.Random(f"{seed} {layers} {devices}")
    costs = tuple(
        LayerCost(
            f"l{i}",
            forward_s=(seconds := draw.uniform(0.1, 1)),
            backward_s=2 * seconds * draw.uniform(0.5, 1.5),
            weight_bytes=draw.choice([0, 10**6, 10**7, 10**8]),
            output_bytes=int(10 ** draw.uniform(4, 7.5)),
            saved_bytes=int(10 ** draw.uniform(5, 7.5)),
            update_s=draw.choice([0.0, 0.05]),
            weight_share=draw.choice([None, 0.3, 0.6]),
        )
        for i in range(layers)
    )
    skips = {(a, b) for a in range(layers) for b in range(a + 2, layers) if draw.random() < 0.08}
    profile = Profile(costs, tuple(sorted(skips | {(i, i + 1) for i in range(layers - 1)})))
    cluster, microbatches = _cluster(draw, profile, devices), draw.choice([4, 6, 8])
    if draw.random() < 0.3:
        profile, cluster = _with_types(draw, profile, cluster)
    if draw.random() < 0.3:  # branches
        edges = (edge for edge in profile.edges if edge[1] - edge[0] > 1 or draw.random() < 0.7)
        profile = replace(profile, edges=tuple(edges))
    return PlanRequest(profile, cluster, PipeliningChoice(microbatches=microbatches))


def _with_types(draw: random.Random, profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Give the last device a type, on which each layer is faster or slower by another factor."""
    layers = [
        replace(one, time_s={"cpu": (one.forward_s * by, one.backward_s * by)})
        for one, by in ((one, draw.choice([0.5, 1.0, 2.0, 4.0])) for one in profile.layers)
    ]
    last = cluster.hosts[-1]
    typed = replace(last, devices=(*last.devices[:-1], replace(last.devices[-1], type="cpu")))
    return replace(profile, layers=tuple(layers)), replace(cluster, hosts=(*cluster.hosts[:-1], typed))


def _cluster(draw: random.Random, profile: Profile, devices: int) -> Cluster:
    whole_bytes = sum(layer.state_bytes + 2 * layer.saved_bytes for layer in profile.layers)
    limited = draw.random() < 0.5
    made = [
        Device(
            f"d{i}",
            draw.choice((1.0, 1.0, 0.5, 0.3)),
            int(whole_bytes * draw.uniform(0.3, 1)) if limited else None,
        )
        for i in range(devices)
    ]
    rate = 10 ** draw.uniform(7, 9)
    apart = tuple(Host(d.name, (d,), Link(1e-3, rate * draw.choice([1, 0.3]))) for d in made)
    pairs = tuple(
        (a.name, b.name, Link(1e-3, rate * draw.choice([1, 0.3, 0.1]))) for a, b in combinations(made, 2)
    )
    together = (Host("x", tuple(made[:2]), Link(1e-3, rate), Link(1e-4, 1e10)), *apart[2:])
    return draw.choice([Cluster(apart), Cluster(together), Cluster(apart, pairs)])


def shortest_s(request: PlanRequest) -> float:
    """Return the shortest forecast step of every cut, order, replica and schedule; infinite if none fits.

    It leaves out nothing: no bound, no kinds of like devices. Data parallel may run on any of the devices.
    """
    layers = len(request.profile.layers)
    judge = Judge(request.profile, request.cluster, request.choice, 10**15)
    for groups in _sequences(tuple(device.name for device in request.cluster.devices)):
        for name, chunks in request.choice.schedules:
            if chunks == 1 or max(map(len, groups)) == 1:
                for inner in combinations(range(1, layers), len(groups) * chunks - 1):
                    judge.judge(StageLayout(groups, (*inner, layers), name, chunks))
    return min([shortest_data_parallel_s(request), *(one.step_s for one in judge.best.values())])


def shortest_data_parallel_s(request: PlanRequest) -> float:
    """Return the shortest data-parallel step of all sets of devices; infinite if none fits."""
    found, how = [math.inf], Pipelining("1f1b", request.choice.microbatches, request.choice.fixed_recompute)
    names = [device.name for device in request.cluster.devices]
    for size in range(1, len(names) + 1):
        for some in combinations(names, size):
            try:
                one = forecast_data_parallel(request.profile, request.cluster, how, request.samples, some)
            except PlanError:  # a device without a sample
                continue
            if not one.shortages(request.cluster):
                found.append(one.step_s)
    return min(found)


def _sequences(names: Group) -> Iterator[tuple[Group, ...]]:
    """Yield every sequence of disjoint groups of some of the devices."""
    for size in range(1, len(names) + 1):
        for group in combinations(names, size):
            rest = tuple(name for name in names if name not in group)
            yield (group,)
            yield from ((group, *more) for more in _sequences(rest))


def planned(request: PlanRequest, *, moves: bool = False, with_baselines: bool = True) -> PlanResult | None:
    """Return what `hvpipe plan` prints, or None if nothing fits; with `moves`, found by local moves alone."""
    try:
        with mock.patch.object(exhaustive, "MOST_LAYOUTS", 0) if moves else nullcontext():
            return make_plan(request, with_baselines=with_baselines)
    except PlanError:
        return None


def larger(cases: int) -> int:
    """Compare the search with one of ten times the work; 1 if it is more than 10 % slower somewhere."""
    ratios = []
    for seed in range(cases):
        request = random_case(seed, layers=24, devices=8)
        args = request.profile, request.cluster, request.choice
        (usual, *_), (longer, *_) = candidates(*args), find(*args, budget=10 * BUDGET)
        if usual.forecast is None or longer.forecast is None:
            print(f"{seed}: fits in no way, or only a search of ten times the work finds how", flush=True)
            continue
        ratios.append(usual.forecast.step_s / longer.forecast.step_s)
        steps = f"{longer.forecast.step_s:9.4f} s {usual.forecast.step_s:9.4f} s"
        print(f"{seed}: {usual.mode:10} {steps} {ratios[-1]:7.4f}x", flush=True)
    if not ratios:
        return 0
    mean = geometric_mean(ratios)
    print(f"{len(ratios)} cases: worst {max(ratios):.4f}x, geometric mean {mean:.4f}x of ten times the work")
    return int(max(ratios) > 1.1)


def fastest_baseline_s(result: PlanResult) -> float:
    """Return the step of the fastest baseline that hvpipe prints and can run."""
    shown = (one for one in result.baselines.values() if one is not None and one.plan.contiguous)
    return min((one.step_s for one in shown), default=math.inf)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a plan is more than 3 % slower than the best, or slower than a baseline."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning.brute_force", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="random cases (default: 200)")
    parser.add_argument("--moves", action="store_true", help="do not search every layout")
    parser.add_argument("--larger", action="store_true", help="24 layers on 8 devices")
    options = parser.parse_args(argv)
    if options.larger:
        return larger(options.cases)
    ratios, refused, beaten = [], 0, 0
    for seed in range(options.cases):
        request = random_case(seed, layers=3 + seed % 6, devices=2 + seed // 6 % 3)
        result, best_s = planned(request, moves=options.moves), shortest_s(request)
        if result is None and math.isinf(best_s):
            refused += 1
            continue
        chosen_s = math.inf if result is None else result.chosen.step_s
        baseline_s = math.inf if result is None else fastest_baseline_s(result)
        ratios.append(chosen_s / best_s)
        beaten += baseline_s < chosen_s * (1 - 1e-9)
        layers, devices = len(request.profile.layers), len(request.cluster.devices)
        what = f"{seed}: {layers} layers, {devices} devices"
        print(f"{what:30} {best_s:9.4f} s {chosen_s:9.4f} s {ratios[-1]:7.4f}x", flush=True)
    mean = geometric_mean(ratios)
    print(
        f"{len(ratios)} cases, and {refused} that fit in no way: worst {max(ratios):.4f}x, geometric mean "
        f"{mean:.4f}x of the best; a baseline is faster in {beaten}"
    )
    return int(max(ratios) > 1.03 or beaten > 0)


if __name__ == "__main__":
    sys.exit(main())
