"""An action: a rank runs one micro-batch through one stage, forward or backward."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvpipe.config_file import short
from hvpipe.errors import HvpipeError

KINDS = {
    "F": "forward",
    "B": "backward, whole",
    "I": "backward for the inputs",
    "W": "backward for the weights",
}
"""The kinds of actions. A micro-batch runs on a stage as F, then either B, or I and some time later W."""

_TOKEN = re.compile(r"(\d{,18})([A-Z])(\d{1,18})")


@dataclass(frozen=True)
class Action:
    """One micro-batch through one stage of the model, forward or backward.

    It prints as PyTorch's actions do: 2F0 is the forward of micro-batch 0 on stage 2.

    Args:
        kind: "F" (forward), "B" (whole backward), "I" (backward for the inputs) or "W" (for the weights).
        microbatch: Number of the micro-batch, from 0.
        stage: Number of the stage along the model, from 0; so an action is unique in its schedule.

    Raises:
        HvpipeError: If the kind is unknown or a number negative.

    Example:
        ```python
        assert str(Action("F", microbatch=0, stage=2)) == "2F0"
        ```
    """

    kind: str
    microbatch: int
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.microbatch < 0 or self.stage < 0:
            raise HvpipeError(
                f"An action should be of kind {', '.join(KINDS)}, with numbers from 0. Received: {self}"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(word: str, stage: int, where: str) -> Action:
        """Parse what `str` prints; a word without a stage is of `stage`.

        HvpipeError for another word; its message begins with `where`.
        """
        match = _TOKEN.fullmatch(word)
        if match is None or match[2] not in KINDS:
            raise HvpipeError(
                f"{where}: an action should read F0, or 2F0 with its stage, and be one of "
                f"{', '.join(f'{kind} ({what})' for kind, what in KINDS.items())}. Received: {short(word)}"
            )
        return Action(match[2], int(match[3]), int(match[1]) if match[1] else stage)
