"""What of an evaluation's plan has not run yet, where it was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.suite import Group, PipelineRun
from bench.report.figures import not_measured
from bench.rounds.record import Task


def unfinished(outcome: EvaluationOutcome) -> dict[str, list[str]]:
    """By group the systems that lack a round of theirs, and pipelines by name, without any.

    What failed or was skipped lacks nothing: it is in not_measured.
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
    ended = {each.name for each in outcome.pipelines}
    names = [_pipeline_name(each) for each in plan.get("pipelines", [])]
    return {**found, **{name: [] for name in names if name not in ended}}


def _group(data: Mapping[str, Any]) -> Group:
    """What asdict made of a group, perhaps through JSON, without what its cluster looks like."""
    task = Task(**{**data["task"], "shares": tuple(data["task"]["shares"])})
    systems, once = tuple(data["systems"]), tuple(data.get("once", ()))  # plans of before it was there
    return Group(task, data["cluster"], data["ranks"], systems, data["rounds"], data["scaling"], once=once)


def _pipeline_name(data: Mapping[str, Any]) -> str:
    return PipelineRun(data["cluster"], data["model"], data["pixels"], data["batch"]).name
