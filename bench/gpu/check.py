"""Verify and measure hvpipe on this machine's GPU: `python -m bench.gpu.check`.

It builds hvpipe if its GPU library is missing, and runs one_rank_driver.cc. Then it runs
bench.gpu.check_worker with one rank, with two through the host and with two by NCCL. Every result is compared
with a float64 reference, on fresh random data, with poisoned outputs. It needs PyTorch, MPI and nvcc;
bench/README.md says how to install what is missing. On a machine with one GPU two ranks share it, which needs
NCCL 2.30 or later (HVPIPE_NCCL_LIBRARY).

Exit codes: 0 all is right; 1 a result is wrong, a rank failed or a figure falls short (not with --small); 77
no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hvpipe.comm.rank_gpu import find_nccl

NO_GPU = 77
REPOSITORY = Path(__file__).parents[2]
WORKER = "bench.gpu.check_worker"
RUN_TIMEOUT_S = 600.0  # of each run: a new GPU may first compile kernels
CACHE = {"CUDA_CACHE_MAXSIZE": str(4 << 30)}  # so that CUDA keeps them
SHARES_A_GPU = 23000  # from this version of NCCL on, two ranks may share a GPU

Row = dict[str, Any]


def gpus() -> int | str:
    """Return the number of GPUs that PyTorch can use, or the reason why none."""
    try:
        from bench.gpu.torch_gpu import count_gpus
    except ImportError as error:
        return f"PyTorch does not load: {error}"
    return count_gpus() or "PyTorch finds no CUDA device"


def build() -> None:
    """Install hvpipe from this folder, unless its GPU library exists."""
    look = (
        "import sys; from hvpipe.comm.native import native_directory as native; "
        "sys.exit(not (native() / 'libhvpipe_cuda.so').exists())"
    )
    there = subprocess.run([sys.executable, "-c", look], cwd=REPOSITORY, capture_output=True, check=False)
    if there.returncode == 0:
        return
    print("building hvpipe with its GPU library", flush=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def nccl_version(named: str) -> int:
    """Return the version as NCCL writes it, 23005 for 2.30.5; 0 if it does not load."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL(find_nccl(named)).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def one_rank(nccl: str, timeout_s: float = RUN_TIMEOUT_S) -> list[Row]:
    """Return a row for each part of one_rank_driver.cc: streams, casts, and every call of this NCCL."""
    where = "from hvpipe.comm.native import native_directory; print(native_directory())"
    found = subprocess.run([sys.executable, "-c", where], cwd=REPOSITORY, capture_output=True, text=True)
    native = found.stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "one_rank")
        compiling = [shutil.which("mpicxx") or "mpicxx", "-std=c++17", "-I", "csrc"]
        compiling += [
            "bench/gpu/one_rank_driver.cc",
            "-o",
            program,
            "-L",
            native,
            "-lhvpipe_core",
            "-pthread",
        ]
        try:
            subprocess.run([*compiling, f"-Wl,-rpath,{native}"], cwd=REPOSITORY, check=True)
            command = [program, f"{native}/libhvpipe_cuda.so", *([nccl] if nccl else [])]
            env = {**CACHE, **os.environ}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return [{"what": "one rank, C++", "result": f"FAILED: {error}", "ok": False}]
    return driver_rows(done.stdout, done.returncode)


def driver_rows(output: str, code: int) -> list[Row]:
    """Return the rows in the output of one_rank_driver.cc, and one more if it crashed."""
    rows: list[Row] = []
    for kind, _, rest in (line.partition(" ") for line in output.splitlines()):
        what, _, why = rest.partition(": ") if kind == "FAILED" else (rest, "", kind)
        rows.append({"what": f"C++: {what}", "result": why, "ok": {"ok": True, "FAILED": False}.get(kind)})
    if code not in (0, 1):
        rows.append({"what": "C++: the program", "result": f"FAILED: exit code {code}", "ok": False})
    return rows


def run(ranks: int, settings: dict[str, str], small: bool, timeout_s: float = RUN_TIMEOUT_S) -> list[Row]:
    """Return the rows that rank 0 of the worker wrote, and one more if a rank failed or took too long."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "hvpipe", "run", "--no-summary", "-np", str(ranks), "-m", WORKER]
        command += [str(rows), *(["small"] if small else [])]
        # Ranks wait for each other as long as one of them may take.
        waits = {"HVPIPE_TIMEOUT": str(max(60.0, timeout_s / 2)), **CACHE, **os.environ, **settings}
        with subprocess.Popen(command, env=waits, cwd=REPOSITORY) as launcher:
            try:
                code = launcher.wait(timeout_s)
                ended = f"exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                launcher.terminate()  # which ends the ranks as well
                try:
                    launcher.wait(20)
                except subprocess.TimeoutExpired:
                    launcher.kill()
                ended = f"took longer than {timeout_s:g} s"
        found: list[Row] = json.loads(rows.read_text()) if rows.exists() else []
    if ended:
        found.append({"what": f"{ranks} rank(s) {settings}", "result": f"FAILED: {ended}", "ok": False})
    return found


def runs(devices: int, version: int) -> list[tuple[int, dict[str, str]]]:
    """Return ranks and settings of each run with this version of NCCL."""
    shared = {}
    if devices == 1:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        shared = {"CUDA_VISIBLE_DEVICES": first, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    found: list[tuple[int, dict[str, str]]] = [(1, {}), (2, {**shared, "HVPIPE_NCCL_LIBRARY": "none"})]
    if version >= (SHARES_A_GPU if devices == 1 else 1):
        found.append((2, shared))
    return found


def table(rows: list[Row]) -> str:
    """Format the rows; "!!" marks wrong ones."""
    width = max((len(row["what"]) for row in rows), default=0)
    return "\n".join(
        f"{'!!' if row['ok'] is False else '  '} {row['what']:{width}}  {row['result']}" for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--small", action="store_true", help="little data, for a run under compute-sanitizer")
    parser.add_argument(
        "--timeout", type=float, default=RUN_TIMEOUT_S, help="seconds for each of three runs (default: 600)"
    )
    arguments = parser.parse_args()
    devices = gpus()
    if isinstance(devices, str):
        print(f"No GPU to check here: {devices}. Nothing was measured (exit {NO_GPU}).")
        return NO_GPU
    build()
    version = nccl_version(os.environ.get("HVPIPE_NCCL_LIBRARY", ""))
    planned = runs(devices, version)
    rows: list[Row] = one_rank(find_nccl(os.environ.get("HVPIPE_NCCL_LIBRARY", "")))
    print(table(rows), flush=True)
    if len(planned) < 3:
        result = f"left out: two ranks on one GPU need NCCL {SHARES_A_GPU}, found {version or 'none'}"
        rows.append({"what": "2 ranks, NCCL", "result": result, "ok": None})
        print(table(rows[-1:]))
    for ranks, settings in planned:
        new = run(ranks, settings, arguments.small, arguments.timeout)
        rows += new
        print(table(new), flush=True)
        if arguments.json:  # after each run, because the next one may hang
            date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            arguments.json.write_text(json.dumps({"date": date, "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row["ok"] is False]
    print(f"{len(rows)} rows, {len(wrong)} wrong")
    if devices == 1:
        print("NOT SHOWN: how much of an all-reduce is hidden, as two ranks on one GPU share its time.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
