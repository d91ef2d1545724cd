"""A batch, its micro-batches, and how their inputs and targets reach the stages that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hvpipe.keras.pipeline.context import PipelineContext
from hvpipe.keras.pipeline.tensor_channel import PendingTensor
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import RankProgram


@dataclass(frozen=True)
class Batch:
    """A batch on this rank: flat model inputs, flat targets (then sample weights), and its samples."""

    inputs: Sequence[Any]
    targets: Sequence[Any]
    samples: int


def split_batch(samples: int, microbatches: int) -> list[slice]:
    """Cut a batch into micro-batches whose sizes differ by at most one; the larger ones come first."""
    ends = [0]
    for i in range(microbatches):
        ends.append(ends[-1] + samples // microbatches + (i < samples % microbatches))
    return [slice(a, b) for a, b in pairwise(ends)]


class MicrobatchInputs:
    """Model inputs and targets of each micro-batch, for the stages of this rank.

    The rank that runs micro-batch 0 of the first stage sends them to all other ranks that read any of them;
    only its batch counts. The constructor posts all sends and receives and does not wait.
    """

    def __init__(
        self, context: PipelineContext, program: RankProgram, batch: Batch, *, with_targets: bool
    ) -> None:
        stages, ranks, channel = context.layout.stages, context.layout.ranks, context.channel
        self.slices = split_batch(batch.samples, program.microbatches)
        self._values: dict[tuple[int, int], list[PendingTensor] | list[Any]] = {}  # by stage, micro-batch
        rank_of = program.schedule.rank_of
        root = rank_of(Action("F", 0, 0))
        for stage, cut in enumerate(stages.cuts):
            is_last = stage == len(stages.cuts) - 1
            indices = [stages.graph.inputs.index(number) for number in cut.inputs]
            whole = [batch.inputs[index] for index in indices]
            whole += batch.targets if is_last and with_targets else ()
            if not whole:
                continue
            sends = any(rank_of(Action("F", i, stage)) != root for i in range(len(self.slices)))
            # What is sent is cut on the host, where messages are.
            on_host = [np.asarray(x) for x in whole] if program.rank == root and sends else []
            for i, part in enumerate(self.slices):
                owner = rank_of(Action("F", i, stage))
                what = f"micro-batch {i} of the batch for stage {stage}"
                if owner == program.rank == root:
                    self._values[stage, i] = [x[part] for x in whole]
                elif program.rank == root:
                    for x in on_host:
                        channel.send(ranks[owner], x[part], x.dtype, None, what, on_host=True)
                elif owner == program.rank:
                    self._values[stage, i] = [
                        channel.receive(ranks[root], x.dtype, None, what, on_host=True) for x in whole
                    ]

    def samples(self, i: int) -> int:
        """Return the samples of micro-batch `i`."""
        return int(self.slices[i].stop - self.slices[i].start)

    def take(self, stage: int, i: int) -> list[Any]:
        """Wait for a stage's inputs and targets of micro-batch `i`, and return them. Call it once only."""
        found = self._values.pop((stage, i), [])
        return [x.wait() if isinstance(x, PendingTensor) else x for x in found]
