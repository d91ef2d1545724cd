"""The output of `hvpipe plan`: stages, a timeline, the modes and the baselines, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

from hvpipe.commands.plan_request import PlanRequest, PlanResult
from hvpipe.errors import listed
from hvpipe.forecast.pipeline import Forecast
from hvpipe.plan.baselines import is_random
from hvpipe.plan.explain import explain
from hvpipe.plan.stage_plan import DATA_PARALLEL, Plan
from hvpipe.plan.table import bytes_text, layers_text, table

FORMAT, VERSION = "hvpipe-plan-report", 1

MOST_DRAWN, MOST_ACTIONS, MOST_PICTURED = 32, 50_000, 1000
"""The most devices (and rows of a table) and actions of a timeline, and the most actions of a picture."""


def to_json(result: PlanResult, *, explained: bool = False) -> dict[str, Any]:
    """Return the plan, all forecasts, and the reasons for each cut if `explained`."""
    request = result.request
    explanation = {"explanation": _explanation(result)} if explained else {}
    return {
        "format": FORMAT,
        "version": VERSION,
        "plan": result.chosen.plan.to_json(),
        "forecast": _figures(result.chosen, request),
        "candidates": [
            {
                "mode": one.mode,
                "forecast": one.forecast and _figures(one.forecast, request),
                "refused": one.refused,
            }
            for one in result.candidates
        ],
        "baselines": {
            name: one and {**_figures(one, request), "plan": one.plan.to_json()}
            for name, one in result.baselines.items()
        },
        "refused": result.refused,
        "fitting": {name: count for name, count in result.fitting.items() if is_random(name)},
        "notes": notes(result),
        **explanation,
    }


def _explanation(result: PlanResult) -> list[str]:
    return explain(result.chosen.plan, result.request.profile, result.request.cluster)


def _figures(one: Forecast, request: PlanRequest) -> dict[str, Any]:
    return {
        "step_s": one.step_s,
        "samples_per_s": _ratio(_samples(request), one.step_s),
        "bottleneck_s": one.plan.bottleneck_s,
        "bubble": one.bubble,
        "utilization": dict(zip(one.plan.ranks, one.utilization, strict=True)),
        "memory_bytes": dict(zip(one.plan.ranks, one.memory_bytes, strict=True)),
    }


def to_text(result: PlanResult, drawing: Callable[[Forecast], str], *, explained: bool = False) -> str:
    """Return the whole output of `hvpipe plan`; `drawing` draws the timeline of a pipeline."""
    parts = [title(result), "", *_stages(result.chosen, result.request)]
    if result.chosen.plan.method == DATA_PARALLEL:
        parts += ["", _advice(result.chosen.plan), *notes(result)]
    if is_large(result.chosen):
        devices = len(result.chosen.plan.ranks)
        why = f"{devices} devices" if devices > MOST_DRAWN else f"{_actions(result.chosen):,} actions"
        parts += ["", f"The timeline is left out: {why}."]
    elif result.chosen.trace.events:
        parts += ["", drawing(result.chosen).rstrip("\n")]
    if explained:
        for line in _explanation(result):
            parts += ["", *line.replace("; ", ";\n  ").splitlines()]
    if len(result.candidates) > 1:
        parts += ["", *_modes(result)]
    if result.baselines:
        parts += ["", *_comparison(result)]
    return "\n".join(parts) + "\n"


def notes(result: PlanResult) -> list[str]:
    """Return a line for each option that the chosen plan does not use: the schedule, with data parallel."""
    schedule = result.request.choice.schedule
    if schedule == "auto" or result.chosen.plan.method != DATA_PARALLEL:
        return []
    others = [one.mode for one in result.candidates if one.mode != "data" and one.forecast is not None]
    advice = f" Use --mode {others[0]} for a plan with this schedule." if others else ""
    return [f"--schedule {schedule} is not in use, because data parallel has no schedule.{advice}"]


def is_large(one: Forecast) -> bool:
    """Tell whether a plan has too many devices or actions for a timeline."""
    return len(one.plan.ranks) > MOST_DRAWN or _actions(one) > MOST_ACTIONS


def is_pictured(one: Forecast) -> bool:
    """Tell whether a plan has few enough devices and actions for a picture of its timeline."""
    return not is_large(one) and _actions(one) <= MOST_PICTURED


def _actions(one: Forecast) -> int:
    return 2 * len(one.plan.stages) * one.plan.pipelining.microbatches


def title(result: PlanResult) -> str:
    """Describe the plan and its step in two lines."""
    plan, profile = result.chosen.plan, result.request.profile
    how = plan.pipelining
    chunks = f", {how.chunks} chunks" if how.chunks > 1 else ""
    again = ", recompute" if how.recompute else ""
    if isinstance(how.recompute, tuple):
        again += f" in {', '.join(map(str, how.recompute))}"
    samples = f"{profile.batch_size} sample{'s' * (profile.batch_size != 1)}"
    layers = f"{len(profile.layers)} layer{'s' * (len(profile.layers) != 1)}"
    microbatches = f"{how.microbatches} micro-batch{'es' * (how.microbatches != 1)}"
    way = f"{plan.method}, {how.schedule}{chunks}{again}"
    if plan.method == DATA_PARALLEL:
        way = "data parallel"
    return (
        f"{plan.model or 'model'}, {layers}, on {len(plan.ranks)} of "
        f"{len(result.request.cluster.devices)} devices: {way}, "
        f"{microbatches} of {samples}\n"
        f"step {_seconds(result.chosen.step_s)}{_rate(result)}, bubble {result.chosen.bubble:.1%}, "
        f"utilization {1 - result.chosen.bubble:.1%}"
    )


def _rate(result: PlanResult) -> str:
    """Say how many samples a second that is."""
    rate = _ratio(_samples(result.request), result.chosen.step_s)
    return "" if rate is None else f", {rate:,.4g} samples/s"


def _ratio(value: float, by: float) -> float | None:
    """Return the ratio; None if it is not finite, because the divisor is 0 or next to it."""
    ratio = value / by if by else math.inf
    return ratio if math.isfinite(ratio) else None


def _samples(request: PlanRequest) -> int:
    """Return the samples of a step."""
    return request.samples or request.profile.batch_size * request.choice.microbatches


def _advice(plan: Plan) -> str:
    """Say how to run a data-parallel plan, which has no schedule."""
    shares = [f"{share:.0f}" for share in plan.stages[0].shares]
    sizes = shares if len(set(shares)) > 1 else shares[:1]
    if len(sizes) > MOST_DRAWN:  # say it for runs of ranks
        runs = [(size, len(list(ranks))) for size, ranks in groupby(sizes)]
        ends = [*accumulate(count for _, count in runs)]
        spans = zip(runs, ends, strict=True)
        sizes = [f"{size} (ranks {end - count} to {end - 1})" for (size, count), end in spans]
    return f"Train with hvpipe.keras.data_parallel, on batches of {listed(sizes, most=16)} samples."


def _stages(one: Forecast, request: PlanRequest) -> Iterator[str]:
    """Yield a table with a line per device of each stage."""
    utilization = dict(zip(one.plan.ranks, one.utilization, strict=True))
    memory = dict(zip(one.plan.ranks, one.memory_bytes, strict=True))
    rows = []
    for number, stage in enumerate(one.plan.stages):
        for place, device in enumerate(stage.devices):
            limit_bytes = request.cluster.device(device).memory_bytes
            share = stage.shares[place] / sum(stage.shares)
            first = place == 0
            rows.append(
                [
                    str(number) if first else "",
                    device,
                    f"{share:.0%}" if len(stage.devices) > 1 else "",
                    layers_text(stage.layers) if first else "",
                    _seconds(stage.cost.compute_s) if first else "",
                    _seconds(stage.cost.receive_s + stage.cost.send_s) if first else "",
                    bytes_text(stage.cost.receive_bytes) if first else "",
                    bytes_text(stage.cost.send_bytes) if first else "",
                    bytes_text(memory[device]),
                    f"{memory[device] / limit_bytes:.0%}" if limit_bytes else "",
                    f"{utilization[device]:.0%}",
                ]
            )
    header = [
        "stage",
        "device",
        "share",
        "layers",
        "compute",
        "travel",
        "in",
        "out",
        "memory",
        "full",
        "busy",
    ]
    if len(rows) > MOST_DRAWN:
        rows = _shortened(rows, one)
    kept = [column for column in range(len(header)) if any(row[column] for row in rows)]
    yield from table([header[c] for c in kept], [[row[c] for c in kept] for row in rows])


def _shortened(rows: list[list[str]], one: Forecast) -> list[list[str]]:
    """Return the first and last rows, and that of the busiest device, with a row for what is left out."""
    few = MOST_DRAWN // 4
    busiest = one.utilization.index(max(one.utilization))
    kept = sorted({*range(few), min(busiest, len(rows) - 1), *range(len(rows) - few, len(rows))})
    found: list[list[str]] = []
    for before, row in zip([-1, *kept], kept, strict=False):
        if row > before + 1:
            found.append(["", f"... {row - before - 1} more", *[""] * (len(rows[0]) - 2)])
        found.append(rows[row])
    return found


def _modes(result: PlanResult) -> Iterator[str]:
    rows = []
    for one in result.candidates:
        if one.forecast is None:
            rows.append([one.mode, "", "", "", one.refused])
            continue
        counts = _counts([len(stage.devices) for stage in one.forecast.plan.stages])
        note = "chosen" if one.forecast is result.chosen else ""
        step_s, bubble = _seconds(one.forecast.step_s), f"{one.forecast.bubble:.1%}"
        rows.append([one.mode, step_s, bubble, counts, note])
    yield from table(["mode", "step", "bubble", "devices of each stage", ""], rows)


def _counts(counts: Sequence[int]) -> str:
    """Write "1 1 2", or "512 x 1" if there are many."""
    if len(counts) <= MOST_DRAWN // 2:
        return " ".join(map(str, counts))
    runs = [(value, len(list(same))) for value, same in groupby(counts)]
    return " ".join(f"{count} x {value}" for value, count in runs[:8]) + (" ..." if len(runs) > 8 else "")


def _comparison(result: PlanResult) -> Iterator[str]:
    header = ["plan", "stages", "step", "of chosen", "bottleneck", "bubble", "utilization", "most memory", ""]
    rows = []
    chosen_s = result.chosen.step_s
    for name, one in {result.chosen.plan.method: result.chosen, **result.baselines}.items():
        drawn = is_random(name) and result.fitting.get(name, 0)
        shown = f"{name} (median of {drawn})" if drawn else name
        if one is None:
            rows.append([shown, *[""] * 7, result.refused[name]])
            continue
        rows.append(
            [
                shown,
                str(len(one.plan.stages)),
                _seconds(one.step_s),
                "" if (longer := _ratio(one.step_s, chosen_s)) is None else f"{longer:.2f}x",
                _seconds(one.plan.bottleneck_s),
                f"{one.bubble:.1%}",
                f"{1 - one.bubble:.1%}",
                bytes_text(max(one.memory_bytes)),
                "" if one.plan.contiguous else "no pipeline",
            ]
        )
    yield from table(header, rows)


def _seconds(value_s: float) -> str:
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"
