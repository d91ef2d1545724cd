"""Ranks that run different versions."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import hvpipe
from hvpipe.errors import InitError
from hvpipe.world.versions import check_same_versions, difference, own_versions


def test_versions_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="3.13.2"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert own_versions() == {"hvpipe": hvpipe.__version__, "Python": python, "Keras": "3.13.2"}


def test_differences_are_named() -> None:
    same = ("a", {"hvpipe": "1", "Keras": "3.13.2"})
    assert difference([same, ("b", {"hvpipe": "1"}), same]) == ""  # rank 1 has not imported Keras yet
    others = [same, ("b", {"hvpipe": "1"}), ("c", {"hvpipe": "1", "Keras": "3.12.0"})]
    assert difference(others) == "Keras 3.13.2 on rank 0 (a), and 3.12.0 on rank 2 (c)"


def test_ranks_of_other_versions_are_refused() -> None:
    def gather(mine: Any) -> list[Any]:
        return [mine, ("b", {**mine[1], "hvpipe": "0.0.9"})]

    world: Any = SimpleNamespace(size=2, host="a", allgather_object=gather)
    says = rf"hvpipe {hvpipe.__version__} on rank 0 \(a\), and 0.0.9 on rank 1 \(b\)"
    with pytest.raises(InitError, match=says):
        check_same_versions(world)
