"""What to change, in sentences with numbers: links, unequal ranks, input, overhead."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.suite import proportional_shares
from bench.metrics import format_time, median
from bench.report.figures import ALONE, CaseFigures, by_group, rounds_by_case, samples
from bench.report.headlines import OURS
from bench.rounds.timed_steps import counted_steps

_WORTH = 1.05  # smaller predicted speedups are not mentioned
_WAITS = 0.10  # of a step
_MOST = 8
_OF_A_KIND = 2


@dataclass(frozen=True)
class Advice:
    """A sentence of one kind, and the speedup that it predicts."""

    kind: str
    text: str
    speedup: float


def advice(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> list[str]:
    """Return at most eight sentences, the most rewarding first: the best two of a kind, and how many more."""
    found: list[Advice] = []
    for members in by_group(rows).values():
        ours = next((row for row in members if row.case.system == OURS), None)
        if ours is None or ours.case.task.epochs:
            continue
        alone = next((row for row in members if row.case.system == ALONE), None)
        checks = (_links(outcome, ours), _shares(outcome, ours, alone), _input(ours), _overhead(ours))
        found += [each for each in checks if each is not None]
    return [each.text for each in sorted(_merged(found), key=lambda each: -each.speedup)[:_MOST]]


def _merged(found: list[Advice]) -> list[Advice]:
    """Keep the best sentences of each kind. The last one says how many more cases would gain likewise."""
    kept = []
    for kind in dict.fromkeys(each.kind for each in found):
        alike = sorted((each for each in found if each.kind == kind), key=lambda each: -each.speedup)
        best, more = alike[:_OF_A_KIND], alike[_OF_A_KIND:]
        if more:
            last, span = best[-1], f"{more[-1].speedup:.2f}x to {more[0].speedup:.2f}x"
            best[-1] = replace(last, text=f"{last.text} The same in {len(more)} more cases: {span}.")
        kept += best
    return kept


def with_half_the_bytes(step_s: float, exposed_s: float, hidden_s: float) -> float:
    """Return the step if communication took half as long: what is hidden now stays hidden.

    Communication can hide only beside the rest of the step, so the result is at least half the step.
    """
    hidden_s = min(hidden_s, step_s - exposed_s)
    return step_s - exposed_s + max(0.0, (exposed_s + hidden_s) / 2 - hidden_s)


def _links(outcome: EvaluationOutcome, row: CaseFigures) -> Advice | None:
    exposed_s = row.parts_s.get("communication_exposed", 0.0)
    whole_s = _mean_step_s(row)
    if exposed_s < _WAITS * whole_s:
        return None
    predicted_s = with_half_the_bytes(whole_s, exposed_s, row.parts_s.get("communication_hidden", 0.0))
    speedup = whole_s / predicted_s
    if speedup < _WORTH:
        return None
    return Advice(
        "links",
        f"{_name(row)}: {exposed_s / whole_s:.0%} of the step waits for {_slowest_link(outcome, row)}; "
        f'bf16 halves the bytes: predicted {speedup:.2f}x. Try compression="bf16".',
        speedup,
    )


def _mean_step_s(row: CaseFigures) -> float:
    """Return the whole that parts are shares of: parts are means, and may add up to more than the median."""
    return max(row.step_s, sum(s for part, s in row.parts_s.items() if part != "communication_hidden"))


def _slowest_link(outcome: EvaluationOutcome, row: CaseFigures) -> str:
    rates = {
        each: rate
        for each in outcome.links
        if each.cluster == row.case.cluster and (rate := each.two_way_bits_per_s or each.bits_per_s)
    }
    if not rates:
        return "the links"
    slowest, rate = min(rates.items(), key=lambda item: item[1])
    alike = max(rates.values()) < 1.2 * rate
    # All were measured from one host: if they are alike, the slow link may be that host's own.
    name = f"the links of host {slowest.first}" if alike else f"the link of host {slowest.second}"
    if len(rates) == 1:  # either of its ends may be the slow one
        name = f"the link between {slowest.first} and {slowest.second}"
    return f"{name} ({rate / 1e6:.0f} Mb/s each way)"


def _shares(outcome: EvaluationOutcome, row: CaseFigures, alone: CaseFigures | None) -> Advice | None:
    """Advise on shares by the ranks' speeds when computing alone."""
    if alone is None:
        return None
    rounds = [each for each in rounds_by_case(outcome)[alone.case.key] if each.ok]
    ranks = range(len(rounds[0].ranks))
    if len(ranks) != row.case.ranks:
        return None
    alone_s = [median(counted_steps(rounds, rank)) for rank in ranks]
    task = row.case.task
    batches = task.shares or (task.batch,) * row.case.ranks
    speeds = [batch / seconds for batch, seconds in zip(batches, alone_s, strict=True)]
    shares = proportional_shares(samples(row.case) // row.case.ranks, speeds)
    balanced_s = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    saved_s = max(alone_s) - balanced_s
    if saved_s < _WAITS * row.step_s or sum(shares) != samples(row.case):
        return None
    # Shares do not change the time of the links.
    speedup = row.step_s / max(row.step_s - saved_s, balanced_s, row.links_s or 0.0)
    if speedup < _WORTH:
        return None
    slowest = max(ranks, key=lambda rank: alone_s[rank])
    return Advice(
        "shares",
        f"{_name(row)}: rank {slowest} computes {format_time(alone_s[slowest])} where the fastest takes "
        f"{format_time(min(alone_s))}, and all wait for it; give the ranks {'+'.join(map(str, shares))} "
        f"samples instead of {'+'.join(map(str, batches))}: predicted {speedup:.2f}x.",
        speedup,
    )


def _input(row: CaseFigures) -> Advice | None:
    input_s, whole_s = row.parts_s.get("input", 0.0), _mean_step_s(row)
    if input_s < _WAITS * whole_s:
        return None
    speedup = whole_s / (whole_s - input_s)
    return Advice(
        "input",
        f"{_name(row)}: {input_s / whole_s:.0%} of the step waits for input; cache the dataset, map in "
        f"parallel, prefetch more: at most {speedup:.2f}x.",
        speedup,
    )


def _overhead(row: CaseFigures) -> Advice | None:
    overhead_s, whole_s = row.parts_s.get("overhead", 0.0), _mean_step_s(row)
    if overhead_s < 2 * _WAITS * whole_s:
        return None
    speedup = whole_s / (whole_s - overhead_s)
    return Advice(
        "overhead",
        f"{_name(row)}: {overhead_s / whole_s:.0%} of the step is the framework's overhead; a larger "
        f"batch spreads it over more samples: at most {speedup:.2f}x.",
        speedup,
    )


def _name(row: CaseFigures) -> str:
    task = row.case.task
    size = "+".join(map(str, task.shares)) if task.shares else f"{task.batch} a rank"
    return f"{task.workload}, {size}, on {row.case.cluster}"
