"""bench.gpu.check without a GPU: its message, a dry run on stand-ins, and its arithmetic."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.gpu import check, check_worker, measure, verify
from bench.gpu import rows as gpu_rows
from bench.gpu.sizes import RESNET50, Sizes
from bench.gpu.thin import thin
from gpu_stand_in import StandIn
from native_build import build, compiler

REPOSITORY = Path(__file__).parents[3]


def test_without_a_gpu_the_check_says_so_and_exits_with_its_code() -> None:
    if isinstance(check.gpus(), int):
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("No GPU to check here: ")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set up one stand-in GPU for all ranks and an NCCL that may share it. Return the path for the JSON."""
    monkeypatch.setattr(check, "gpus", lambda: 1)
    monkeypatch.setattr(check, "one_rank", lambda *_: [])
    monkeypatch.setattr(check, "nvml_against_smi", list)
    monkeypatch.setattr(check, "WORKER", "gpu_stand_in")
    monkeypatch.setattr(sys, "argv", ["check", "--small", "--json", str(tmp_path / "rows.json")])
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests' / 'support'}")
    device = str(build("fake_device.cc"))
    monkeypatch.setenv("HVPIPE_DEVICE_LIBRARY", device)
    monkeypatch.setenv("FAKE_NCCL_DEVICE", device)
    monkeypatch.setenv("HVPIPE_NCCL_LIBRARY", str(build("fake_nccl.cc")))
    monkeypatch.setenv("FAKE_DEVICES", "1")
    return tmp_path / "rows.json"


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]}


def test_a_dry_run_verifies_and_measures_everything_and_names_what_is_wrong(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 has wrong sums, where there is one, and on one rank a part raises."""
    monkeypatch.setenv("STAND_IN_WRONG_RANK", "1")
    monkeypatch.setenv("STAND_IN_BREAKS", "1")
    assert check.main() == 1
    printed = capsys.readouterr().out
    rows = rows_of(stand_ins)
    verified = {what for what, row in rows.items() if row["ok"]}
    sums = [f"all-reduce {dtype}" for dtype in ("float32", "float64", "float16", "bfloat16")]
    sums.append("all-reduce on a stream of its own")
    assert {f"1 rank: {one}" for one in sums} <= verified
    for ranks in ("1 rank", "2 ranks, host", "2 ranks, NCCL"):
        for compression in ("None", "bf16", "fp16"):
            assert f"{ranks}: steps, compression {compression}" in verified
        assert f"{ranks}: broadcast" in verified
        assert rows[f"{ranks}: all-reduce 1 MB"]["figures"]["taken_s"] > 0
        if ranks != "1 rank":
            assert {f"{ranks}: messages", f"{ranks}: sum over a group, float64"} <= verified
    assert rows["2 ranks, NCCL: data goes"]["result"] == "by NCCL 2.30.5"
    for what in ("pack 1 MB", "unpack 1 MB", "sampler (NVML)"):
        assert rows[f"1 rank: {what}"]["ok"] is None
    assert "hidden (wanted: 90%)" in rows["2 ranks, NCCL: overlap, 1 MB"]["result"]
    assert all(row["result"] in printed for row in rows.values())
    wrong = {what: row["result"] for what, row in rows.items() if row["ok"] is False}
    assert f"{len(rows)} rows, {len(wrong)} wrong" in printed
    assert wrong.pop("1 rank: verify faces") == "FAILED: RuntimeError: broken for a test"
    assert wrong.pop("1 rank(s) small {}") == "FAILED: exit code 1"
    assert rows["2 ranks: sums under way at the end"]["ok"]
    assert "ended after 1" in rows["2 ranks: a sum that hangs"]["result"]
    ways = ("2 ranks, host", "2 ranks, NCCL")
    assert set(wrong) == {f"{way}: {one}" for way in ways for one in sums}
    assert "!! 2 ranks, NCCL: all-reduce float32 " in printed


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (None, 0), (False, 1)])
def test_the_exit_code_says_whether_a_row_is_wrong(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, ok: bool | None, code: int
) -> None:
    monkeypatch.setattr(check, "run", lambda *_: [{"what": "a sum", "result": "a word", "ok": ok}])
    monkeypatch.setattr(check, "sanitize", lambda *_: [])
    assert check.main() == code


def test_the_driver_compiles() -> None:
    """Regression: nothing but the check on a GPU compiled it."""
    driver = REPOSITORY / "bench/gpu/one_rank_driver.cc"
    command = [compiler(), "-std=c++17", "-fsyntax-only", "-I", str(REPOSITORY / "csrc"), str(driver)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_rows_of_the_driver() -> None:
    printed = "note NCCL 2.32.3\nok streams\nFAILED NCCL: join: no GPU: none\n"
    rows = check.driver_rows(printed, "exit code -11")
    assert [(row["what"], row["result"], row["ok"]) for row in rows] == [
        ("C++: NCCL 2.32.3", "note", None),
        ("C++: streams", "ok", True),
        ("C++: NCCL", "join: no GPU: none", False),
        ("C++: the program", "FAILED: exit code -11", False),
    ]


@pytest.mark.parametrize(
    ("body", "said"), [("raise SystemExit(3)", "exit code"), ("import time; time.sleep(60)", "longer than")]
)
def test_ranks_that_fail_or_hang_become_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, said: str
) -> None:
    (tmp_path / "failing_worker.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check, "WORKER", "failing_worker")
    (row,) = check.run(1, {}, "small", timeout_s=5)
    assert row["ok"] is False
    assert said in row["result"]


def test_two_ranks_share_a_gpu_only_with_an_nccl_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    shared = {"CUDA_VISIBLE_DEVICES": "3", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    host = {"HVPIPE_NCCL_LIBRARY": "none"}
    soon = {"HVPIPE_TIMEOUT": "10.0", "HVPIPE_FIRST_STEP_TIMEOUT": "10.0"}

    def ends(settings: dict[str, str]) -> list[tuple[int, dict[str, str], str]]:
        return [(2, settings, "leave"), (2, {**settings, **soon}, "hang")]

    one, by_host = (1, {}, "all"), (2, {**shared, **host}, "all")
    assert check.runs(1, 23000, "all") == [one, by_host, (2, shared, "all"), *ends(shared)]
    assert check.runs(1, 22809, "all") == [one, by_host]
    assert check.runs(2, 22809, "all") == [one, (2, host, "all"), (2, {}, "all"), *ends({})]
    assert check.runs(2, 0, "all") == [one, (2, host, "all")]


def test_initcheck_looks_at_hvpipes_kernels() -> None:
    ptx = (check.REPOSITORY / "csrc/gpu/kernels.ptx").read_text()
    assert ptx.count(".visible .entry ") == ptx.count(f".visible .entry {check.KERNELS}") == 10


def test_compute_sanitizer_runs_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in its place runs what follows its options, and exits with what it found."""
    (tmp_path / "compute-sanitizer").write_text('#!/bin/sh\nshift 8\n"$@"\nexit "$FOUND"\n')
    (tmp_path / "compute-sanitizer").chmod(0o755)
    (tmp_path / "worker.py").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check, "WORKER", "worker")
    for found, ok in (("0", True), ("9", False)):
        monkeypatch.setenv("FOUND", found)
        (row,) = check.sanitize("initcheck", timeout_s=60)
        assert (row["what"], row["ok"]) == ("compute-sanitizer initcheck", ok), row


