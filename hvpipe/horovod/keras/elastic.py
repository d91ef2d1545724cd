"""The names of `horovod.keras.elastic`: the same as `hvpipe.horovod.tensorflow.keras.elastic`."""

from __future__ import annotations

from hvpipe.horovod.tensorflow.keras.elastic import *  # noqa: F403
from hvpipe.horovod.tensorflow.keras.elastic import __all__ as _names

__all__ = [*_names]
