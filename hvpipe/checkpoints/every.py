"""Reads how often checkpoints are wanted: an interval in steps, epochs or seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from hvpipe.errors import HvpipeError

Unit = Literal["steps", "epochs", "seconds"]

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_COUNTED: dict[str, Unit] = {"step": "steps", "epoch": "epochs"}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*")


@dataclass(frozen=True)
class Every:
    """An interval: a number of steps, epochs or seconds."""

    amount: float
    unit: Unit


def parse_every(value: int | str) -> Every:
    """Return the interval of 500 (steps), "500steps", "1epoch", "30s", "10min" or "2h".

    Raises:
        HvpipeError: It is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Every(float(value), "steps")
    match = _TEXT.fullmatch(value.lower()) if isinstance(value, str) else None
    # "s" itself loses its letter to the plural.
    unit = (match[2] if match[2] in _SECONDS or match[2] in _COUNTED else f"{match[2]}s") if match else ""
    amount = float(match[1]) if match else 0.0
    if amount > 0 and math.isfinite(amount):
        if unit in _SECONDS:
            return Every(amount * _SECONDS[unit], "seconds")
        if unit in _COUNTED and amount == int(amount):
            return Every(amount, _COUNTED[unit])
    raise HvpipeError(
        'every should be a number of steps, or text like "10min", "30s", "2h", "500steps" or "1epoch". '
        f"Received: every={value!r}"
    )
