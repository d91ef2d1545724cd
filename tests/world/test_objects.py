"""What ranks send each other as JSON, and what they refuse to read."""

from __future__ import annotations

import math
import pickle
import random
from array import array
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvpipe.environment.discover import Launch
from hvpipe.errors import HvpipeError, PeerError
from hvpipe.plan.buckets import BucketPlan
from hvpipe.world.objects import packed, packed_for_user, unpacked, unpacked_for_user


class Number(IntEnum):
    ONE = 1


class Text(str):
    pass


class Pair(NamedTuple):
    one: int
    other: int


@dataclass
class Mine:
    value: int


def again(value: Any) -> Any:
    return unpacked(packed(value))


def test_plain_values_stay_what_they_are() -> None:
    values = (None, True, 0, -(1 << 70), 0.1, math.inf, "ä\udc80\n", b"\0\xff", [1, [2]], (1, (2,)), {1, 2})
    values += (frozenset("a"), {1: "a", ("b", 2): {"c": None}}, {}, [], (), random.Random(1).getstate())
    assert again(values) == values
    assert [type(one) for one in again(values)] == [type(one) for one in values]
    assert math.isnan(again(math.nan))
    for value in (np.arange(6, dtype=">i2").reshape(2, 3), np.float32(0.1), np.array("ab"), np.zeros((0, 3))):
        found = again(value)
        assert type(found) is type(value)
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
    others = (Counter("aab"), array("d", [0.5]), range(2), Number.ONE, Text("a"), Pair(1, 2))
    assert again(others) == ({"a": 2, "b": 1}, [0.5], [0, 1], 1, "a", (1, 2))
    launch = Launch("mpirun", 1, 2, None, None)
    assert again({"launch": [launch]}) == {"launch": [launch]}
    assert again(BucketPlan((), 7)) == BucketPlan((), 7)


@pytest.mark.parametrize("value", [Mine(1), object(), Path("a"), np.array([None]), [1, {2: print}], 1j])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(HvpipeError, match="Ranks exchange plain values"):
        packed(value)
    with pytest.raises(HvpipeError, match=r"cannot prove who they are, .*set HVPIPE_SECRET before"):
        packed_for_user(value, trusted=False)


class Attack:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle ran",)


def test_pickles_are_read_from_trusted_ranks_only() -> None:
    assert unpacked_for_user(packed_for_user(Path("a"), True), True) == Path("a")
    assert unpacked_for_user(packed_for_user((1, "a"), False), False) == (1, "a")
    attack = pickle.dumps(Attack())
    with pytest.raises(PeerError, match="install the same version on all hosts"):
        unpacked(attack)
    with pytest.raises(PeerError):
        unpacked_for_user(attack, False)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"X1",
        b"J{",
        b"J" + b"[" * 100_000,
        b'J{"bytes": "*"}',
        b'J{"array": ["|O", [1], false, "AAAAAAAAAAA="]}',
        b'J{"array": ["<f8", [9], false, ""]}',
        b'J{"new": 1}',
        b'J{"class": ["os", "system"], "fields": {}}',
        b'J{"class": ["hvpipe.world.objects", "pickle.Pickler"], "fields": {}}',
        b'J{"class": ["hvpipe.world.objects", "packed"], "fields": {}}',
        b'J{"class": ["hvpipe.environment.discover", "Launch"], "fields": {"rank": 1}}',
        b'J{"class": ["hvpipe.nothing", "Nothing"], "fields": {}}',
    ],
)
def test_bad_texts_are_errors(text: bytes) -> None:
    with pytest.raises(PeerError, match="Another rank should send what this version of hvpipe can read"):
        unpacked(text)


def test_changed_texts_are_errors_or_plain_values() -> None:
    chance = random.Random(3)
    text = packed([Launch("mpirun", 1, 2, 3, 4), {"a": (1, b"2", np.ones(3))}, {5}])
    for _ in range(3000):
        changed = bytearray(text)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            unpacked(changed)
        except PeerError:
            continue
