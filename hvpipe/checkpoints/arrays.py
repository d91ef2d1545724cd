"""Arrays in .npz files, written one at a time and read without executing code."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvpipe.checkpoints.files import Sink
from hvpipe.errors import HvpipeError


def write_arrays(sink: Sink, values: Mapping[str, Any]) -> None:
    """Write a .npz: everything that NumPy can make an array of, by name."""
    with zipfile.ZipFile(cast(Any, sink), "w", allowZip64=True) as archive:
        for name, value in values.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, plain(value), allow_pickle=False)


def plain(value: Any) -> Any:
    """Return an array that NumPy can save: bfloat16 and the like become integers with the same bits."""
    found = np.asarray(value)
    return found if found.dtype.kind in "biufc" else found.view(f"u{found.dtype.itemsize}")


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read these arrays of a .npz.

    Raises:
        HvpipeError: The file is damaged or lacks a name.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in names}
    except (EOFError, KeyError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise HvpipeError(f"{path} should be unchanged. Received: {type(error).__name__}: {error}") from error
