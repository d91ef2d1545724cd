"""Pipeline schedules as data: what each rank runs in which order; made by name, or read from text or JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from hvpipe.config_file import Table, read_document, write_document
from hvpipe.errors import HvpipeError
from hvpipe.plan.pipelining import leads
from hvpipe.schedule.action import Action
from hvpipe.schedule.algorithms import Part, gpipe, interleaved, one_f_one_b, zb_h1

FORMAT, VERSION = "hvpipe-schedule", 1


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one training step: `actions[rank]`, in order, on a model cut into `stages`.

    The table alone says who runs what. A rank may have several stages, and a stage several ranks (replicas),
    each for some of the micro-batches. `hvpipe.schedule.verify` says whether the order can run.
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
        return len(self.actions)

    def rank_of(self, action: Action) -> int:
        """The rank that runs the action; HvpipeError where none does."""
        if action not in self._home:
            raise HvpipeError(f"A rank should run {action}. Received: none does")
        return self._home[action]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that run the stage, in order: its replicas. Empty where no rank does."""
        return self._ranks_of.get(stage, ())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the rank runs, in order."""
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
        """A line with the name, then a line for each rank: `F0 F1 B0` if all run the stage of their number.

        Otherwise, with several stages on a rank or several ranks for a stage, `0F0 4F0`.
        """
        plain = all(self.stages_of(rank) == (rank,) for rank in range(self.ranks))
        lines = [f"{self.name}:"]
        for actions in self.actions:
            lines.append(" ".join(f"{a.kind}{a.microbatch}" if plain else str(a) for a in actions))
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str, source: str = "text") -> Schedule:
        """The inverse of `to_text`. Skips blank lines and what follows a #; the name may be left out.

        A token without a stage is of the stage that has the number of its line's rank. `source` names the
        text in errors, which say line and token.
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
            raise HvpipeError(f"A schedule should have a line for each rank. Received: {source}: none")
        # Numbers that are left out are for `verify` to name.
        stages = 1 + max(action.stage for line in actions for action in line)
        microbatches = 1 + max(action.microbatch for line in actions for action in line)
        return Schedule(name or "custom", stages, microbatches, tuple(actions))

    def to_json(self) -> dict[str, Any]:
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
        """The inverse of `to_json`."""
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

    def write(self, path: str | os.PathLike[str]) -> None:
        write_document(path, self.to_json())

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Schedule:
        """Read what `write` wrote."""
        return Schedule.from_json(read_document(path))


_ONE_CHUNK: dict[str, Callable[[Part], Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
}

NAMES = (*_ONE_CHUNK, "interleaved")
"""The schedules that `make` makes."""


def make(
    name: str,
    ranks: int | Sequence[int],
    microbatches: int,
    chunks: int = 1,
    *,
    shares: Sequence[Sequence[float]] | None = None,
) -> Schedule:
    """The schedule of that name, for so many ranks of one stage each; of `chunks` stages with "interleaved".

    `ranks` may also be the numbers of ranks of each stage: with (2, 1, 1), stage 0 is on ranks 0 and 1, stage
    1 on rank 2, stage 2 on rank 3. A stage's ranks take turns, micro-batch by micro-batch, or are dealt
    micro-batches in proportion to its `shares`, a positive number for each of its ranks.
    """
    _check(name, ranks, microbatches, chunks)
    if name == "interleaved":
        assert isinstance(ranks, int)
        actions = tuple(tuple(interleaved(rank, ranks, microbatches, chunks)) for rank in range(ranks))
        return Schedule(name, ranks * chunks, microbatches, actions)
    counts = (1,) * ranks if isinstance(ranks, int) else tuple(ranks)
    weights = [(1.0,) * count for count in counts] if shares is None else shares
    _check_shares(counts, weights)
    parts = _parts(microbatches, weights)
    return Schedule(name, len(counts), microbatches, tuple(tuple(_ONE_CHUNK[name](part)) for part in parts))


def _parts(microbatches: int, shares: Sequence[Sequence[float]]) -> Iterator[Part]:
    """The parts of all ranks, stage after stage."""
    gaps = [math.ceil(sum(map(Fraction, of_stage)) / Fraction(min(of_stage))) for of_stage in shares]
    for stage, (gap, lead, of_stage) in enumerate(zip(gaps, leads(gaps), shares, strict=True)):
        lag = gap * (sum(gaps[:stage]) // gap)
        for dealt in deal(microbatches, of_stage):
            if not dealt:
                raise HvpipeError(
                    f"Each rank of stage {stage} should get a micro-batch. Received: "
                    f"microbatches={microbatches} for {len(of_stage)} ranks in shares of "
                    f"{', '.join(f'{share:g}' for share in of_stage)}"
                )
            yield Part(stage, dealt, lead, lag)


def deal(count: int, shares: Sequence[float]) -> list[tuple[int, ...]]:
    """The numbers from 0 below `count`, dealt in proportion to the shares; equal shares take turns.

    Each goes where (dealt + 1/2) / share is least, to the first of equals: the method of Webster, whose every
    beginning is as near to the shares as whole numbers can be.
    """
    hands: list[list[int]] = [[] for _ in shares]
    exact = [Fraction(share) for share in shares]
    for i in range(count):
        next_ = min(range(len(hands)), key=lambda hand: (len(hands[hand]) + Fraction(1, 2)) / exact[hand])
        hands[next_].append(i)
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
            f"Several stages on a rank need schedule='interleaved'. "
            f"Received: schedule={name!r}, chunks={chunks}"
        )
    if name == "interleaved" and not isinstance(ranks, int):
        raise HvpipeError(
            "Several ranks for a stage need a schedule of gpipe, 1f1b, zb-h1. "
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
    good = all(math.isfinite(share) and share > 0 for of_stage in shares for share in of_stage)
    if not good or [len(of_stage) for of_stage in shares] != list(counts):
        raise HvpipeError(
            "shares should be, for each stage, a number above 0 for each of its ranks. "
            f"Received: ranks={tuple(counts)}, shares={[list(of_stage) for of_stage in shares]}"
        )
