"""Verify and measure hvpipe on this machine's GPU: `python -m bench.gpu.check`.

It runs one_rank_driver.cc, then bench.gpu.check_worker with one rank, with two through the host, and with two
by NCCL. Every result is compared with a float64 reference, on fresh random data, with poisoned outputs. Two
ranks with NCCL also end while a sum is under way, and let one hang. Then NVML's figures are compared with
nvidia-smi's, and compute-sanitizer looks at one rank. Each part has a time limit, and the others go on after
a failure.

It needs hvpipe, PyTorch and MPI; bench/README.md says how to install what is missing. On a machine with one
GPU the ranks share it, which needs NCCL 2.30 or later (HVPIPE_NCCL_LIBRARY); the check then starts MPS, so
that they run side by side.

Exit codes: 0 all is right; 1 a result is wrong, a rank failed or a figure falls short (not with --small); 77
no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.launch import processes
from hvpipe.engine.rank_gpu import find_nccl
from hvpipe.monitor.gpu_meter import GpuMeter
from hvpipe.monitor.nvml import NvmlMissing

NO_GPU = 77
REPOSITORY = Path(__file__).parents[2]
WORKER = "bench.gpu.check_worker"
RUN_TIMEOUT_S = 600.0  # of each run: a new GPU may first compile kernels
CACHE = {"CUDA_CACHE_MAXSIZE": str(4 << 30)}  # so that CUDA keeps them
KERNELS = "hvpipe_cast_"  # the names of hvpipe's kernels begin so
HANGS_S = 10.0  # a collective that hangs ends after this time
SHARES_A_GPU = 23000  # from this version of NCCL on, two ranks may share a GPU

Row = dict[str, Any]


def gpus() -> int | str:
    """Return the number of GPUs that PyTorch can use, or the reason why none."""
    try:
        from bench.gpu.torch_gpu import count_gpus
    except ImportError as error:
        return f"PyTorch does not load: {error}"
    return count_gpus() or "PyTorch finds no CUDA device"


def nccl_version(named: str) -> int:
    """Return the version as NCCL writes it, 23005 for 2.30.5; 0 if it does not load."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL(find_nccl(named)).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def one_rank(nccl: str, timeout_s: float = RUN_TIMEOUT_S) -> list[Row]:
    """Return a row for each part of one_rank_driver.cc: streams, and every call of this NCCL."""
    where = "from hvpipe.environment.native import native_directory; print(native_directory())"
    found = subprocess.run([sys.executable, "-c", where], cwd=REPOSITORY, capture_output=True, text=True)
    native = found.stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "one_rank")
        compiling = ["mpicxx", "-std=c++17", "-I", "csrc", "bench/gpu/one_rank_driver.cc", "-pthread"]
        compiling += ["-o", program, "-L", native, "-lhvpipe_core", f"-Wl,-rpath,{native}"]
        try:
            subprocess.run(compiling, cwd=REPOSITORY, check=True)
            command = [program, f"{native}/libhvpipe_cuda.so", *([nccl] if nccl else [])]
            env = {**CACHE, **os.environ}
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, env=env, check=False
            )
        except subprocess.TimeoutExpired as error:
            return driver_rows(bytes(error.stdout or b"").decode(), f"took longer than {timeout_s:g} s")
        except (OSError, subprocess.SubprocessError) as error:
            return [{"what": "one rank, C++", "result": f"FAILED: {error}", "ok": False}]
    return driver_rows(done.stdout, f"exit code {done.returncode}" if done.returncode not in (0, 1) else "")


def driver_rows(output: str, ended: str) -> list[Row]:
    """Return the rows in the output of one_rank_driver.cc, and one more if it ended badly."""
    rows: list[Row] = []
    for kind, _, rest in (line.partition(" ") for line in output.splitlines()):
        what, _, why = rest.partition(": ") if kind == "FAILED" else (rest, "", kind)
        rows.append({"what": f"C++: {what}", "result": why, "ok": {"ok": True, "FAILED": False}.get(kind)})
    if ended:
        rows.append({"what": "C++: the program", "result": f"FAILED: {ended}", "ok": False})
    return rows


