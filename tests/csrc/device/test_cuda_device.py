"""The CUDA device, run on a fake CUDA (tests/support/native/fake_cuda.cc) that needs no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from native_build import CSRC, build

Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def cuda() -> Path:
    """Return the folder of CUDA's headers."""
    nvcc = shutil.which("nvcc")
    beside = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    for folder in (*beside, Path("/usr/local/cuda/include")):
        if (folder / "cuda_runtime_api.h").exists():
            return folder
    pytest.skip("no CUDA headers")


@pytest.fixture
def run(cuda: Path, tmp_path: Path) -> Run:
    """Return a function that runs a case of cuda_device_driver and returns the lines that it prints.

    The function compiles the fake CUDA with its `flags`.
    """
    headers = ("-isystem", str(cuda))
    named = (*headers, "-Wl,-soname,libcuda.so.1")
    sources = (str(CSRC / "device" / "cuda_device.cc"), str(CSRC / "device" / "cuda_context.cc"))
    driver = build("cuda_device_driver.cc", *headers, *sources, str(build("fake_cuda.cc", *named)))

    def lines(case: str, *flags: str) -> list[str]:
        (tmp_path / "libcuda.so.1").symlink_to(build("fake_cuda.cc", *named, *flags))
        env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
        done = subprocess.run(
            [str(driver), case], capture_output=True, text=True, timeout=60, env=env, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines


def test_no_thread_makes_a_context_on_another_device(run: Run) -> None:
    *threads, zero, one, two = run("contexts")
    assert set(threads) == {"current afterwards: -1"}
    assert (zero, one, two) == ("context on device 0: 0", "context on device 1: 1", "context on device 2: 0")


def test_a_thread_keeps_the_device_that_it_has(run: Run) -> None:
    assert run("kept") == ["inside: 1", "afterwards: 2"]


def test_a_failed_cleanup_is_not_reported_by_the_next_call(run: Run) -> None:
    assert run("stale") == ["last error: 0"]


def test_memory_of_another_device_is_refused(run: Run) -> None:
    own, other, host, locked = run("here")
    assert own == "its own: taken"
    assert "should lie on GPU 1" in other
    assert "torch.cuda.set_device" in other
    assert other.endswith("Received: an array on GPU 0")
    assert host.endswith("Received: an array in host memory")
    assert locked.endswith("Received: an array in host memory")


def test_a_failed_allocation_reports_its_size(run: Run) -> None:
    room, taken, device, left_over, host = run("full")
    assert taken == "512 taken"
    assert (room, device, left_over) == ("300000000 of 1000000000", "null: 1", "last error: 0")
    assert "wanted 2147483648 more bytes (raise the limit: ulimit -l" in host


def test_each_device_has_a_unique_id_even_on_a_shared_board(run: Run) -> None:
    *names, error = run("names")
    parts = [name.split(" | ") for name in names]
    assert [name for name, _, _ in parts] == [f"Test GPU 0000:0{n}:00.0" for n in (1, 2, 2)]
    assert [uuid for _, uuid, _ in parts] == ["1a" * 15 + last for last in ("f0", "f1", "f2")]
    assert [board for _, _, board in parts] == [f"0000:0{n}:00.0" for n in (1, 2, 2)]
    # GPU 0000:01 has a compute capability that the kernels were not compiled for, so opening it fails.
    assert "CMAKE_CUDA_ARCHITECTURES=61" in error
    assert "Received: Test GPU 0000:01:00.0 of compute capability 6.1" in error


@pytest.mark.parametrize(
    ("case", "driver"), [("old driver", "a driver for CUDA 11.3"), ("no driver", "no driver")]
)
def test_a_driver_older_than_the_build_is_named_with_it(run: Run, case: str, driver: str) -> None:
    built, left_over, error = run(case)
    assert "A CUDA device should be usable: the driver is too old" in error
    assert f"Received: {driver}; hvpipe was {built}, and" in error
    assert "update the driver, or install hvpipe again with an older nvcc" in error
    assert left_over == "last error: 0"


def test_a_driver_that_lacks_a_function_is_too_old(run: Run) -> None:
    (error,) = run("kept", "-DOLD_DRIVER")
    assert "should support CUDA 11.4 or later. Received: libcuda.so.1 without cuDeviceGetUuid_v2" in error
