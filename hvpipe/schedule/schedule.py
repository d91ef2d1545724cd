"""A pipeline schedule as data: each rank's actions in order; made by name, or read from a file."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any

from hvpipe.config_file import Document, Table
from hvpipe.errors import HvpipeError
from hvpipe.plan.pipelining import leads
from hvpipe.schedule.action import Action
from hvpipe.schedule.algorithms import RankWork, Turn, gpipe, interleaved, one_f_one_b, zb_h1

FORMAT, VERSION = "hvpipe-schedule", 1


@dataclass(frozen=True)
class Schedule(Document):
    """The actions of every rank in one training step.

    Only the actions say which rank runs which stage. A rank may have several stages. A stage may have several
    ranks (replicas), each for some of the micro-batches. `verify` tells whether the order can run.

    Args:
        name: A name for people.
        stages: Number of stages of the model.
        microbatches: Number of micro-batches of a step.
        actions: For each rank its actions, in order.

    Raises:
        HvpipeError: If there are no stages, no micro-batches, or a rank has no actions.

    Example:
        ```python
        schedule = Schedule.from_text("F0 F1 B0 B1\\nF0 B0 F1 B1")
        verify(schedule).peak_stash  # (2, 1)
        ```
    """

    name: str
    stages: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if min(self.stages, self.microbatches) < 1 or not self.actions or not all(self.actions):
            raise HvpipeError(
                "A schedule should have stages, micro-batches, and some actions for each rank. "
                f"Received: stages={self.stages}, microbatches={self.microbatches}, "
                f"numbers of actions={[len(actions) for actions in self.actions]}"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    def rank_of(self, action: Action) -> int:
        """Return the rank that runs the action; raise HvpipeError if no rank does."""
        if action not in self._home:
            raise HvpipeError(f"No rank runs {action}, which is not in this schedule.")
        return self._home[action]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that run the stage (its replicas), in order; empty if no rank does."""
        return self._ranks_of.get(stage, ())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that the rank runs, in order."""
        return tuple(sorted({action.stage for action in self.actions[rank]}))

    @cached_property
    def _home(self) -> Mapping[Action, int]:
        return {action: rank for rank, actions in enumerate(self.actions) for action in actions}

    @cached_property
    def _ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for rank in range(self.ranks):
            for stage in self.stages_of(rank):
                found.setdefault(stage, []).append(rank)
        return {stage: tuple(ranks) for stage, ranks in found.items()}

    def to_text(self) -> str:
        """Return a line with the name, then a line for each rank.

        A line reads `F0 F1 B0` if every rank runs the stage with its own number. Otherwise, with several
        stages on a rank or several ranks for a stage, actions name their stage: `0F0 4F0`.
        """
        plain = all(self.stages_of(rank) == (rank,) for rank in range(self.ranks))
        lines = [f"{self.name}:"]
        for actions in self.actions:
            lines.append(" ".join(f"{a.kind}{a.microbatch}" if plain else str(a) for a in actions))
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str, source: str = "text") -> Schedule:
        """Parse a schedule as `to_text` writes it. Skips blank lines and comments after #.

        Args:
            text: An optional line with a name and a colon, then a line for each rank. An action without a
                stage is of the stage with the rank's number.
            source: The text's name in errors.

        Returns:
            The schedule.

        Raises:
            HvpipeError: If the text has no actions or a malformed one; the message names line and action.
        """
        name = ""
        actions: list[tuple[Action, ...]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if not actions and not name and words[-1].endswith(":"):
                name = " ".join(words)[:-1]
                continue
            where = f"{source}, line {number}"
            actions.append(tuple(Action.parse(word, len(actions), where) for word in words))
        if not actions:
            raise HvpipeError(f"{source} is empty: a schedule should have a line for each rank.")
        # `verify` reports missing numbers.
        stages = 1 + max(action.stage for line in actions for action in line)
        microbatches = 1 + max(action.microbatch for line in actions for action in line)
        return Schedule(name or "custom", stages, microbatches, tuple(actions))

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as a JSON object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "actions": [" ".join(map(str, actions)) for actions in self.actions],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any] | Table, place: str = "The schedule") -> Schedule:
        """Return the schedule that a JSON object of `to_json` describes.

        Args:
            document: The JSON object.
            place: The document's name in errors.

        Returns:
            The schedule.

        Raises:
            HvpipeError: If a field is missing or out of range, or an action malformed; the message names it.
        """
        table = document if isinstance(document, Table) else Table(document, place)
        table.check_format(FORMAT, VERSION)
        actions = [
            tuple(Action.parse(word, rank, f"{table.place}: actions[{rank}]") for word in line.split())
            for rank, line in enumerate(table.texts("actions"))
        ]
        with table.named_in_errors():
            return Schedule(
                table.text("name"),
                table.integer("stages", minimum=1),
                table.integer("microbatches", minimum=1),
                tuple(actions),
            )


# A new schedule needs an entry here; in plan.pipelining its name (SCHEDULES) and stash (_IN_FLIGHT); and in
# search.options an entry (AUTO_SCHEDULES), so that "auto" tries it.
_ONE_CHUNK: dict[str, Callable[[RankWork], Iterator[Turn]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": one_f_one_b,
    "zb-h1": zb_h1,
}

NAMES = (*_ONE_CHUNK, "interleaved")
"""The schedules that `make_schedule` makes."""


def make_schedule(
    name: str,
    ranks: int | Sequence[int],
    microbatches: int,
    chunks: int = 1,
    *,
    shares: Sequence[Sequence[float]] | None = None,
) -> Schedule:
    """Make a schedule by name.

    Args:
        name: "gpipe" (Huang et al., NeurIPS 2019), "1f1b" (PipeDream-Flush: Narayanan et al., ICML 2021),
            "eager-1f1b" (Zhuang et al., MLSys 2023), "zb-h1" (Qi et al., ICLR 2024) or "interleaved"
            (Narayanan et al., SC 2021).
        ranks: Number of ranks, with one stage each, or `chunks` stages with "interleaved". Or the numbers of
            ranks of each stage: with (2, 1, 1), stage 0 is on ranks 0 and 1, stage 1 on rank 2, stage 2 on
            rank 3.
        microbatches: Number of micro-batches.
        chunks: Stages of each rank: 2 or more with "interleaved", otherwise 1.
        shares: For each stage a positive number for each of its ranks: micro-batches are dealt in proportion.
            None: a stage's ranks take turns.

    Returns:
        The schedule.

    Raises:
        HvpipeError: If an argument is out of range, or a rank would get no micro-batch.

    Example:
        ```python
        print(make_schedule("1f1b", ranks=3, microbatches=4).to_text())
        ```
    """
    orders = turns(name, ranks, microbatches, chunks, shares=shares)
    actions = tuple(tuple(Action(*turn) for turn in order) for order in orders)
    return Schedule(name, (ranks if isinstance(ranks, int) else len(ranks)) * chunks, microbatches, actions)


def turns(
    name: str,
    ranks: int | Sequence[int],
    microbatches: int,
    chunks: int = 1,
    *,
    shares: Sequence[Sequence[float]] | None = None,
) -> list[Iterable[Turn]]:
    """Return the order of each rank's actions; arguments and errors as for `make_schedule`."""
    _check(name, ranks, microbatches, chunks)
    if name == "interleaved":
        assert isinstance(ranks, int)
        return [interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks)]
    counts = (1,) * ranks if isinstance(ranks, int) else tuple(ranks)
    weights = [(1.0,) * count for count in counts] if shares is None else shares
    _check_shares(counts, weights)
    eagerness = 2 if name == "eager-1f1b" else 1
    return [_ONE_CHUNK[name](work) for work in _rank_works(microbatches, weights, eagerness)]