def limits(wait_s: float) -> dict[str, str]:
    """Return the settings of the longest wait for another rank, from the first step on."""
    return dict.fromkeys(("HVPIPE_TIMEOUT", "HVPIPE_FIRST_STEP_TIMEOUT"), str(wait_s))


def run(
    ranks: int,
    settings: dict[str, str],
    what: str,
    timeout_s: float = RUN_TIMEOUT_S,
    under: Sequence[str] = (),
) -> list[Row]:
    """Return the rows that rank 0 of the worker wrote, and one more if a rank failed or took too long.

    `what` the worker does: see there. `under` is a command that runs the launcher, such as
    compute-sanitizer's.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [*under, sys.executable, "-m", "hvpipe", "run", "--no-summary", "-np", str(ranks), "-m"]
        command += [WORKER, str(rows), what]
        # A rank that waits for another one says so itself before it is ended.
        waits = {**limits(max(30.0, timeout_s / 3)), **CACHE, **os.environ, **settings}
        try:
            # `hvpipe run` ends its ranks within 5 s.
            done = processes.run(
                command, timeout_s=timeout_s, env=waits, capture=False, cwd=REPOSITORY, patience_s=20
            )
            ended = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            ended = f"took longer than {timeout_s:g} s"
        found: list[Row] = json.loads(rows.read_text()) if rows.exists() else []
    if what == "hang" and found:
        ended = ""  # with an error, as it should
    if ended:
        found.append(
            {"what": f"{ranks} rank(s) {what} {settings}", "result": f"FAILED: {ended}", "ok": False}
        )
    return found


def runs(devices: int, version: int, size: str) -> list[tuple[int, dict[str, str], str]]:
    """Return ranks, settings and task of each run with this version of NCCL. `size`: "all" or "small"."""
    shared = {}
    if devices == 1:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        shared = {"CUDA_VISIBLE_DEVICES": first, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    found = [(1, {}, size), (2, {**shared, "HVPIPE_NCCL_LIBRARY": "none"}, size)]
    if version < (SHARES_A_GPU if devices == 1 else 1):
        return found
    return [*found, (2, shared, size), (2, shared, "leave"), (2, {**shared, **limits(HANGS_S)}, "hang")]


@contextlib.contextmanager
def mps(devices: int) -> Iterator[str]:
    """Run CUDA's multi-process service, so that ranks on one GPU run side by side; yield what was done."""
    control = shutil.which("nvidia-cuda-mps-control")
    if devices > 1:
        yield "not started: ranks do not share a GPU"
        return
    if control is None:
        yield "not started: nvidia-cuda-mps-control is not installed"
        return
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "not started: CUDA_MPS_PIPE_DIRECTORY names one that runs"
        return
    # The service may still write there when it was told to end.
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        try:
            yield tell_mps(control, "-d") or "started"
        finally:
            tell_mps(control, quits=True)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def tell_mps(control: str, *options: str, quits: bool = False) -> str:
    """Run the program that controls MPS; return why it failed, or "".

    Its output is not read, because the service may keep it open.
    """
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            [control, *options], input=b"quit\n" if quits else b"", timeout=30, check=False, **quiet
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"did not start: {error}"
    return f"did not start: exit code {done.returncode}" if done.returncode else ""


