"""The CUDA device, run on a fake driver (tests/support/native/fake_cuda.cc) that needs no GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from native_build import CSRC, NATIVE, build, compiler

Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a case of cuda_device_driver and returns the lines that it prints.

    The function compiles the fake driver with its `flags`.
    """
    named = "-Wl,-soname,libcuda.so.1"
    device = CSRC / "gpu"
    sources = (str(device / "cuda_device.cc"), str(device / "cuda_driver.cc"))
    kernels = f'-DHVPIPE_PTX="{device / "kernels.ptx"}"'
    fake = ("-Wl,--no-as-needed", str(build("fake_cuda.cc", named)))
    driver = build("cuda_device_driver.cc", kernels, *sources, *fake)

    def lines(case: str, *flags: str) -> list[str]:
        (tmp_path / "libcuda.so.1").symlink_to(build("fake_cuda.cc", named, *flags))
        env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
        done = subprocess.run(
            [str(driver), case], capture_output=True, text=True, timeout=60, env=env, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines


def test_no_thread_makes_a_context_on_another_device(run: Run) -> None:
    *threads, zero, one, two, modules = run("contexts")
    assert set(threads) == {"current afterwards: -1"}
    assert zero == "context on device 0: made 0, held 0"
    assert one == "context on device 1: made 1, held 0"
    assert two == "context on device 2: made 0, held 0"
    assert modules == "modules: 0"


def test_a_thread_keeps_the_device_that_it_has(run: Run) -> None:
    assert run("kept") == ["inside: 1", "afterwards: 2"]


def test_every_cast_has_a_kernel_of_its_name(run: Run) -> None:
    *casts, error = run("casts")
    assert len(casts) == 10
    assert all(cast.endswith(": right") for cast in casts), casts
    assert error.endswith("internal: no cast from float32 to float64")


def test_memory_of_another_device_is_refused(run: Run) -> None:
    own, other, host, locked, managed = run("here")
    assert (own, managed) == ("its own: taken", "managed: taken")
    assert "should lie on GPU 1" in other
    assert "torch.cuda.set_device" in other
    assert other.endswith("Received: an array on GPU 0")
    assert host.endswith("Received: an array in host memory")
    assert locked.endswith("Received: an array in host memory")


def test_a_failed_allocation_reports_its_size(run: Run) -> None:
    room, taken, device, host = run("full")
    assert taken == "512 taken"
    assert (room, device) == ("300000000 of 1000000000", "null: 1")
    assert "wanted 2147483648 more bytes (raise the limit: ulimit -l" in host


def test_each_device_has_a_unique_id_even_on_a_shared_board(run: Run) -> None:
    parts = [name.split(" | ") for name in run("names")]
    assert [name for name, _, _ in parts] == [f"Test GPU 0000:0{n}:00.0" for n in (1, 2, 2)]
    assert [uuid for _, uuid, _ in parts] == ["1a" * 15 + last for last in ("f0", "f1", "f2")]
    assert [board for _, _, board in parts] == [f"0000:0{n}:00.0" for n in (1, 2, 2)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("cuModuleLoadData", "the provided PTX was compiled with an unsupported toolchain."),
        ("cuModuleGetFunction", "an error of the test driver"),
    ],
)
def test_a_gpu_that_cannot_have_the_kernels_is_named(run: Run, call: str, text: str) -> None:
    left, error = run(call)
    assert left == "held 0, modules 0"
    assert "compute capability 7.0 (V100) or later" in error
    assert (
        "Received: Test GPU 0000:01:00.0 of compute capability 6.1, a driver for CUDA 13.0: " + text in error
    )


def test_a_driver_that_does_not_start_is_named(run: Run) -> None:
    error = run("cuInit")[-1]
    assert (
        "No CUDA device can be used: an error of the test driver. Received: a driver for CUDA 13.0" in error
    )


def test_a_driver_older_than_the_kernels_is_refused(run: Run) -> None:
    (error,) = run("old driver")
    assert "should support CUDA 11.8 or later: update it. Received: a driver for CUDA 11.3" in error


def test_a_driver_that_lacks_a_function_is_too_old(run: Run) -> None:
    (error,) = run("kept", "-DOLD_DRIVER")
    assert (
        "should support CUDA 11.8 or later: update it. Received: libcuda.so.1 without cuDeviceGetUuid_v2"
        in error
    )


def test_our_declarations_match_cudas_header() -> None:
    headers = Path("/usr/local/cuda/include")
    if not (headers / "cuda.h").exists():
        pytest.skip("no CUDA headers")
    command = [
        *(compiler(), "-std=c++17", "-fsyntax-only", "-I", str(CSRC), "-isystem", str(headers)),
        str(NATIVE / "cuda_header.cc"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
