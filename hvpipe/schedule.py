"""Pipeline schedules as data: in which order each rank runs the forwards and backwards of its stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvpipe.errors import HvpipeError

KINDS = {
    "F": "forward",
    "B": "backward, whole",
    "I": "backward for the inputs",
    "W": "backward for the weights",
}
"""What a rank can do with one micro-batch on one stage: F, then either B or I and, some time later, W."""

_TOKEN = re.compile(r"(\d*)([A-Z])(\d+)")


@dataclass(frozen=True)
class Action:
    """One micro-batch through one stage of the model, forward or backward; `kind` is one of KINDS.

    Stages are numbered along the model, so an action is unique in its schedule. It prints as PyTorch's do:
    2F0 is the forward of micro-batch 0 on stage 2.
    """

    kind: str
    microbatch: int
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.microbatch < 0 or self.stage < 0:
            raise HvpipeError(
                f"An action should have a kind of {', '.join(KINDS)} and numbers from 0. Received: {self}"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one training step: `actions[rank]`, in order.

    Each of the `ranks` holds `chunks` stages: stage s of the model is on rank s % ranks, so that a
    micro-batch passes the ranks in a circle. `hvpipe.verify` says whether the order can run.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if min(self.ranks, self.microbatches, self.chunks) < 1 or len(self.actions) != self.ranks:
            raise HvpipeError(
                "A schedule should have ranks, micro-batches and chunks, and one list of actions for each "
                f"rank. Received: ranks={self.ranks}, microbatches={self.microbatches}, "
                f"chunks={self.chunks}, {len(self.actions)} lists"
            )

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def to_text(self) -> str:
        """A line with the name, then a line for each rank: `F0 F1 B0`, or `0F0 4F0` with several chunks."""
        lines = [f"{self.name}:"]
        for actions in self.actions:
            lines.append(" ".join(str(a) if self.chunks > 1 else f"{a.kind}{a.microbatch}" for a in actions))
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
            actions.append(tuple(_parse(word, len(actions), where) for word in words))
        if not actions:
            raise HvpipeError(f"A schedule should have a line for each rank. Received: {source}: none")
        microbatches = 1 + max(action.microbatch for line in actions for action in line)
        # Numbers that are left out are for `verify` to name.
        chunks = 1 + max(action.stage for line in actions for action in line) // len(actions)
        return Schedule(name or "custom", len(actions), microbatches, chunks, tuple(actions))


def _parse(word: str, rank: int, where: str) -> Action:
    match = _TOKEN.fullmatch(word)
    if match is None or match[2] not in KINDS:
        raise HvpipeError(
            f"{where}: an action should read F0, or 2F0 with its stage, and be one of "
            f"{', '.join(f'{kind} ({what})' for kind, what in KINDS.items())}. Received: {word!r}"
        )
    return Action(match[2], int(match[3]), int(match[1]) if match[1] else rank)


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one stage: all forwards, then all backwards (Huang et al., NeurIPS 2019).

    stage 0 | F0 F1 F2 F3             B0    B1    B2    B3         (3 stages, 4 micro-batches, B = 2 F)
    stage 1 |    F0 F1 F2 F3       B0    B1    B2    B3
    stage 2 |       F0 F1 F2 F3 B0    B1    B2    B3

    It takes (microbatches + stages - 1) (F + B) on equal stages, and each stashes all micro-batches.
    Backwards run in the order of the forwards, not in the reverse as in the paper: it takes as long, and
    gradients add up in the same order as in the schedules below.
    """
    for i in range(microbatches):
        yield Action("F", i, stage)
    for i in range(microbatches):
        yield Action("B", i, stage)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one stage: warm up, alternate, drain (PipeDream-Flush, ICML 2021).

    stage 0 | F0 F1 F2 B0 F3 B1 B2 B3      (3 stages, 4 micro-batches)
    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3

    As long as GPipe on equal stages, with a stash of min(microbatches, stages - stage).
    """
    warmup = min(stages - stage - 1, microbatches)
    for i in range(warmup):
        yield Action("F", i, stage)
    for i in range(warmup, microbatches):
        yield Action("F", i, stage)
        yield Action("B", i - warmup, stage)
    for i in range(microbatches - warmup, microbatches):
        yield Action("B", i, stage)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Yield the actions of one rank with several stages (Narayanan et al., SC 2021; Megatron-LM).

    rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3   (2 ranks, 4 micro-batches,
    rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3    2 chunks)

    Micro-batches go in groups of as many as there are ranks through one chunk after the other. On equal
    stages: microbatches (F + B) + (ranks - 1) (F + B) / chunks, with F and B those of all chunks together.
    The stash is (chunks - 1) * group + 2 * (ranks - rank) - 1 of the chunks' activations, at most all.
    Where the ranks do not divide the micro-batches, groups are larger and up to one apart in size (never
    smaller: a rank would wait for the first of the group to come around); it takes as long by the formula.
    """
    groups = _groups(ranks, microbatches)
    forwards = [(i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backwards = [(i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    warmup = min((chunks - 1) * max(map(len, groups)) + 2 * (ranks - rank - 1), len(forwards))
    for place, (i, chunk) in enumerate(forwards):
        yield Action("F", i, chunk * ranks + rank)
        if place >= warmup:
            j, back = backwards[place - warmup]
            yield Action("B", j, back * ranks + rank)
    for i, chunk in backwards[len(backwards) - warmup :]:
        yield Action("B", i, chunk * ranks + rank)


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Cut the micro-batches into as many groups of at least `ranks` as can be, up to one apart in size."""
    count = microbatches // ranks
    ends = [-(-microbatches * k // count) for k in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def zb_h1(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one stage: 1F1B with W put off into the bubble (ZB-H1: Qi et al., ICLR 2024).

    stage 0 | F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3      (3 stages, 4 micro-batches, F = I = W)
    stage 1 |    F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2 |       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Only I is waited for by other stages. Stage s runs its W's s micro-batches behind its I's, so that no
    stage stashes more than min(microbatches, stages), the most that 1F1B does. On equal stages, with at
    least as many micro-batches: microbatches (F + I + W) + (stages - 1) max(F, I, F + I - W); the paper's
    F + I - W is the largest of the three where W is at most F and at most I.
    """
    warmup = min(stages - stage - 1, microbatches)
    for i in range(warmup):
        yield Action("F", i, stage)
    for i in range(microbatches):
        if warmup + i < microbatches:
            yield Action("F", warmup + i, stage)
        yield Action("I", i, stage)
        if i >= stage:
            yield Action("W", i - stage, stage)
    for i in range(max(microbatches - stage, 0), microbatches):
        yield Action("W", i, stage)


_ONE_CHUNK: dict[str, Callable[[int, int, int], Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
}

NAMES = (*_ONE_CHUNK, "interleaved")
"""The schedules that `make` makes."""


def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name; `chunks`, the stages on each rank, is for "interleaved" alone."""
    if name not in NAMES:
        raise HvpipeError(f"The schedule should be one of {', '.join(NAMES)}. Received: schedule={name!r}")
    if ranks < 1 or microbatches < 1:
        raise HvpipeError(
            "A schedule should have at least one rank and one micro-batch. "
            f"Received: ranks={ranks}, microbatches={microbatches}"
        )
    actions: Sequence[tuple[Action, ...]]
    if name != "interleaved":
        if chunks != 1:
            raise HvpipeError(
                f"Several stages on a rank need schedule='interleaved'. "
                f"Received: schedule={name!r}, chunks={chunks}"
            )
        actions = [tuple(_ONE_CHUNK[name](rank, ranks, microbatches)) for rank in range(ranks)]
    else:
        if chunks < 2:
            raise HvpipeError(
                "schedule='interleaved' should have 2 or more chunks on each rank (with 1, it is '1f1b'). "
                f"Received: chunks={chunks}"
            )
        if microbatches < ranks:
            raise HvpipeError(
                "schedule='interleaved' should have at least as many micro-batches as ranks. "
                f"Received: microbatches={microbatches}, ranks={ranks}"
            )
        actions = [tuple(interleaved(rank, ranks, microbatches, chunks)) for rank in range(ranks)]
    return Schedule(name, ranks, microbatches, chunks, tuple(actions))
