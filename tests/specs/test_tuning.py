"""The file of `hvpipe tune`, and the algorithms that follow from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvpipe.environment.settings import settings
from hvpipe.errors import HvpipeError
from hvpipe.specs.tuning import Tuning, carrier, fastest, setting

NAMES = ("doubling", "halving", "ring")
SIZES = st.integers(1, 1 << 30)
TIMES = st.fixed_dictionaries({name: st.floats(1e-7, 10.0) for name in NAMES})
SECONDS = st.dictionaries(SIZES, TIMES, min_size=1, max_size=8)


@given(SECONDS)
def test_no_choice_is_more_than_5_percent_slower_than_the_fastest(
    seconds: dict[int, dict[str, float]],
) -> None:
    rows = fastest(seconds)
    assert settings({"HVPIPE_ALL_REDUCE": setting(rows)}).algorithms == rows
    for size, each in seconds.items():
        chosen = next(name for name, most in rows if most == 0 or size <= most)
        assert each[chosen] <= 1.05 * min(each.values())


@given(SECONDS)
def test_a_file_holds_what_was_measured(seconds: dict[int, dict[str, float]]) -> None:
    tuning = Tuning(4, "TCP", seconds)
    assert Tuning.from_json(tuning.to_json()) == tuning


def test_a_small_gain_does_not_change_the_algorithm() -> None:
    assert fastest({1: {"ring": 1.0, "halving": 2.0}, 2: {"ring": 1.04, "halving": 1.0}}) == (("ring", 0),)


ROW = {"bytes": 8, "seconds": {"ring": 1.0}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "hvpipe-plan"}, "should be a file of `hvpipe tune`"),
        ({"ranks": 1}, "ranks should be a whole number of at least 2"),
        ({"all_reduce": [{**ROW, "bytes": 0}]}, "bytes should be a whole number of at least 1"),
        ({"all_reduce": [{**ROW, "seconds": {"ring": -1.0}}]}, "ring should be a number above 0"),
        ({"all_reduce": [{**ROW, "seconds": {"fast": 1.0}}]}, "only doubling, halving, mpi, ring.*'fast'"),
        ({"all_reduce": [ROW, {"bytes": 9, "seconds": {}}]}, "a time for each size"),
        ({"all_reduce": [ROW, ROW]}, "each size once. Received: bytes=8 twice"),
        ({"all_reduce": []}, "at least one size"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, object], said: str) -> None:
    right = Tuning(2, "MPI", {8: {"ring": 1.0}}).to_json()
    with pytest.raises(HvpipeError, match=said):
        Tuning.from_json({**right, **change})


def test_a_network_is_another_one_within_a_host() -> None:
    because = "MPI, because a host has several ranks"
    assert [carrier(because, "", 2), carrier(because, "", 1)] == ["MPI", "MPI on one host"]
    assert [carrier("TCP", "", 2), carrier("MPI", "Open MPI, ucx", 2)] == ["TCP", "MPI (Open MPI, ucx)"]
