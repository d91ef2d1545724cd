"""More than 2 stages on each device, chosen by the search."""

from __future__ import annotations

import pytest

from hvpipe.schedule.plan_schedule import schedule_of
from hvpipe.search.choice import candidate
from hvpipe.search.options import PipeliningChoice
from hvpipe.specs.cluster import equal_cluster
from model_graphs import chain


@pytest.mark.parametrize(("devices", "layers", "step_s"), [(4, 16, 57), (2, 12, 78)])
def test_more_chunks_shorten_the_bubble(devices: int, layers: int, step_s: float) -> None:
    """Regression: only 2 were tried. A step takes 4 (F + B) + (devices - 1) (F + B) / chunks."""
    choice = PipeliningChoice(microbatches=4)
    found = candidate("pipeline", chain(*[3] * layers), equal_cluster(devices), choice).forecast
    assert found is not None
    chunks = found.plan.pipelining.chunks
    whole_s = 3 * layers / devices
    assert found.step_s == pytest.approx(4 * whole_s + (devices - 1) * whole_s / chunks)
    assert found.step_s <= step_s + 1e-9
    assert schedule_of(found.plan).stages == devices * chunks


def test_fixed_chunks_stay_fixed() -> None:
    found = candidate(
        "pipeline", chain(*[3] * 16), equal_cluster(4), PipeliningChoice(microbatches=4, chunks=3)
    )
    assert found.forecast is not None
    assert found.forecast.plan.pipelining.chunks in (1, 3)
