"""Loading NCCL at run time: versions that are refused, later failures, and their error messages."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from hvpipe.commands import doctor_checks
from native_build import CSRC, NATIVE, build, compiler, real_nccl

PEER, USAGE, DEADLINE = 3, 4, 2  # hvpipe::ErrorKind


def drive(
    library: str | Path, *arguments: str, fails: str | None = None, flags: tuple[str, ...] = ()
) -> tuple[int, str]:
    driver = build("nccl_driver.cc", *flags)
    env = {**os.environ, **({"FAKE_NCCL": fails} if fails else {})}
    done = subprocess.run(
        [str(driver), str(library), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def refused(library: str | Path, *arguments: str, kind: int, fails: str | None = None) -> str:
    code, output = drive(library, *arguments, fails=fails)
    assert code == 3, output
    found = re.search(r"^error (\d): (.*)$", output, re.M | re.S)
    assert found, output
    assert int(found[1]) == kind, output
    return found[2]


def test_a_library_that_exists_is_used() -> None:
    code, output = drive(build("fake_nccl.cc"), "10")
    assert code == 0, output
    assert "version 2.30.5" in output
    assert "sum 1 2 3" in output
    assert "received 1 2 3" in output


def test_it_calls_its_own_functions_despite_equal_names_in_the_program() -> None:
    code, output = drive(build("fake_nccl.cc"), "10", flags=("-DNAMESAKE", "-rdynamic"))
    assert code == 0, output


def test_it_frees_memory_of_a_preloaded_malloc() -> None:
    """Regression: with tcmalloc preloaded, NCCL passed its memory to the C library's free and crashed."""
    code, output = drive(build("fake_nccl.cc"), "10", flags=("-DOWN_MALLOC", "-rdynamic"))
    assert code == 0, output
    assert "sum 1 2 3" in output


def test_a_missing_library_is_named_with_how_to_install_it() -> None:
    text = refused("libnccl-that-is-nowhere.so.2", kind=USAGE)
    assert "pip install nvidia-nccl-cu12" in text
    assert "HVPIPE_NCCL_LIBRARY" in text
    assert "Received: libnccl-that-is-nowhere.so.2" in text


@pytest.mark.parametrize(
    ("version", "said"), [(2804, "code 2804"), (21805, "2.18.5"), (30000, "3.0.0"), (130000, "13.0.0")]
)
def test_an_old_or_unknown_version_is_refused(version: int, said: str) -> None:
    library = build("fake_nccl.cc", f"-DVERSION={version}")
    text = refused(library, kind=USAGE)
    assert "should be version 2.19 or a later 2" in text
    assert f"Received: {library} of version {said}" in text


def test_a_missing_function_is_named() -> None:
    library = build("fake_nccl.cc", "-DWITHOUT_BROADCAST")
    assert "lacks the function ncclBroadcast" in refused(library, kind=USAGE)


def test_a_library_other_than_nccl_is_refused() -> None:
    library = build("fake_nccl.cc", "-DncclGetVersion=somethingElse")
    assert "lacks the function ncclGetVersion" in refused(library, kind=USAGE)


def test_an_error_at_the_start_quotes_nccls_message() -> None:
    text = refused(build("fake_nccl.cc"), "10", kind=PEER, fails="init")
    assert "ncclCommInitRankConfig: unhandled cuda error (the last error of the test library)" in text


def test_an_error_in_the_background_is_noticed() -> None:
    text = refused(build("fake_nccl.cc"), "10", kind=PEER, fails="async")
    assert "remote process exited" in text


@pytest.mark.parametrize(("fails", "what"), [("init-hang", "joining"), ("hang", "an all-reduce")])
def test_a_wait_ends_at_its_deadline(fails: str, what: str) -> None:
    start = time.monotonic()
    text = refused(build("fake_nccl.cc"), "0.5", kind=DEADLINE, fails=fails)
    assert 0.5 <= time.monotonic() - start < 20
    assert f"s for NCCL: {what}, rank 0 of 1" in text


def test_an_abort_that_hangs_does_not_delay_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_ABORT", "hang")
    start = time.monotonic()
    text = refused(build("fake_nccl.cc"), "0.5", kind=DEADLINE, fails="hang")
    assert time.monotonic() - start < 20  # the abort takes 60 s
    assert "an all-reduce" in text


def test_an_error_inside_a_group_ends_the_group() -> None:
    text = refused(build("fake_nccl.cc"), "10", "fail-in-group", kind=PEER)
    assert "ncclBroadcast: invalid usage" in text


def test_a_message_that_cannot_be_sent_ends_the_group() -> None:
    text = refused(build("fake_nccl.cc"), "10", "send-elsewhere", kind=PEER)
    assert "ncclSend: invalid usage" in text


def test_our_declarations_match_nccls_header() -> None:
    library = real_nccl()
    if library is None:
        pytest.skip("no NCCL: make cuda fetches it")
    include = library.parents[1] / "include"
    cuda = Path("/usr/local/cuda/include")
    if not cuda.is_dir():
        pytest.skip("no CUDA headers, which NCCL's own includes")
    command = [
        *(compiler(), "-std=c++17", "-fsyntax-only", "-I", str(CSRC), "-I", str(include), "-I", str(cuda)),
        *(f'-DHVPIPE_NCCL_H="{CSRC / "gpu" / "nccl.h"}"', str(NATIVE / "nccl_header.cc")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_doctor_names_the_library_that_would_be_used() -> None:
    library = build("fake_nccl.cc", "-DVERSION=22809")
    assert doctor_checks._nccl(str(library)) == doctor_checks.Finding("NCCL", "ok", f"2.28.9 ({library})")
