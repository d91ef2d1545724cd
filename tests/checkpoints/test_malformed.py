"""Manifests with a wrong value somewhere, and any bytes: an HvpipeError, and no code is executed."""

from __future__ import annotations

import io
import json
import zipfile
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
        ["", "../../etc/passwd", "..", "\ud800", -1, 1e308, 10**400, float("nan"), None, [], {}, [[]], True]
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
        assert Path(part.file.name).name == part.file.name != ".."


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


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Regression: 3 MB could become 3 GB, and a head of 128 bytes could ask for any memory."""
    path = tmp_path / "rank-0.npz"
    np.savez_compressed(path, **{"weights/0": np.zeros(1 << 20)})
    assert path.stat().st_size < 1 << 16
    with pytest.raises(HvpipeError, match="weights/0 is packed, or takes more bytes than the file has"):
        read_arrays(path, ["weights/0"])
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/0.npy", head.getvalue() + bytes(8))
    with pytest.raises(HvpipeError, match=r"promises float64\[1125899906842624\], and 8 bytes follow"):
        read_arrays(path, ["weights/0"])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/0.npy", bytes(1 << 10))
    content = path.read_bytes()
    size = (1 << 10).to_bytes(4, "little")
    path.write_bytes(content.replace(size, (1 << 31).to_bytes(4, "little")))
    with pytest.raises(HvpipeError, match="is packed, or takes more bytes than the file has"):
        read_arrays(path, ["weights/0"])
