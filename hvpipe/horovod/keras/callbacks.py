"""The names of `horovod.keras.callbacks`: the same as `hvpipe.horovod.tensorflow.keras.callbacks`."""

from __future__ import annotations

from hvpipe.horovod.tensorflow.keras.callbacks import *  # noqa: F403
from hvpipe.horovod.tensorflow.keras.callbacks import __all__ as _names

__all__ = [*_names]
