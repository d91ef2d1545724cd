"""The algorithms of pipeline schedules, as generators of one rank's turns in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

Turn = tuple[str, int, int]
"""The fields of an Action: kind, micro-batch, stage. A tuple, because large schedules have millions."""


@dataclass(frozen=True)
class RankWork:
    """One rank's work on one stage: `microbatches`, in rising order.

    The forward of micro-batch j goes before the backward of i if j <= i + `lead`. The W of i goes after the I
    of i + `lag`.

    Ranks never deadlock, whichever micro-batches they have. To see this, number a backward of micro-batch i
    by i, and a forward of j by j - lead. Leads never grow along the pipeline, so every action waits only for
    actions with a lower number.
    """

    stage: int
    microbatches: tuple[int, ...]
    lead: int
    lag: int


def gpipe(work: RankWork) -> Iterator[Turn]:
    """Yield the actions of one stage: all forwards, then all backwards (Huang et al., NeurIPS 2019).

    stage 0 | F0 F1 F2 F3             B0    B1    B2    B3         (3 stages, 4 micro-batches, B = 2 F)
    stage 1 |    F0 F1 F2 F3       B0    B1    B2    B3
    stage 2 |       F0 F1 F2 F3 B0    B1    B2    B3

    On equal stages it takes (microbatches + stages - 1) (F + B); each stage stashes all micro-batches.
    Backwards run in the order of the forwards, not in reverse as in the paper. That takes as long, and sums
    gradients in the same order as the schedules below.
    """
    for kind in "FB":
        for i in work.microbatches:
            yield kind, i, work.stage


def one_f_one_b(work: RankWork) -> Iterator[Turn]:
    """Yield the actions of one stage: warm up, alternate, drain (PipeDream-Flush, ICML 2021).

    stage 0 | F0 F1 F2 B0 F3 B1 B2 B3      (3 stages, 4 micro-batches)
    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3

    On equal stages it takes as long as GPipe, with a stash of min(microbatches, stages - stage). With
    replicas, a rank warms up with ceil(ranks of the next stage x (1 + warm-up there) / ranks of its own
    stage) forwards:

    stage 0 | F0 F2 B0 F4 B2 B4            (2 ranks for stage 0, one for stage 1, 6 micro-batches)
            | F1 F3 B1 F5 B3 B5
    stage 1 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    "eager-1f1b" warms up with twice as many forwards, so that transfers overlap with computing (Zhuang et
    al., MLSys 2023; policy B of DAPPLE, Fan et al., PPoPP 2021):

    stage 0 | F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5      (3 stages, 6 micro-batches)
    stage 1 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """
    ahead = iter(work.microbatches)
    following = next(ahead, None)
    for i in work.microbatches:
        while following is not None and following <= i + work.lead:
            yield "F", following, work.stage
            following = next(ahead, None)
        yield "B", i, work.stage


def zb_h1(work: RankWork) -> Iterator[Turn]:
    """Yield the actions of one stage: 1F1B with W put off into the bubble (ZB-H1: Qi et al., ICLR 2024).

    stage 0 | F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3      (3 stages, 4 micro-batches, F = I = W)
    stage 1 |    F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2 |       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Other stages wait only for I. Stage s runs each W s micro-batches after its I, so no stage stashes more
    than min(microbatches, stages), the most of 1F1B. With replicas, a W runs floor(ranks of all stages before
    / ranks of its own stage) micro-batches later. On equal stages with at least as many micro-batches it
    takes microbatches (F + I + W) + (stages - 1) max(F, I, F + I - W). The paper's F + I - W is the largest
    of the three if W is at most F and at most I.
    """
    put_off = 0
    for kind, microbatch, stage in one_f_one_b(work):
        if kind == "F":
            yield kind, microbatch, stage
            continue
        yield "I", microbatch, work.stage
        while work.microbatches[put_off] + work.lag <= microbatch:
            yield "W", work.microbatches[put_off], work.stage
            put_off += 1
            if put_off == len(work.microbatches):
                return
    for i in work.microbatches[put_off:]:
        yield "W", i, work.stage


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Turn]:
    """Yield the actions of one rank with several stages (Narayanan et al., SC 2021; Megatron-LM).

    rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3   (2 ranks, 4 micro-batches,
    rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3    2 chunks)

    Micro-batches pass through one chunk after the other, in groups of as many micro-batches as ranks. On
    equal stages it takes microbatches (F + B) + (ranks - 1) (F + B) / chunks, where F and B cover all chunks
    together. The stash is (chunks - 1) * group + 2 * (ranks - rank) - 1 activations of a chunk, at most all
    of them.

    If the number of ranks does not divide the micro-batches, groups are larger, and their sizes differ by at
    most one. The same formula holds. Groups are never smaller, because a rank would wait for the group's
    first micro-batch to come around.
    """
    groups = _groups(ranks, microbatches)
    forwards = [(i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backwards = [(i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    warmup = min((chunks - 1) * max(map(len, groups)) + 2 * (ranks - rank - 1), len(forwards))
    for place, (i, chunk) in enumerate(forwards):
        yield "F", i, chunk * ranks + rank
        if place >= warmup:
            j, back = backwards[place - warmup]
            yield "B", j, back * ranks + rank
    for i, chunk in backwards[len(backwards) - warmup :]:
        yield "B", i, chunk * ranks + rank


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Cut the micro-batches into as many groups of at least `ranks` as possible, of nearly equal size."""
    count = microbatches // ranks
    ends = [-(-microbatches * k // count) for k in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]
