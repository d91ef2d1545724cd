"""The outcome of an evaluation: every round, the links, the pipelines, and on what; results.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.hosts.hardware import HostHardware
from bench.hosts.links import LinkFacts
from bench.pipeline.report import PipelineReport
from bench.rounds.record import FORMAT, Round, means_not_up


class OutcomeError(ValueError):
    """A file that is no outcome of an evaluation."""


@dataclass(frozen=True)
class ClusterFacts:
    """A cluster by its name: in words, how many hosts, and the rate that bounds a ring through them."""

    name: str
    description: str
    hosts: int
    slowest_bits_per_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """Which suite ran, on what, since when; `plan` is the suite as data, which a resumed run must share.

    `software` has versions by name (bench.evaluation.software); empty in results of before it was kept.
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
        """The cluster of that name."""
        return next(each for each in self.clusters if each.name == name)


@dataclass(frozen=True)
class PipelineOutcome:
    """A pipeline run of the suite: its report, or why there is none."""

    name: str
    report: PipelineReport | None = None
    error: str = ""

    @property
    def not_up(self) -> bool:
        """Whether only the place was missing; it may be there the next time."""
        return means_not_up(self.error)


@dataclass(frozen=True)
class EvaluationOutcome:
    """All that an evaluation kept, in the order in which it came."""

    setting: Setting
    rounds: tuple[Round, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    pipelines: tuple[PipelineOutcome, ...] = ()

    def to_json(self) -> str:
        """Everything; from_json reads it."""
        data = {
            "format": FORMAT,
            "setting": asdict(self.setting),
            "rounds": [each.to_dict() for each in self.rounds],
            "links": [asdict(each) for each in self.links],
            "pipelines": [asdict(each) for each in self.pipelines],
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> EvaluationOutcome:
        """What to_json wrote; OutcomeError where it did not."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise OutcomeError(f"Results should be of format {FORMAT}. Received: {data['format']!r}")
            return EvaluationOutcome(
                setting_from_dict(data["setting"]),
                tuple(Round.from_dict(each) for each in data["rounds"]),
                tuple(LinkFacts(**each) for each in data["links"]),
                tuple(pipeline_from_dict(each) for each in data["pipelines"]),
            )
        except OutcomeError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OutcomeError(
                f"Results should be as `hvpipe bench run` writes them. Received: {error!r}"
            ) from error

    @staticmethod
    def read(path: Path) -> EvaluationOutcome:
        """From results.json, or from a folder that has one."""
        file = path / "results.json" if path.is_dir() else path
        try:
            return EvaluationOutcome.from_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OutcomeError(f"Results should be a file that can be read. Received: {file}") from error
        except OutcomeError as error:
            raise OutcomeError(f"{file}: {error}") from error


def setting_from_dict(data: dict[str, Any]) -> Setting:
    """What asdict made of a Setting, perhaps through JSON."""
    rest = {k: v for k, v in data.items() if k not in ("machine", "clusters", "notes")}
    clusters = tuple(ClusterFacts(**each) for each in data["clusters"])
    return Setting(
        machine=HostHardware(**data["machine"]), clusters=clusters, notes=tuple(data["notes"]), **rest
    )


def pipeline_from_dict(data: dict[str, Any]) -> PipelineOutcome:
    """What asdict made of a PipelineOutcome, perhaps through JSON."""
    report = None if data["report"] is None else PipelineReport.from_dict(data["report"])
    return PipelineOutcome(data["name"], report, data["error"])
