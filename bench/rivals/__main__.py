"""Trains a small model on two ranks with each library, in situations that users meet, and says what comes.

    make rivals
    python -m bench.rivals

Each training has eight steps of 32 samples. The reference is one rank of the same library with all samples.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.command import status_of
from bench.errors import BenchError
from bench.launch.processes import started
from bench.metrics import table
from bench.rivals.worker import LIBRARIES

RIVALS = ROOT / ".venv-rivals" / "bin" / "python"
CASES = {
    "fit": "`fit` after the library's set-up",
    "plain": "16 + 16 samples, no BatchNormalization",
    "batchnorm": "16 + 16 samples, BatchNormalization",
    "unequal": "24 + 8 samples",
    "killed": "rank 1 is killed in step 3",
}
_SIZE = 2
_CLOSE = 1e-5  # of weights of about 1, in float32
_WAITS_S = 60.0  # the longest wait for ranks to end


@dataclass(frozen=True)
class Ended:
    """How the ranks of a training ended. `codes` has None for a rank that had not ended in time."""

    codes: list[int | None]
    seconds: float
    last_line: str
    weights: list[list[Any]]


def train(library: str, case: str, size: int) -> Ended:
    """Train, and return what came out."""
    with tempfile.TemporaryDirectory(prefix="hvpipe-rivals-") as folder, ExitStack() as stack:
        file, output = f"{folder}/weights", Path(folder, "output")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{found.getsockname()[1]}"
        env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
        worker = ["-m", "bench.rivals.worker", library, case]
        log = stack.enter_context(output.open("w"))
        if library == "hvpipe":
            run = [sys.executable, "-m", "hvpipe", "run", "-np", str(size)]
            commands = [[*run, *worker, "0", str(size), address, file]]
        else:
            commands = [[str(RIVALS), *worker, str(rank), str(size), address, file] for rank in range(size)]
        begun_s = time.monotonic()
        ranks = [
            stack.enter_context(started(command, env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
            for command in commands
        ]
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(timeout=max(0.0, begun_s + _WAITS_S - time.monotonic()))
        seconds = time.monotonic() - begun_s
        codes = [rank.poll() for rank in ranks]
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        return Ended(codes, seconds, lines[-1] if lines else "", _weights(file, size))


def _weights(file: str, size: int) -> list[list[Any]]:
    import numpy as np

    found = []
    for rank in range(size):
        if Path(f"{file}-{rank}.npz").exists():
            with np.load(f"{file}-{rank}.npz") as saved:
                found.append([saved[name] for name in saved.files])
    return found


def _difference(one: list[Any], other: list[Any]) -> float:
    return max(float(abs(mine - theirs).max()) for mine, theirs in zip(one, other, strict=True))


def found(library: str, case: str) -> str:
    """Return in a few words what came out."""
    ended = train(library, case, _SIZE)
    if case == "killed":
        waits = [rank for rank, code in enumerate(ended.codes) if code is None]
        if waits:
            return f"rank {waits[0]} still waits after {_WAITS_S:.0f} s"
        return f"all ranks end within {ended.seconds:.0f} s"
    if len(ended.weights) < _SIZE:
        how = "still wait" if None in ended.codes else "end with an error"
        return f"ranks {how}: {ended.last_line[:100]}"
    between = _difference(*ended.weights)
    said = "ranks end with equal weights" if between == 0 else f"ranks' weights differ by {between:.1g}"
    alone = train(library, case, 1)
    if not alone.weights:
        raise BenchError(f"One rank should train {case} with {library}. Received: {alone.last_line}")
    off = _difference(ended.weights[0], alone.weights[0])
    return f"{said}; {'as' if off < _CLOSE else f'{off:.1g} from'} one rank with all samples"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.rivals", description=__doc__.partition("\n")[0])
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="default: all")
    options = parser.parse_args(arguments)
    libraries = options.library or [*LIBRARIES]
    if not RIVALS.exists() and set(libraries) != {"hvpipe"}:
        raise BenchError("Keras on PyTorch and on JAX are not installed: `make rivals` installs them")
    rows = []
    for case, title in CASES.items():
        rows.append([title])
        for library in libraries:
            rows[-1].append(found(library, case))
            print(f"{library}, {title}: {rows[-1][-1]}", file=sys.stderr, flush=True)
    print(table(["", *libraries], rows))
    return 0


if __name__ == "__main__":
    sys.exit(status_of("bench.rivals", main))