def _rank_works(microbatches: int, shares: Sequence[Sequence[float]], eagerness: int) -> Iterator[RankWork]:
    """Yield the work of all ranks, stage by stage; forwards lead `eagerness` times as far as in 1F1B."""
    gaps = [math.ceil(sum(map(Fraction, of_stage)) / Fraction(min(of_stage))) for of_stage in shares]
    before = [0, *accumulate(gaps)]
    for stage, (gap, lead, of_stage) in enumerate(zip(gaps, leads(gaps), shares, strict=True)):
        lag = gap * (before[stage] // gap)
        for dealt in deal(microbatches, of_stage):
            if not dealt:
                raise HvpipeError(
                    f"Each rank of stage {stage} should get a micro-batch. Received: "
                    f"microbatches={microbatches} for {len(of_stage)} ranks in shares of "
                    f"{', '.join(f'{share:g}' for share in of_stage)}"
                )
            yield RankWork(stage, dealt, eagerness * lead, lag)


def deal(count: int, shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Deal the numbers from 0 to `count` - 1 in proportion to the shares; equal shares take turns.

    Each number goes to the share with the least (dealt so far + 1/2) / share; on a tie, to the first. This is
    Webster's method: every prefix is as near to the shares as whole numbers can be.
    """
    if len(set(shares)) == 1:
        return [tuple(range(first, count, len(shares))) for first in range(len(shares))]
    hands: list[list[int]] = [[] for _ in shares]
    exact = [Fraction(share) for share in shares]
    queue = [(Fraction(1, 2) / share, hand) for hand, share in enumerate(exact)]
    heapq.heapify(queue)
    for i in range(count):
        hand = queue[0][1]
        hands[hand].append(i)
        heapq.heapreplace(queue, ((len(hands[hand]) + Fraction(1, 2)) / exact[hand], hand))
    return [tuple(hand) for hand in hands]


def _check(name: str, ranks: int | Sequence[int], microbatches: int, chunks: int) -> None:
    if name not in NAMES:
        raise HvpipeError(f"The schedule should be one of {', '.join(NAMES)}. Received: schedule={name!r}")
    counts = (ranks,) if isinstance(ranks, int) else ranks
    if not counts or min(counts) < 1 or microbatches < 1:
        raise HvpipeError(
            "A schedule should have at least one rank, for each stage, and one micro-batch. "
            f"Received: ranks={ranks}, microbatches={microbatches}"
        )
    if name != "interleaved" and chunks != 1:
        raise HvpipeError(
            "Several stages on a rank need schedule='interleaved'. "
            f"Received: schedule={name!r}, chunks={chunks}"
        )
    if name == "interleaved" and not isinstance(ranks, int):
        raise HvpipeError(
            "Several ranks for a stage need the schedule gpipe, 1f1b, eager-1f1b or zb-h1. "
            f"Received: schedule='interleaved', ranks={tuple(ranks)}"
        )
    if name == "interleaved" and chunks < 2:
        raise HvpipeError(
            "schedule='interleaved' should have 2 or more chunks on each rank (with 1, it is '1f1b'). "
            f"Received: chunks={chunks}"
        )
    if name == "interleaved" and microbatches < counts[0]:
        raise HvpipeError(
            "schedule='interleaved' should have at least as many micro-batches as ranks. "
            f"Received: microbatches={microbatches}, ranks={ranks}"
        )


def _check_shares(counts: Sequence[int], shares: Sequence[Sequence[float]]) -> None:
    are_positive = all(math.isfinite(share) and share > 0 for of_stage in shares for share in of_stage)
    if not are_positive or [len(of_stage) for of_stage in shares] != list(counts):
        raise HvpipeError(
            "shares should be, for each stage, a number above 0 for each of its ranks. "
            f"Received: ranks={tuple(counts)}, shares={[list(of_stage) for of_stage in shares]}"
        )
