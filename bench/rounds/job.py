"""One rank's part of a round: what it trains, as which rank, and what it measured."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.rounds.record import RankRound, Task
from bench.rounds.watch import StepWatch

_MEET_S = 600.0  # timeout for ranks that still build their model


@dataclass
class RankJob:
    """What an adapter receives and fills in: times in `watch`, and `versions` of what it used.

    The ranks of a round share `directory` and meet through it. A process that measures for all ranks puts
    their figures into `by_rank`. `gradient_bytes` is the size of the model's gradients; only `single`, the
    reference for all systems, sets it.
    """

    task: Task
    rank: int
    size: int
    options: Mapping[str, str]
    directory: Path
    local_rank_and_size: tuple[int, int] = (0, 1)  # its number on its host, and the number of ranks there
    watch: StepWatch = field(init=False)
    by_rank: dict[int, RankRound] = field(default_factory=dict)
    gradient_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = StepWatch(self.task.warm_up if self.task.epochs else None)

    @property
    def samples(self) -> int:
        """The samples of a step, of all ranks together."""
        return self.task.batch * self.size

    def meet(self, what: str) -> None:
        """Wait for all ranks without MPI or TensorFlow, which differ between systems. It costs no CPU.

        Over NFS, a file that was looked up too early may stay missing for 30 s. Listing the folder asks the
        server whether it changed.
        """
        (self.directory / f"{what}-{self.rank}").touch()
        names = {f"{what}-{rank}" for rank in range(self.size)}
        deadline_s = time.monotonic() + _MEET_S
        while missing := names - set(os.listdir(self.directory)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"All ranks should get this far within {_MEET_S:g} s. Received: no {', '.join(missing)}"
                )
            time.sleep(0.01)
