"""kill -9 at random moments of a process that writes one checkpoint after the other."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from checkpoint_files import newest_step

# `TEST_KILLS=100 pytest tests/checkpoints/test_killed.py` for the figure in docs/checkpoints.md.
TRIALS = int(os.environ.get("TEST_KILLS", "8"))

WRITER = """
import sys
from pathlib import Path
import numpy as np
from hvpipe.checkpoints.manifest import Manifest, Position
from hvpipe.checkpoints.writer import Snapshot, Writer, WriterOptions

folder, run, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
writer = Writer(WriterOptions(folder, 0, 1, keep=2, on_complete=lambda place: print(place.name, flush=True)))
values = {f"weights/{i}": np.random.default_rng(i).normal(size=20_000) for i in range(8)}
while True:
    step += 1
    manifest = Manifest(run, "data_parallel", Position(step, 0, step), {}, ())
    writer.start(Snapshot({**values, "step": np.array(step)}, manifest))
    writer.wait()
"""


def test_what_was_complete_is_usable(tmp_path: Path) -> None:
    """Whatever the process said to be complete is there afterwards, unchanged, or a later one is."""
    moments = random.Random(3)
    folder, script = tmp_path / "run", tmp_path / "writer.py"
    script.write_text(WRITER)
    last = 0
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for trial in range(TRIALS):
        command = [sys.executable, str(script), str(folder), f"{trial:06x}", str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None
            said = process.stdout.readline()  # it is running
            time.sleep(moments.uniform(0.0, 0.05))
            process.kill()
            said += process.stdout.read()
        steps = [int(step) for step in re.findall(r"^(\d{10})-[0-9a-f]{6}$", said, re.MULTILINE)]
        found = newest_step(folder)
        assert found is not None
        assert found >= max(steps)
        last = found
    assert not list(folder.glob("*.damaged"))
