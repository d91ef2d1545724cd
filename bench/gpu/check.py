"""Verify and measure hvpipe on this machine's GPU: `python -m bench.gpu.check`.

Builds hvpipe where it lacks its GPU library, then runs bench.gpu.check_worker with one rank and with two:
every result against a float64 reference, on fresh random data, with outputs poisoned before. Needs PyTorch,
MPI and nvcc. Two ranks share the GPU where there is one only, which takes NCCL 2.30 or later
(HVPIPE_NCCL_LIBRARY).

Exits 0 where all is right, 1 where a result is wrong or a rank failed, 77 where there is no GPU to check.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NO_GPU = 77
REPOSITORY = Path(__file__).parents[2]
RUN_TIMEOUT_S = 240


def gpus() -> int | str:
    """How many GPUs PyTorch can use, or why none."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    return torch.cuda.device_count() or "PyTorch finds no CUDA device"


def build() -> None:
    """Install hvpipe from this folder, unless its GPU library is there."""
    look = (
        "import hvpipe.engine as e, sys; sys.exit(not (e.native_directory() / 'libhvpipe_cuda.so').exists())"
    )
    if subprocess.run([sys.executable, "-c", look], capture_output=True, check=False).returncode == 0:
        return
    print("building hvpipe with its GPU library", flush=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e"]
    subprocess.run([*command, str(REPOSITORY)], check=True)


def run(ranks: int, devices: int) -> list[dict[str, object]]:
    """The rows that rank 0 of a worker writes; raises CalledProcessError where a rank failed."""
    env = dict(os.environ)
    if devices < ranks:
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        worker = str(Path(__file__).with_name("check_worker.py"))
        command = [sys.executable, "-m", "hvpipe", "run", "-np", str(ranks), worker, str(rows)]
        subprocess.run(command, env=env, cwd=REPOSITORY, check=True, timeout=RUN_TIMEOUT_S)
        found: list[dict[str, object]] = json.loads(rows.read_text())
    return found


def table(rows: list[dict[str, object]]) -> str:
    """The rows in words and aligned."""
    width = max(len(str(row["what"])) for row in rows)
    return "\n".join(f"{row['what']!s:{width}}  {row['result']}" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    devices = gpus()
    if isinstance(devices, str):
        print(f"No GPU to check here: {devices}. Nothing was measured (exit {NO_GPU}).")
        return NO_GPU
    build()
    rows: list[dict[str, object]] = []
    try:
        for ranks in (1, 2):
            rows += run(ranks, devices)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        if rows:
            print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row for row in rows if row["ok"] is False]
    print(f"{len(rows)} rows, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
