"""Stacks of a busy process (csrc/base/stack_dump.cc): they are read in a copy, which may crash."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvpipe.failures import flight_record

SCRIPT = """
import faulthandler, os, signal, sys, threading
from hvpipe import _engine
from hvpipe.failures import flight_record

file = flight_record._open_stack_file()
faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)

def deep(calls):
    return deep(calls - 1) if calls else [each for each in range(3)]

def call():
    while True:
        deep(20)

def start():
    while True:
        thread = threading.Thread(target=deep, args=(5,))
        thread.start()
        thread.join()

for target in (call, call, start):
    threading.Thread(target=target, daemon=True).start()
whole = seen = 0
for _ in range(120):
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    whole += _engine.handle_in_copy(signal.SIGUSR2, 5000)
    seen += b"in deep" in os.pread(file, 1 << 20, 0)
print(whole, seen, flush=True)
os._exit(0)
"""


def test_a_python_without_memfd_keeps_stacks_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    number = flight_record._open_stack_file()
    os.write(number, b"a stack")
    assert os.pread(number, 9, 0) == b"a stack"
    assert os.fstat(number).st_nlink == 0  # it goes with the process
    os.close(number)


def test_the_stacks_of_running_threads_do_not_end_the_process() -> None:
    """Regression: a rank that ran while its stacks were read died now and then of SIGSEGV."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    whole, seen = map(int, done.stdout.split())
    assert whole > 60
    assert seen > 60
