"""The methods of a pipeline that save and load it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.by_hand import load_checkpoint, save_checkpoint
from hvpipe.keras.checkpoint.pipeline_values import describe, variables_to_write
from hvpipe.keras.pipeline.context import PipelineContext
from hvpipe.keras.pipeline.model_file import optimizer_of, read_whole, write_whole
from hvpipe.keras.pipeline.state_names import RankState, rank_state, reset_slots


class PipelineSaving:
    """The part of PipelineParallel that writes and reads files. All ranks call each method together."""

    _context: PipelineContext
    trainable_variables: Any
    settle: Callable[[], None]

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any) -> None:
        """Write one file that plain Keras loads as the undivided, compiled model; on all ranks together.

        Rank 0 writes, and meanwhile holds all weights and the optimizer's state in host memory. If it has
        too little, use `save_checkpoint`.

        Args:
            filepath: As for keras.Model.save.
            overwrite: As for keras.Model.save.
            zipped: As for keras.Model.save.
            **kwargs: As for keras.Model.save.

        Raises:
            HvpipeError: Writing failed. Raised on all ranks.

        Example:

        ```python
        pipe.save("model.keras")
        model = keras.models.load_model("model.keras")  # on one machine
        ```
        """
        self._write_whole(lambda model: model.save(filepath, overwrite=overwrite, zipped=zipped, **kwargs))

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Raise HvpipeError: no rank has the graph of the whole model. Export what `save` wrote."""
        raise HvpipeError(
            "A pipeline cannot export itself. Call pipe.save('model.keras') on all ranks, then "
            f"keras.models.load_model('model.keras').export(...) on one. Received: export to {filepath!r}"
        )

    def get_config(self) -> dict[str, Any]:
        """Raise HvpipeError: Keras's saving calls this, and would write one rank's part from every rank."""
        raise HvpipeError(
            "A rank has only a part of the model. To save the whole, call pipe.save('model.keras') on all "
            "ranks instead of keras.saving.save_model(pipe, ...)."
        )

    def save_weights(
        self, filepath: Any, overwrite: bool = True, max_shard_size: float | None = None
    ) -> None:
        """Write the weights of the undivided model, as keras.Model.save_weights does; see `save`.

        Args:
            filepath: As for keras.Model.save_weights.
            overwrite: As for keras.Model.save_weights.
            max_shard_size: As for keras.Model.save_weights, in GB.

        Raises:
            HvpipeError: Writing failed. Raised on all ranks.
        """
        self._write_whole(
            lambda model: model.save_weights(filepath, overwrite=overwrite, max_shard_size=max_shard_size)
        )

    def load(self, filepath: Any) -> None:
        """Load the weights of a .keras or .weights.h5 file of the undivided model; on all ranks together.

        Each rank reads its own part, so all ranks must see the file. If the pipeline is compiled with an
        optimizer of the same class, the optimizer's state is loaded too.

        Args:
            filepath: The path of the file.

        Raises:
            HvpipeError: The file does not exist or is of another model. Raised on all ranks, before any
                weight has changed.
        """
        self.load_weights(filepath)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """Load weights as `load` does.

        Args:
            filepath: The path of the file.
            skip_mismatch: As for keras.Model.load_weights.
            **kwargs: Not supported.

        Raises:
            HvpipeError: As for `load`, or there are other arguments.
        """
        if kwargs:
            raise HvpipeError(f"load_weights takes filepath and skip_mismatch. Received: {sorted(kwargs)}")
        context = self._context
        self._load(lambda own: read_whole(context.session, self, context.model, own, filepath, skip_mismatch))
        self.settle()

    def save_checkpoint(self, folder: str | os.PathLike[str]) -> None:
        """Write the training state; on all ranks together, each its own part.

        The state is weights, statistics, seeds and the optimizer's state. The new checkpoint replaces the
        old one in the folder when it is complete.

        Args:
            folder: A folder that all ranks see, for this checkpoint alone.

        Raises:
            HvpipeError: Writing failed. Raised on all ranks; the old checkpoint is still there.
        """
        context, state = self._context, self.rank_state()
        model = describe(context.layout.stages.graph.name, state, optimizer_of(self))
        save_checkpoint(context.session, folder, model, variables_to_write(state, context.rank))

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint; on all ranks together.

        The checkpoint may come from a different number of stages, another schedule or other replicas. Call
        `compile` first, with an optimizer of the same class and settings.

        Args:
            folder: A folder that `save_checkpoint` wrote, or one of the checkpoints in the folder of a
                `Checkpoint`, of which this takes the same state.

        Raises:
            HvpipeError: The checkpoint is incomplete, or of another model or optimizer. Raised on all ranks,
                before anything has changed.
        """
        context = self._context
        self._load(lambda own: load_checkpoint(context.session, folder, own, optimizer_of(self)))
        self.settle()
        context.shared.mark_diverged()

    def _write_whole(self, write: Callable[[Any], None]) -> None:
        context = self._context
        context.shared.combine_state()
        write_whole(context.session, self, context.model, self.rank_state(), write)

    def _load(self, read: Callable[[RankState], bool]) -> None:
        """Let `read` assign this rank's state; it returns whether that included the optimizer's."""
        state = self.rank_state()
        optimizer = optimizer_of(self)
        if not read(state) and optimizer is not None:
            reset_slots(optimizer, state)

    def rank_state(self) -> RankState:
        """Return the state that this rank holds, by name; on all ranks together."""
        context = self._context
        return rank_state(context.session, context.layout, optimizer_of(self), self.trainable_variables)
