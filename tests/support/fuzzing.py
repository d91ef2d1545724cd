"""How many examples Hypothesis draws where the usual 100 take long."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """Return settings for `count` examples, or for as many as a profile asks for that searches longer."""
    asked = settings().max_examples
    return settings(max_examples=asked if asked > 100 else count)
