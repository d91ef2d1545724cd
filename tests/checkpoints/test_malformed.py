"""Manifests with a wrong value somewhere, and any bytes: an HvpipeError, and no code is executed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from hvpipe.checkpoints.arrays import read_arrays
from hvpipe.checkpoints.files import FileRecord
from hvpipe.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    Position,
    RankPart,
    _digest,
    read_manifest,
    write_manifest,
)
from hvpipe.errors import HvpipeError

WRONG = st.one_of(
    st.sampled_from(
        ["", "../../etc/passwd", "\ud800", -1, 1e308, 10**400, float("nan"), None, [], {}, [[]], True]
    ),
    st.text(max_size=4),
    st.integers(),
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("good")
    part = RankPart(0, FileRecord("rank-0.npz", 10, "ab"), ("weights/0",), 3, 3, {"a": 1})
    write_manifest(
        folder, Manifest("4f2a9c", "data_parallel", Position(5, 1, 2), {"variables": [1]}, (part,))
    )
    return (folder / MANIFEST).read_text()


def _read(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text, errors="surrogatepass")
    try:
        found = read_manifest(folder)
    except HvpipeError:
        return
    for part in found.parts:
        assert Path(part.file.name).name == part.file.name


@examples(30)
@given(data=st.data())
def test_one_wrong_value(
    data: st.DataObject, manifest: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a digest that fits, as another program would write it."""
    document: Any = json.loads(manifest)
    del document["sha256"]
    at = document
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(WRONG)
    document["sha256"] = _digest(document)
    _read(tmp_path_factory.mktemp("wrong"), json.dumps(document))


@examples(30)
@given(data=st.data())
def test_one_wrong_byte(data: st.DataObject, manifest: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = data.draw(st.integers(0, len(manifest) - 1))
    text = manifest[:place] + data.draw(st.characters()) + manifest[place + data.draw(st.integers(0, 40)) :]
    _read(tmp_path_factory.mktemp("bytes"), text)


def test_a_pickle_among_the_arrays_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    sink = io.BytesIO()
    np.savez(sink, **{"weights/0": np.array([Evil()], dtype=object)}, allow_pickle=True)
    (tmp_path / "rank-0.npz").write_bytes(sink.getvalue())
    with pytest.raises(HvpipeError, match="should be unchanged"):
        read_arrays(tmp_path / "rank-0.npz", ["weights/0"])
    assert not (tmp_path / "executed").exists()
