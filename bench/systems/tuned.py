"""The values of tuned systems in tuned.json, which `hvpipe bench tune` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True)
class Tuned:
    """Settings by name, as texts, and their source."""

    values: Mapping[str, str]
    source: str


def read_tuned(file: Path = FILE) -> dict[str, Tuned]:
    found = json.loads(file.read_text(encoding="utf-8"))
    return {system: Tuned(**tuned) for system, tuned in found.items()}


def keep_tuned(system: str, tuned: Tuned, file: Path = FILE) -> None:
    """Store the settings that a system uses from now on."""
    every = {**read_tuned(file), system: tuned}
    text = json.dumps({name: asdict(each) for name, each in sorted(every.items())}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")
