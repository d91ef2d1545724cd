"""One trial of the faults that no other test causes; `python -m bench.faults` runs many of all."""

from __future__ import annotations

import random

import pytest

from bench.faults.cases import LIMIT_S, cases

PLACES = {
    "memory": "flush",
    "clock": "reduce",
    "disk": "checkpoint",
    "link": "reduce",
    "job": "checkpoint",
    "stranger": "pack",
}


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(("name", "phase"), PLACES.items())
def test_a_fault_ends_as_promised(name: str, phase: str) -> None:
    case = cases()[name]
    if case.missing:
        pytest.skip(case.missing)
    trial = case.run(phase, random.Random(1))
    assert not trial.problem, f"{trial.problem}\n{trial.output}"
