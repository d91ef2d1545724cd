"""What the evaluation must know about a system: how it starts, what trains with it, what it needs."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bench import ROOT

TUNED = Path(__file__).with_name("tuned.json")  # values and their source by system, from `hvpipe bench tune`
Start = Literal["mpirun", "horovodrun", "processes", "servers"]


def usual_python() -> str:
    """Return the Python of `make peers`, in which every system runs on the same TensorFlow, else this one."""
    peers = ROOT / ".venv-peers" / "bin" / "python"
    return str(peers) if peers.exists() else sys.executable


@dataclass(frozen=True)
class System:
    """One system under test.

    `adapter` is a module of bench.systems with a function `train(job)`, which every rank calls. `start` is
    "mpirun" or "horovodrun" (over Gloo); or "processes", one per rank, with a TF_CONFIG that names the
    others; or "servers", the same with a parameter server on each host and a coordinator. `environment` is
    set in every process before imports; `options` are the adapter's own. If its steps are `uneven`
    (asynchronous workers, or a reduction every few steps), only their mean counts. An `exact` system trains
    as one process would on the whole batch, up to rounding in float32. Its rounds have at least `least_steps`
    timed steps. `own_environment` is the virtual environment in which it runs, if it has one of its own.
    `alone` names the system that computes the same without the other ranks.
    """

    name: str
    title: str
    adapter: str
    start: Start
    needs: tuple[str, ...] = ("tensorflow", "keras")
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    uneven: bool = False
    exact: bool = True
    least_steps: int = 1
    own_environment: str = ""
    alone: str = "single"

    def python(self, python: str) -> str:
        """Return the Python under which its processes run: `python`, or that of its own environment."""
        return str(ROOT / self.own_environment / "bin" / "python") if self.own_environment else python

    def tuned(self, values: Mapping[str, str]) -> System:
        """Return the same with other values of its options, and of variables in its environment."""
        options = {name: value for name, value in values.items() if name in self.options}
        others = {name: value for name, value in values.items() if name not in options}
        return replace(self, options={**self.options, **options}, environment={**self.environment, **others})

    def missing(self, python: str = sys.executable) -> str:
        """Return why it cannot run under that Python, or ""."""
        python = self.python(python)
        if self.own_environment and not Path(python).exists():
            return f"not installed; `make rivals` installs it in {self.own_environment}"
        absent = [package for package in self.needs if not _has(python, package)]
        if not absent:
            return ""
        how = "; `make peers` installs it in .venv-peers" if "horovod" in absent else ""
        return f"{', '.join(absent)} not installed in {python}{how}"


@functools.cache
def _has(python: str, package: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False, timeout=60, capture_output=True).returncode == 0


def read_tuned(file: Path = TUNED) -> dict[str, tuple[dict[str, str], str]]:
    """Return the values of each tuned system, as texts by name, and where they come from."""
    found = json.loads(file.read_text(encoding="utf-8"))
    return {system: (tuned["values"], tuned["source"]) for system, tuned in found.items()}


def keep_tuned(system: str, values: Mapping[str, str], source: str, file: Path = TUNED) -> None:
    """Store the values that a system uses from now on."""
    every = {**json.loads(file.read_text(encoding="utf-8")), system: {"values": values, "source": source}}
    file.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")
