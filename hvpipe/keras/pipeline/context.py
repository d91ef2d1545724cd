"""The context that all parts of one pipeline share: session, layout, tensor channel, shared variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.pipeline.shared_variables import SharedVariables
from hvpipe.keras.pipeline.step_checks import StepChecks
from hvpipe.keras.pipeline.step_undo import StepUndo
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.plan.stage_plan import Plan
from hvpipe.session import Session


@dataclass(frozen=True)
class PipelineContext:
    """The objects that all parts of one pipeline share.

    Attributes:
        session: The session.
        model: The undivided Keras model. Variables of other ranks' stages may have no memory.
        layout: Its stages on the ranks.
        shared: The variables that several ranks hold.
        plan: The plan that the layout was made from.
        channel: Sends tensors between ranks. All steps share one, because both ends count the messages.
        samples: A variable that holds the number of samples in the current step's batch.
        checks: Looks for NaN and Inf, and compares copies of weights.
        undo: Takes back a step that the loss of a rank has ended; None where a loss also loses a stage.
    """

    session: Session
    model: Any
    layout: Layout
    shared: SharedVariables
    plan: Plan
    channel: TensorChannel
    samples: Any
    checks: StepChecks
    undo: StepUndo | None

    @property
    def rank(self) -> int:
        """The world rank of this process."""
        return self.session.world.rank
