"""What of a model's settings counts as different."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from hvpipe.keras.same_model import layer_items

layers = keras.layers


def items(*names: str, **options: Any) -> list[tuple[str, str]]:
    return list(
        layer_items([layers.Dense(2, name=names[0], **options), layers.Activation("relu", name=names[1])])
    )


@pytest.mark.parametrize("names", [("dense_3", "activation_1"), ("units", "relu"), ("activation", "dense")])
def test_names_do_not_count(names: tuple[str, str]) -> None:
    """Regression: a layer may be named as a setting, or as its value."""
    assert [one[1] for one in items(*names) if " name:" not in one[0]] == [
        one[1] for one in items("dense", "activation") if " name:" not in one[0]
    ]
    assert [one[0] for one in items(*names)] == [one[0] for one in items("dense", "activation")]


def test_settings_count() -> None:
    first = items("dense", "activation")
    for options in ({"activation": "tanh"}, {"units": 2, "use_bias": False}, {"dtype": "bfloat16"}):
        options.pop("units", None)
        assert items("dense", "activation", **options) != first
    assert items("dense_1", "activation_7") == first
