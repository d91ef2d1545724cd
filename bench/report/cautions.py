"""What a reader must know before the figures of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.suite import LOOPBACK
from bench.report.figures import failed_cases

_OTHER_CORES = 0.5


def cautions(outcome: EvaluationOutcome) -> Iterator[str]:
    """Yield a sentence for each."""
    yield from outcome.setting.notes
    if beside := disturbed(outcome):
        yield f"Other work took half a core or more beside: {'; '.join(beside)}."
    groups = outcome.setting.plan.get("groups", [])
    planned = sum(
        1 if name in of.get("once", ()) else of["rounds"] for of in groups for name in of["systems"]
    )
    if (measured := sum(each.ok for each in outcome.rounds)) < planned:
        yield (
            f"{measured} of {planned} planned rounds have figures. Others failed, were skipped or are to run."
        )
    if failed := sorted(failed_cases(outcome)):
        yield f"Failed, so that their comparisons are left out: {', '.join(failed)}."


def disturbed(outcome: EvaluationOutcome) -> list[str]:
    """Return the rounds beside which other work took half a core of this machine or more, on the average.

    Known where all ranks were on this machine: their own CPU time is left out.
    """
    groups = outcome.setting.plan.get("groups", [])
    here = {each["cluster"] for each in groups if each["spec"] is not None or each["cluster"] == LOOPBACK}
    found = []
    for each in outcome.rounds:
        if not each.ok or each.case.cluster not in here or each.ranks[0].host_share is None:
            continue
        busy = each.ranks[0].host_share * outcome.setting.machine.cores
        if busy - sum(rank.cpu_share for rank in each.ranks) >= _OTHER_CORES:
            found.append(f"{each.case.key}, round {each.number + 1}")
    return found
