"""What hvpipe adds to plain Keras apart from the step: tracing, memory, import; in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.errors import ClusterError
from bench.launch import mpirun
from bench.metrics import median
from bench.training.image_model import ImageWorkload

_ROOT = Path(__file__).parents[2]
_SYSTEMS = ("plain", "none", "step")
_HEAVY = ("tensorflow", "keras", "numpy", "mpi4py")
_IMPORT = (
    "import sys, time; start = time.perf_counter(); import hvpipe; took = time.perf_counter() - start;"
    f"print(took, *[name for name in {_HEAVY!r} if name in sys.modules])"
)


@dataclass(frozen=True)
class OverheadReport:
    """Probes of plain Keras and hvpipe's modes on ranks of a host: probes[system][repeat][rank][figure]."""

    ranks: int
    workload: str
    probes: dict[str, list[list[dict[str, float]]]]
    import_s: list[float]
    imported: list[str]  # heavy modules that importing hvpipe should not import

    def figure(self, system: str, name: str) -> float:
        """Return the median over all repeats and ranks."""
        return median([rank[name] for repeat in self.probes[system] for rank in repeat])

    def summary(self) -> dict[str, float]:
        """Return the main figures."""
        figures = {"import_ms": median(self.import_s) * 1e3}
        gradient_bytes = self.figure("plain", "gradient_bytes")
        figures["gradient_MB"] = gradient_bytes / 1e6
        figures["allowed_extra_MB"] = (1.2 * gradient_bytes + (16 << 20)) / 1e6
        for system in self.probes:
            if system != "plain":
                figures[f"{system}_trace_ratio"] = self.figure(system, "trace_s") / self.figure(
                    "plain", "trace_s"
                )
                for name in ("peak", "own"):
                    extra = self.figure(system, f"{name}_bytes") - self.figure("plain", f"{name}_bytes")
                    figures[f"{system}_extra_{name}_MB"] = extra / 1e6
        return figures

    def to_json(self) -> str:
        """Return every probe, and derived figures."""
        return json.dumps({**asdict(self), "summary": self.summary()}, indent=1)

    def to_text(self) -> str:
        """Return one line for each figure."""
        lines = [f"{self.workload}; {self.ranks} ranks on one host, fresh processes"]
        for system in self.probes:
            lines.append(
                f"{system:<9} tracing {self.figure(system, 'trace_s'):.2f} s, peak memory "
                f"{self.figure(system, 'peak_bytes') / 1e6:.0f} MB; in the end, without mapped files, "
                f"{self.figure(system, 'own_bytes') / 1e6:.0f} MB"
            )
        lines += [f"{name} = {value:.3f}" for name, value in self.summary().items()]
        lines.append(
            f"imported by `import hvpipe`: {', '.join(self.imported) or 'none'} of {', '.join(_HEAVY)}"
        )
        return "\n".join(lines)


def measure_import(times: int = 9) -> tuple[list[float], list[str]]:
    """Return seconds of `import hvpipe` in fresh processes, and the heavy modules that it imported."""
    seconds: list[float] = []
    heavy: list[str] = []
    for _ in range(times):
        done = mpirun.run([sys.executable, "-c", _IMPORT], timeout_s=60, env={"PYTHONPATH": str(_ROOT)})
        if done.returncode != 0:
            raise ClusterError(f"`import hvpipe` failed: {done.stderr}")
        took, *heavy = done.stdout.split()
        seconds.append(float(took))
    return seconds, heavy


def measure_overhead(
    workload: ImageWorkload, ranks: int, timeout_s: float, repeats: int = 3
) -> OverheadReport:
    """Probe each system `repeats` times in turn, each time in fresh processes on all ranks at once."""
    probes: dict[str, list[list[dict[str, float]]]] = {system: [] for system in _SYSTEMS}
    for index in range(repeats):
        for system in _SYSTEMS:
            print(f"probe {index + 1} of {repeats}: {system} ...", file=sys.stderr, flush=True)
            probes[system].append(_probe(workload, system, ranks, timeout_s))
    return OverheadReport(ranks, workload.describe(), probes, *measure_import())


def _probe(workload: ImageWorkload, system: str, ranks: int, timeout_s: float) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as directory:
        program = [
            sys.executable,
            "-m",
            "bench.step.overhead_probe",
            json.dumps(asdict(workload)),
            system,
            directory,
        ]
        try:
            done = mpirun.run(
                mpirun.one_host(ranks, program), timeout_s=timeout_s, env={"PYTHONPATH": str(_ROOT)}
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"A probe of {system} must end within --timeout {timeout_s:g} s. Received: still running"
            ) from error
        results = [Path(directory) / f"{rank}.json" for rank in range(ranks)]
        if done.returncode != 0 or not all(path.exists() for path in results):
            raise ClusterError(f"A probe of {system} failed with status {done.returncode}:\n{done.stderr}")
        return [json.loads(path.read_text()) for path in results]
