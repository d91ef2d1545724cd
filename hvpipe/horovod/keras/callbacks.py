"""The names of `horovod.keras.callbacks`: those of `hvpipe.horovod.tensorflow.keras.callbacks`."""

from __future__ import annotations

from typing import Any

from hvpipe.horovod.tensorflow.keras import callbacks as _callbacks
from hvpipe.horovod.tensorflow.keras.callbacks import *  # noqa: F403
from hvpipe.horovod.tensorflow.keras.callbacks import __all__ as _names

__all__ = [*_names]


class BestModelCheckpoint(_callbacks.BestModelCheckpoint):  # type: ignore[no-redef]
    """A ModelCheckpoint of the best model, with `horovod.keras`' order of arguments."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
        filepath: Any = None,
    ) -> None:
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq, filepath)