def sanitize(tool: str, timeout_s: float = RUN_TIMEOUT_S) -> list[Row]:
    """Return a row that says what a tool of compute-sanitizer found in one rank with little data."""
    what = f"compute-sanitizer {tool}"
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return [{"what": what, "result": "left out: it is not here", "ok": None}]
    under = [program, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    # Frameworks ask for what a GPU may lack, and handle the answer: not an error.
    under += ["--report-api-errors", "no"] if tool == "memcheck" else []
    # Initcheck knows nothing of memory that other libraries fill: look only at hvpipe's kernels.
    under += ["--kernel-name", f"kernel_substring={KERNELS}"] if tool == "initcheck" else []
    wrong = [row for row in run(1, {}, "small", timeout_s, under) if row["ok"] is False]
    result = "no error" if not wrong else "; ".join(f"{row['what']}: {row['result']}" for row in wrong)
    return [{"what": what, "result": result, "ok": not wrong}]


def nvml_against_smi() -> list[Row]:
    """Return a row that compares the sampler's memory and power with nvidia-smi's, one after the other."""
    what = "NVML against nvidia-smi"
    try:
        meter = GpuMeter(os.environ.get("CUDA_VISIBLE_DEVICES"), 0)
        seen = meter.look(time.monotonic())
        meter.close()
        query = ["nvidia-smi", "--query-gpu=memory.used,power.draw", "--format=csv,noheader,nounits"]
        command = [*query, f"--id={meter.uuid}"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        memory_mib, power_w = (float(each) for each in said.split(","))
    except (OSError, ValueError, subprocess.SubprocessError, NvmlMissing) as error:
        return [{"what": what, "result": f"FAILED: {type(error).__name__}: {error}", "ok": False}]
    mine_mib, mine_w = (seen.memory_bytes or 0) / 2**20, seen.power_w or 0.0
    result = f"{mine_mib:.0f} and {memory_mib:.0f} MiB, {mine_w:.0f} and {power_w:.0f} W"
    # nvidia-smi makes a context of its own meanwhile; power changes all the time.
    good = (
        abs(mine_mib - memory_mib) <= 64 + 0.02 * memory_mib and abs(mine_w - power_w) <= 20 + 0.2 * power_w
    )
    return [{"what": what, "result": result, "ok": good}]


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
        "--timeout", type=float, default=RUN_TIMEOUT_S, help="seconds for each run (default: 600)"
    )
    arguments = parser.parse_args()
    devices = gpus()
    if isinstance(devices, str):
        print(f"No GPU to check here: {devices}. Nothing was measured (exit {NO_GPU}).")
        return NO_GPU
    named = os.environ.get("HVPIPE_NCCL_LIBRARY", "")
    version = nccl_version(named)
    rows: list[Row] = []

    def show(new: list[Row]) -> None:
        rows.extend(new)
        print(table(new), flush=True)
        if arguments.json:  # after each part, because the next one may hang
            date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            lines = ",\n".join(map(json.dumps, rows))
            arguments.json.write_text(f'{{"date": "{date}", "rows": [\n{lines}\n]}}\n')

    show(one_rank(find_nccl(named), arguments.timeout))
    planned = runs(devices, version, "small" if arguments.small else "all")
    if not any(ranks == 2 and "HVPIPE_NCCL_LIBRARY" not in settings for ranks, settings, _ in planned):
        wanted = f"ranks that share a GPU need NCCL {SHARES_A_GPU}"
        result = f"left out: {wanted}. Found: NCCL {version or 'none'}, {devices} GPUs"
        show([{"what": "2 ranks, NCCL", "result": result, "ok": None}])
    for number, (ranks, settings, what) in enumerate(planned):
        with mps(devices) as service:  # a rank that was killed may spoil a service for the next one
            if number == 0:
                show([{"what": "MPS", "result": service, "ok": None}])
            show(run(ranks, settings, what, arguments.timeout))
    show(nvml_against_smi())
    for tool in ("memcheck", "initcheck"):
        show(sanitize(tool, 2 * arguments.timeout))
    wrong = [row for row in rows if row["ok"] is False]
    print(f"{len(rows)} rows, {len(wrong)} wrong")
    if devices == 1:
        print("NOT SHOWN: how much of an all-reduce is hidden, as two ranks on one GPU share its time.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
