"""The names of `horovod.keras`: the same as `hvpipe.horovod.tensorflow.keras`."""

from __future__ import annotations

from hvpipe.horovod.tensorflow.keras import *  # noqa: F403
from hvpipe.horovod.tensorflow.keras import __all__ as _names

__all__ = [*_names]
