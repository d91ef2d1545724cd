"""Intervals between checkpoints, as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from hvpipe.checkpoints.every import Every, parse_every
from hvpipe.errors import HvpipeError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (500, Every(500.0, "steps")),
        ("500steps", Every(500.0, "steps")),
        ("1 step", Every(1.0, "steps")),
        ("1epoch", Every(1.0, "epochs")),
        ("2 epochs", Every(2.0, "epochs")),
        ("30s", Every(30.0, "seconds")),
        ("10min", Every(600.0, "seconds")),
        ("1.5h", Every(5400.0, "seconds")),
    ],
)
def test_intervals(text: Any, wanted: Every) -> None:
    assert parse_every(text) == wanted


@pytest.mark.parametrize("text", [0, -1, True, 1.5, "", "10", "min", "0s", "1.5epochs", "10 parsecs", None])
def test_what_is_no_interval(text: Any) -> None:
    with pytest.raises(HvpipeError, match="Received: every="):
        parse_every(text)
