"""What an evaluation records: cases, and the rounds of each.

A case is one system on one workload on one cluster. The systems of a workload and cluster take turns, round
after round. A round is a fresh set of processes that warms up and then takes timed steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, is_dataclass
from statistics import fmean
from typing import Any, get_args, get_origin, get_type_hints

NOT_UP = "the hosts were not up: "  # a reason that begins so blames a cluster or its hosts, not a system
ALONE = "single"  # the system that computes without sharing

ROUND = 8
"""Steps of a round of "local". In the first one nothing is on its way."""
UNTIL_BUILT = 2 * ROUND + 3
"""Steps of a warm-up in which "local" builds all graphs of a round's end."""


@dataclass(frozen=True)
class Task:
    """What every system trains: the same model code, data, batch, threads and seed.

    `batch` counts samples per rank and step.
    """

    workload: str  # a name in bench.training.workloads
    batch: int
    pixels: int = 64  # or tokens of a sequence
    threads: int = 1  # an operation's; Suite.with_threads sets them
    warm_up: int = 3  # steps, traced and untimed
    steps: int = 8  # timed
    seed: int = 20
    epochs: int = 0  # > 0: train that many epochs on real data and keep the loss and accuracy of each
    more_epochs: int = 0  # of systems that are not exact: they may reach the same accuracy later, but sooner

    @property
    def all_epochs(self) -> int:
        return self.epochs + self.more_epochs

    def describe(self, rounds: Collection[int]) -> str:
        """Describe in one line how much is trained. `rounds` has the number of rounds of each system."""
        least, most = min(rounds), max(rounds)
        turns = f"{most} round{'s' if most > 1 else ''}"
        steps = f"{self.epochs} epochs" if self.epochs else f"{self.warm_up} + {self.steps} steps"
        if self.more_epochs:
            steps += f" ({self.all_epochs} of systems that are not exact)"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return (
            f"batch {self.batch} a rank, {threads} an operation, "
            f"{turns if least == most else f'{least} to {turns}'} of {steps}, seed {self.seed}"
        )


@dataclass(frozen=True)
class Case:
    """One row of an evaluation. `cluster` is a name of the suite.

    `single` trains on all ranks at once, each as if alone. So it measures the computing of a step, also where
    ranks share cores or one of them is slow. It is the reference for the bound and the scaling efficiency.
    """

    system: str  # a name of bench.systems
    cluster: str
    ranks: int
    task: Task

    @property
    def key(self) -> str:
        """Unique in a suite, and the same in every run of it."""
        task = self.task
        kind = f"{task.epochs}-epochs" if task.epochs else "weak"  # weak scaling: a batch is a rank's
        return f"{task.workload}-{task.pixels}/{task.batch}/{self.cluster}-{self.ranks}/{kind}/{self.system}"

    @property
    def group(self) -> str:
        """The key of all cases that are compared with each other."""
        return self.key.rsplit("/", 1)[0]


@dataclass(frozen=True)
class RankRound:
    """What one rank measured in one round, in seconds and bytes. Lists have an entry for each timed step."""

    step_s: list[float]
    wall_s: float  # from the start of the first timed step until drained, per step
    cpu_share: float  # cores kept busy by this process while timed; 0, as the next: not measured
    peak_bytes: int  # resident memory, the most since the process began
    sent_bytes: int = 0  # by its host, on the wire, per step; 0 if not counted
    first_step_s: float = 0.0  # tracing and first step
    gradient_bytes: int = 0  # float32, of Embeddings the batch's rows; for the bound of the links
    host_share: float | None = None  # of its host's cores, busy while timed, by whoever; None: unknown
    loss: list[float] = field(default_factory=list)  # a value for each epoch
    accuracy: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse a step that is not finite: NaN would pass as no change."""
        if not self.step_s or not all(math.isfinite(s) and s >= 0 for s in (*self.step_s, self.wall_s)):
            raise ValueError(
                f"A rank's steps should be finite seconds. Received: step_s={self.step_s}, {self.wall_s}"
            )


@dataclass(frozen=True)
class Round:
    """One round of a case: what each rank measured, or why there are no figures.

    `error` is the end of the output after a failure. `skipped` is the reason why a case did not run: its
    system is not installed, or its hosts were NOT_UP.
    """

    case: Case
    number: int
    ranks: tuple[RankRound, ...] = ()
    error: str = ""
    skipped: str = ""
    taken_s: float = 0.0  # of the whole round, including process start
    versions: str = ""  # TensorFlow, Keras, the system's own, MPI
    notes: tuple[str, ...] = ()  # how the system is driven, and what could not be measured

    def counted(self, rank: int) -> list[float]:
        """Return the timed steps of a rank that count: all but the first one, for every system alike.

        Timed steps are a run of their own, which begins with nothing left over. A system that collects
        gradients in the next step has nothing to collect in the first, so that one is too short. Epochs are
        timed from within a run, so all their steps are complete. Of two steps or fewer all count.
        """
        step_s = self.ranks[rank].step_s
        return list(step_s if self.case.task.epochs or len(step_s) <= 2 else step_s[1:])

    @property
    def wall_s(self) -> float:
        """The mean step with draining, of the slowest rank."""
        return max(rank.wall_s for rank in self.ranks)

    @property
    def usual_s(self) -> float:
        """The mean step of the slowest rank, as of a long training: without draining and a first round."""
        return max(fmean(rank.step_s[ROUND:]) for rank in self.ranks)

    @property
    def ok(self) -> bool:
        """Whether it has figures."""
        return not (self.error or self.skipped)

    @property
    def not_up(self) -> bool:
        """Whether only the hosts were missing. They may be up the next time."""
        return self.skipped.startswith(NOT_UP)

    @property
    def why(self) -> str:
        """Why there are no figures, in one line: the last exception in the output, else its last words."""
        return self.skipped or last_words(self.error)


def from_dict(kind: Any, data: Any) -> Any:
    """Return a dataclass of this kind from what `asdict` returned, perhaps through JSON."""
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: from_dict(kinds[name], value) for name, value in data.items()})
    if get_origin(kind) is tuple:
        return tuple(from_dict(get_args(kind)[0], each) for each in data)
    return data


def last_words(output: str) -> str:
    """Return the last exception in an output, else its last line with a word."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (raised or lines or [""])[-1]
