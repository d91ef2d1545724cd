"""All-reduces, broadcast and agreement of up to 64 ranks, in one process over a transport in memory."""

from __future__ import annotations

import math
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native_build import build

ALGORITHMS = ("doubling", "halving", "ring", "gathered")
Case = tuple[str, int, int, int, bool, int]
"""Algorithm, ranks, elements, bytes of a message, whether it sums in place, and the seed of delays."""


def run(cases: list[Case]) -> list[int]:
    """Run cases, which should give one right sum on all ranks; return the most messages of a rank."""
    return [messages for messages, _ in traffic(cases)]


def traffic(cases: list[Case]) -> list[tuple[int, int]]:
    """Run cases as `run` does; return the most messages of a rank, and the most bytes."""
    text = "".join(" ".join(str(int(x) if isinstance(x, bool) else x) for x in one) + "\n" for one in cases)
    driver = build("collectives_driver.cc")
    done = subprocess.run([str(driver)], input=text, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    wrong = {one: line for one, line in zip(cases, lines, strict=True) if not line.startswith("ok ")}
    assert not wrong
    return [(int(line.split()[1]), int(line.split()[2])) for line in lines]


def cases(
    names: tuple[str, ...], ranks: int, elements: tuple[int, int], segments: list[int]
) -> st.SearchStrategy[list[Case]]:
    """Any cases of these algorithms, with at most so many ranks."""
    counts, seeds = st.integers(*elements), st.integers(0, 1 << 30)
    whole = (st.sampled_from(names), st.integers(2, ranks), counts, st.sampled_from(segments), st.booleans())
    return st.lists(st.tuples(*whole, seeds), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(cases((*ALGORITHMS, "broadcast"), 40, (0, 300), [4, 64, 60_000]))
def test_any_number_of_ranks_and_elements(found: list[Case]) -> None:
    run(found)


@settings(max_examples=10, deadline=None)
@given(cases(("doubling", "halving", "ring"), 9, (60_001, 90_000), [9_000, 60_000]))
def test_large_arrays_wait_for_signals_and_for_the_budget(found: list[Case]) -> None:
    run(found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_ranks(algorithm: str) -> None:
    sizes = (5, 7, 8, 16, 17, 31, 32, 33, 63, 64)
    elements = 100 if algorithm == "gathered" else 640  # gathered arrays must be small
    messages = run([(algorithm, ranks, elements, 60_000, True, ranks) for ranks in sizes])
    for ranks, most in zip(sizes, messages, strict=True):
        rounds = math.ceil(math.log2(ranks))
        bounds = {"doubling": rounds + 1, "halving": 2 * rounds + 1, "ring": 2 * ranks, "gathered": rounds}
        assert most <= bounds[algorithm]


def test_the_messages_of_a_small_broadcast_grow_as_the_logarithm_of_the_ranks() -> None:
    sizes = (2, 3, 4, 8, 17, 64)
    cases: list[Case] = [("broadcast", ranks, 10, 60_000, False, ranks) for ranks in sizes]
    assert run(cases) == [1, 2, 2, 3, 5, 6]
    assert run([("broadcast", 64, 640, 4, False, 1)]) == [640]  # along a chain


@settings(max_examples=40, deadline=None)
@given(cases(("agreement",), 64, (0, 5), [1]))
def test_ranks_that_disagree_say_so_each_with_the_record_of_another(found: list[Case]) -> None:
    run(found)


def test_the_messages_of_an_agreement_grow_as_the_logarithm_of_the_ranks() -> None:
    sizes = (2, 3, 4, 8, 17, 64)
    found = traffic([("agreement", ranks, 0, 1, False, 1) for ranks in sizes])
    assert [messages for messages, _ in found] == [1, 2, 2, 3, 5, 6]
    for ranks, (messages, sent) in zip(sizes, found, strict=True):
        assert sent == messages * 144 + (ranks - 1) * 8  # a digest each, and each rank's number of samples
