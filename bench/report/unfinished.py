"""What an interrupted evaluation has not run yet of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.suite import Group
from bench.report.figures import not_measured
from bench.rounds.record import Task


def unfinished(outcome: EvaluationOutcome) -> dict[str, list[str]]:
    """Return by group the systems that lack a round.

    Failed and skipped cases lack nothing: they are in not_measured.
    """
    plan = outcome.setting.plan
    gave_up = not_measured(outcome)
    ran = {(each.number, each.case.key) for each in outcome.rounds if each.ok}
    found: dict[str, list[str]] = {}
    for group in map(_group, plan.get("groups", [])):
        turns = [(number, case) for number, case in group.turns() if case.key not in gave_up]
        left = [case.system for number, case in turns if (number, case.key) not in ran]
        if left:
            found[group.name] = list(dict.fromkeys(found.get(group.name, []) + left))
    return found


def _group(data: Mapping[str, Any]) -> Group:
    """Read what asdict returned for a group, perhaps through JSON, without its cluster's spec."""
    task = Task(**{**data["task"], "shares": tuple(data["task"]["shares"])})
    systems, once = tuple(data["systems"]), tuple(data.get("once", ()))  # missing in older plans
    return Group(task, data["cluster"], data["ranks"], systems, data["rounds"], data["scaling"], once=once)