def test_the_version_of_nccl_is_read_from_the_library() -> None:
    assert check.nccl_version(str(build("fake_nccl.cc", "-DVERSION=22809"))) == 22809
    assert check.nccl_version("libnowhere.so") == 0


def test_an_error_is_relative_to_the_summed_terms() -> None:
    terms = np.array([[1.5, 2.0], [-1.25, 2.0]])
    assert verify.worst(np.array([0.25, 4.0]), terms) == 0
    assert verify.worst(np.array([0.25 + 1e-3, 4.0]), terms) == pytest.approx(1e-3 / 4)
    assert verify.worst(np.array([0.25, np.nan]), terms) == float("inf")


class Timed(StandIn):
    """A stand-in for GPU and engine with its own clock. Each call has a cost, higher the first time.

    A reduce ends 4 ms after it was submitted.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.now_s = self.reduced_s = 0.0
        self.seen: set[str] = set()
        self.native = SimpleNamespace(begin_step=lambda *_: (1.0, 1.0))

    def spend(self, what: str, cost_s: float) -> None:
        self.now_s += cost_s if what in self.seen else 1.0
        self.seen.add(what)

    def copy(self, target: Any, source: Any) -> None:
        self.spend("copy", 0.001)

    def multiply(self) -> None:
        self.spend("multiply", 0.0001)

    def mark(self) -> float:
        return self.now_s

    def use_device(self) -> str:
        return "by NCCL 2.30.5"

    def add_plan(self, *_: Any, **__: Any) -> int:
        return 0

    def allreduce(self, *_: Any, **__: Any) -> None:
        self.spend("all-reduce", 0.008)

    def submit_on_device(self, *_: Any) -> None:
        self.spend("submit", 0.002)
        self.reduced_s = self.now_s + 0.004

    def remove_plan(self, plan: int) -> None: ...

    def collect_on_device(self, *_: Any, **__: Any) -> None:
        self.now_s = max(self.now_s, self.reduced_s)
        self.spend("collect", 0.001)


@pytest.mark.parametrize("ranks", [1, 2])
def test_figures_are_computed_from_the_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
) -> None:
    world = {"size": lambda: ranks, "rank": lambda: 0, "barrier": lambda: None, "shutdown": lambda: None}
    told = {"broadcast_object": lambda one: one, "allgather_object": lambda one: [one] * ranks}
    for module in (check_worker, gpu_rows, measure, verify):
        monkeypatch.setattr(module, "hvpipe", SimpleNamespace(**world, **told))
    settings = SimpleNamespace(settings=SimpleNamespace(visible_gpus="", gpus_may_be_shared=False))
    monkeypatch.setattr(measure, "current", lambda: settings)
    monkeypatch.setattr(measure, "LEAST_JUDGED_BYTES", 3_000_000)
    gpu: Any = Timed()
    sizes = Sizes((5,), 10, (2,), (100,) * 10_000, 1, 4, 0.05)
    check_worker.check(gpu, gpu, sizes, tmp_path / "rows.json")
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    if ranks == 1:
        # 2 MB are read and written in 2 ms. The copy takes 1 ms; unpacking waits 4 ms and takes 1 ms.
        assert rows["1 rank: pack 2 MB"]["figures"] == pytest.approx({"gb_per_s": 2.0, "share": 0.5})
        assert rows["1 rank: unpack 2 MB"]["figures"] == pytest.approx({"gb_per_s": 0.8, "share": 0.2})
        # With bf16: 1.5 MB are read and written, for which the copy takes 0.75 ms.
        halves = {"gb_per_s": 1.5, "share": 0.375}
        assert rows["1 rank: pack 2 MB as bf16, scaled"]["figures"] == pytest.approx(halves)
        assert rows["1 rank: pack ResNet-50's gradients"]["ok"] is False
        assert rows["1 rank: all-reduce 2 MB"]["result"] == "8.00 ms"
        # Of small copies, starting takes a good part: they are not judged.
        assert rows["1 rank: pack 2 MB"]["ok"] is rows["1 rank: unpack 2 MB"]["ok"] is None
        assert rows["1 rank: sampler (NVML)"]["ok"] is (
            rows["1 rank: sampler (NVML)"]["figures"]["cores"] <= 0.01
        )
        assert "1 rank: all-reduce of a view" in rows
    else:
        # Each of two ranks sends as many bytes as the buffer has: 2 MB in 8 ms.
        expected = {"taken_s": 0.008, "bus_gb_per_s": 0.25}
        assert rows["2 ranks, NCCL: all-reduce 2 MB"]["figures"] == pytest.approx(expected)
        # The products take twice as long as the reduce of 2 + 4 + 1 ms, of which 4 ms are hidden.
        found = rows["2 ranks, NCCL: overlap, 1 MB"]["figures"]
        assert found["products_s"] == pytest.approx(0.014, abs=2e-4)
        assert (found["reduce_s"], found["both_s"]) == pytest.approx((0.007, 0.017), abs=2e-4)
        assert (found["hidden"], found["slowed"]) == pytest.approx((4 / 7, 3 / 14), abs=1e-3)
        assert rows["2 ranks, NCCL: overlap, 1 MB"]["ok"] is False
    assert (
        rows[f"{'1 rank' if ranks == 1 else '2 ranks, NCCL'}: all-reduce float32"]["ok"] is False
    )  # never written


def test_the_packed_gradients_are_those_of_resnet_50() -> None:
    assert (len(RESNET50), sum(RESNET50)) == (214, 25_583_592)


def test_a_thin_library_keeps_the_code_of_one_gpu_generation() -> None:
    def entry(generation: int, code: bytes) -> bytes:
        return struct.pack("<HHIQ12xI32x", 2, 0x101, 64, len(code), generation) + code

    codes = entry(80, b"a" * 24) + entry(90, b"b" * 16)
    chance = b"\x50\xed\x55\xba" + b"x" * 30
    library = b"before" + chance + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(codes)) + codes + b"behind"
    assert thin(library, 90) == library.replace(b"a" * 24, bytes(24))
    assert thin(library, 100) == library.replace(b"a" * 24, bytes(24)).replace(b"b" * 16, bytes(16))
