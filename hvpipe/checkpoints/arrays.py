"""Arrays in .npz files, written one at a time and read without executing code."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvpipe.checkpoints.files import Sink
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import open_plain


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
    """Read these arrays of a .npz. They take no more memory than the file has bytes, which a manifest states.

    Raises:
        HvpipeError: The file is damaged, lacks a name, or has arrays that `write_arrays` does not write.
    """
    try:
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            left_bytes, found = os.fstat(file.fileno()).st_size, {}
            for name in names:
                entry = archive.getinfo(f"{name}.npy")
                left_bytes -= entry.file_size
                if entry.compress_type != zipfile.ZIP_STORED or left_bytes < 0:
                    raise ValueError(f"{name} is packed, or takes more bytes than the file has")
                found[name] = _read_array(archive, entry)
            return found
    except (EOFError, KeyError, OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise HvpipeError(f"{path} should be unchanged. Received: {type(error).__name__}: {error}") from error


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Any:
    """Read one array, whose head must not promise more than follows: NumPy would take the memory first."""
    with archive.open(entry) as opened:
        version = np.lib.format.read_magic(opened)
        if version != (1, 0):  # which write_array chooses for the heads of plain arrays
            raise ValueError(f"{entry.filename} has version {version} of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
        promised, following = math.prod(shape) * dtype.itemsize, entry.file_size - opened.tell()
        if dtype.hasobject or min(shape, default=0) < 0 or promised != following:
            raise ValueError(f"{entry.filename} promises {dtype}{list(shape)}, and {following} bytes follow")
    with archive.open(entry) as opened:
        return np.lib.format.read_array(opened, allow_pickle=False)
