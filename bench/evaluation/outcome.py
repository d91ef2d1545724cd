"""The outcome of an evaluation: every round and link, and the setting; results.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.hosts.hardware import HostHardware
from bench.hosts.links import LinkFacts
from bench.rounds.record import FORMAT, Round

FILE = "results.json"


@dataclass(frozen=True)
class ClusterFacts:
    """A cluster by name: its description, number of hosts, and the rate that limits a ring through them."""

    name: str
    description: str
    hosts: int
    slowest_bits_per_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """Which suite ran, on what, and since when. A resumed run must have the same `plan`, the suite as data.

    `software` has versions by name (bench.evaluation.software).
    """

    suite: str
    title: str
    started: str  # ISO date and time, UTC
    machine: HostHardware
    clusters: tuple[ClusterFacts, ...]
    plan: dict[str, Any]
    notes: tuple[str, ...] = ()
    software: dict[str, str] = field(default_factory=dict)

    def cluster(self, name: str) -> ClusterFacts:
        return next(each for each in self.clusters if each.name == name)


@dataclass(frozen=True)
class EvaluationOutcome:
    """Everything that an evaluation kept, in the order in which it came."""

    setting: Setting
    rounds: tuple[Round, ...] = ()
    links: tuple[LinkFacts, ...] = ()

    def to_json(self) -> str:
        """Return everything as text for from_json."""
        data = {
            "format": FORMAT,
            "setting": asdict(self.setting),
            "rounds": [each.to_dict() for each in self.rounds],
            "links": [asdict(each) for each in self.links],
        }
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> EvaluationOutcome:
        """Read what to_json returned. BenchError for other texts."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise BenchError(f"Results should be of format {FORMAT}. Received: {data['format']!r}")
            return EvaluationOutcome(
                _setting_from_dict(data["setting"]),
                tuple(Round.from_dict(each) for each in data["rounds"]),
                tuple(LinkFacts(**each) for each in data["links"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BenchError(
                f"Results should be as `hvpipe bench run` writes them. Received: {error!r}"
            ) from error

    @staticmethod
    def read(path: Path) -> EvaluationOutcome:
        """Read results.json, or a folder that has one."""
        file = path / FILE if path.is_dir() else path
        try:
            return EvaluationOutcome.from_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"Results should be a file that can be read. Received: {file}") from error
        except BenchError as error:
            raise BenchError(f"{file}: {error}") from error


def _setting_from_dict(data: dict[str, Any]) -> Setting:
    """Read what asdict returned for a Setting, perhaps through JSON."""
    rest = {k: v for k, v in data.items() if k not in ("machine", "clusters", "notes")}
    clusters = tuple(ClusterFacts(**each) for each in data["clusters"])
    return Setting(
        machine=HostHardware(**data["machine"]), clusters=clusters, notes=tuple(data["notes"]), **rest
    )
