"""The costs of a layer: checks, and what is derived from them."""

from __future__ import annotations

import math

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.specs.layer_cost import LayerCost


def test_the_fixed_part_is_at_most_the_whole() -> None:
    with pytest.raises(HvpipeError, match=r"fixed_forward_s of layer 'a' should be at most its forward_s"):
        LayerCost("a", 1.0, 2.0, fixed_forward_s=1.5)


def test_the_weight_gradient_part_of_a_backward() -> None:
    costs = [LayerCost("a", 1.0, 3.0, weight_share=share) for share in (None, 0.0, 1.0)]
    assert [cost.weights_part_s for cost in costs] == [1.5, 0, 3]
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(HvpipeError, match="weight_share of layer 'a' should be from 0 to 1"):
            LayerCost("a", 1.0, 2.0, weight_share=wrong)


@pytest.mark.parametrize(
    ("layer", "message"),
    [({"forward_s": -1.0}, "forward_s=-1"), ({"backward_s": float("nan")}, "backward_s=nan")],
)
def test_costs_are_checked(layer: dict[str, float], message: str) -> None:
    with pytest.raises(HvpipeError, match=message):
        LayerCost(**({"name": "a", "forward_s": 0.0, "backward_s": 0.0} | layer))  # type: ignore[arg-type]
