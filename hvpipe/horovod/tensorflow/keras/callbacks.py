"""The names of `horovod.tensorflow.keras.callbacks`."""

from __future__ import annotations

from hvpipe.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from hvpipe.keras.horovod_callbacks import (
    BestModelCheckpoint,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
