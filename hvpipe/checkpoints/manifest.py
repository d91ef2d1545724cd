"""The manifest of a checkpoint: which files belong to it, of which model, and where training was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvpipe.checkpoints.files import FileRecord, UnreadableError, write_file
from hvpipe.config_file import MOST_BYTES, Table, read_document
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import read_plain

MANIFEST = "manifest.json"
FORMAT, VERSION = "hvpipe-checkpoint", 1


@dataclass(frozen=True)
class Position:
    """How far training is.

    Attributes:
        step: Steps since training began.
        epoch: The current epoch, from 0. Between two epochs it is the next one.
        batch: Steps since the epoch began.
        samples: Samples that all ranks have trained on since training began.
        epoch_samples: The same since the epoch began.
    """

    step: int
    epoch: int
    batch: int
    samples: int = 0
    epoch_samples: int = 0


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote: its file, and the names of the arrays in it."""

    rank: int
    file: FileRecord
    names: tuple[str, ...]
    samples: int = 0
    epoch_samples: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        run: Names the start of the job that wrote it, or the save by hand.
        kind: How the model was trained: "data_parallel" or "pipeline".
        position: How far training was; zeros if it was saved by hand.
        model: What must fit the model that resumes: a description of each variable, and of the optimizer.
        parts: What each rank wrote, by rank.
    """

    run: str
    kind: str
    position: Position
    model: Mapping[str, Any]
    parts: tuple[RankPart, ...]

    @property
    def ranks(self) -> int:
        """How many ranks wrote it."""
        return len(self.parts)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint: now it is complete."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "run": manifest.run,
        "kind": manifest.kind,
        "position": asdict(manifest.position),
        "model": dict(manifest.model),
        "parts": [part_document(part) for part in manifest.parts],
    }
    text = json.dumps({**document, "sha256": _digest(document)}, indent=1) + "\n"
    write_file(folder / MANIFEST, lambda sink: sink.write(text.encode()))


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest.

    Raises:
        UnreadableError: It is of another version, or the disk or the network failed.
        HvpipeError: It is damaged, or not a manifest.
    """
    path = folder / MANIFEST
    try:
        read_plain(path, MOST_BYTES)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    table = read_document(path)
    document = table.as_dict()
    unchanged = document.pop("sha256", None) == _digest(document)
    if unchanged and document.get("format") == FORMAT and document.get("version") != VERSION:
        raise UnreadableError(
            f"{path} should be of version {VERSION}, which this hvpipe reads. "
            f"Received: version={document.get('version')!r}"
        )
    table.check_format(FORMAT, VERSION)
    if not unchanged:
        raise HvpipeError(
            f"{path} should be unchanged. Received: a manifest with another SHA-256 than its own"
        )
    position = table.table("position")
    return Manifest(
        run=table.text("run"),
        kind=table.text("kind"),
        position=Position(**{name: position.integer(name) for name in Position.__dataclass_fields__}),
        model=table.table("model").as_dict(),
        parts=tuple(map(read_part, table.tables("parts"))),
    )


def part_document(part: RankPart) -> dict[str, Any]:
    """Return a part as JSON."""
    return {**asdict(part), "names": list(part.names), "notes": dict(part.notes)}


def read_part(table: Table) -> RankPart:
    """Read a part from JSON. Raises HvpipeError if a field is missing."""
    file = table.table("file")
    name = file.file_name("name")
    return RankPart(
        rank=table.integer("rank"),
        file=FileRecord(name, file.integer("size_bytes"), file.text("sha256")),
        names=tuple(table.texts("names")),
        samples=table.integer("samples"),
        epoch_samples=table.integer("epoch_samples"),
        notes=table.table("notes").as_dict(),
    )


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
