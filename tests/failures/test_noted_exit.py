"""Which call of `sys.exit` ends a program."""

from __future__ import annotations

import subprocess
import sys

import pytest

NOTES = """
import atexit, builtins, os, sys, threading
from hvpipe.failures.noted_exit import exit_call, note_exits
note_exits(); note_exits()
atexit.register(lambda: print(exit_call(), flush=True))
"""


@pytest.mark.parametrize(
    ("ends", "says", "code"),
    [
        ("sys.exit(3)", "ExitCall(text='sys.exit(3) in <string>, line 6', code=3)", 3),
        ("sys.exit()", "ExitCall(text='sys.exit() in <string>, line 6', code=0)", 0),
        ("sys.exit('full')", "ExitCall(text=\"sys.exit('full') in <string>, line 6\", code=1)", 1),
        ("quit(-1)", "ExitCall(text='quit(-1) in <string>, line 6', code=255)", 255),
        ("raise SystemExit(4)", "None", 4),
        ("pass", "None", 0),
        ("try: sys.exit(5)\nexcept SystemExit: pass", "None", 0),
        ("threading.Thread(target=sys.exit, args=[6]).start()", "None", 0),
    ],
)
def test_an_exit_that_nobody_catches_is_noted(ends: str, says: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTES + ends], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (says, code), done.stderr
