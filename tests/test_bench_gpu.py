"""bench.gpu.check where there is no GPU, and what it prints where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import check

REPOSITORY = Path(__file__).parent.parent


def test_without_a_gpu_it_says_so_and_exits_with_its_code() -> None:
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


def test_a_wrong_result_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"what": "1 rank(s): a", "result": "error 0", "ok": True}
    figure = {"what": "1 rank(s): a longer one", "result": "9 GB/s", "ok": None}
    wrong = {"what": "2 rank(s): b", "result": "error inf", "ok": False}
    monkeypatch.setattr(check, "gpus", lambda: 1)
    monkeypatch.setattr(check, "build", lambda: None)
    monkeypatch.setattr(sys, "argv", ["check"])
    monkeypatch.setattr(check, "run", lambda ranks, devices: [right, figure])
    assert check.main() == 0
    monkeypatch.setattr(check, "run", lambda ranks, devices: [right] if ranks == 1 else [wrong])
    capsys.readouterr()
    assert check.main() == 1
    assert "2 rows, 1 wrong" in capsys.readouterr().out


def test_two_ranks_on_one_gpu_tell_nccl_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def started(command: list[str], env: dict[str, str], **options: object) -> None:
        seen.update(env)
        Path(command[-1]).write_text("[]")

    monkeypatch.setattr(check.subprocess, "run", started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert check.run(2, devices=1) == []
    assert (seen["NCCL_MULTI_RANK_GPU_ENABLE"], seen["CUDA_VISIBLE_DEVICES"]) == ("1", "3")
    seen.clear()
    check.run(2, devices=2)
    assert seen["CUDA_VISIBLE_DEVICES"] == "3,5"
