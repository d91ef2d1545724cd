"""A rank that calls `sys.exit` while others are in a collective by name: the job ends with its exit code."""

from __future__ import annotations

from pathlib import Path

from distributed import expect_fatal

SCRIPT = """
import sys
import tensorflow as tf
import hvpipe
import hvpipe.keras as hk

hvpipe.init()
if hvpipe.rank() == 1:
    sys.exit(7)
tf.function(lambda: hk.allreduce(tf.ones(3)))()
"""


def test_exit_during_a_collective_by_name(tmp_path: Path) -> None:
    script = tmp_path / "case.py"
    script.write_text(SCRIPT)
    says = r"rank 1 of 2 (?s:.*)SystemExit: .* Rank 1 is at: sys.exit\(7\) in case.py, line 9"
    assert expect_fatal(2, script, says=says, within_s=90).returncode == 7
