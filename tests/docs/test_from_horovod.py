"""The commands that docs/from-horovod.md gives for moving a script do to it what the page says."""

from __future__ import annotations

import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "from-horovod.md"

BEFORE = """\
import horovod
import os, horovod.tensorflow.keras as hvd
import horovod.tensorflow, horovod.torch
from horovod.keras.callbacks import MetricAverageCallback
from horovod.tensorflow.data.compute_service import TfDataServiceConfig
from my.horovod.keras import rank

horovod.tensorflow.init()
module = importlib.import_module("horovod.keras")
horovod.run(train, np=int(os.environ["HOROVOD_SIZE"]))
"""
AFTER = """\
import horovod
import os, hvpipe.horovod.tensorflow.keras as hvd
import hvpipe.horovod.tensorflow, horovod.torch
from hvpipe.horovod.keras.callbacks import MetricAverageCallback
from horovod.tensorflow.data.compute_service import TfDataServiceConfig
from my.horovod.keras import rank

hvpipe.horovod.tensorflow.init()
module = importlib.import_module("hvpipe.horovod.keras")
horovod.run(train, np=int(os.environ["HOROVOD_SIZE"]))
"""


def command(program: str) -> str:
    """Return the one command line on the page that begins with a program's name."""
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"    {program} "))
    return line


def test_sed_moves_the_imports_and_grep_shows_the_rest(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEFORE)
    subprocess.run(["bash", "-c", command("sed")], cwd=tmp_path, check=True)
    assert (script.read_text(), (tmp_path / "train.py.bak").read_text()) == (AFTER, BEFORE)
    subprocess.run(["bash", "-c", command("sed")], cwd=tmp_path, check=True)
    assert script.read_text() == AFTER  # a second run changes nothing
    shown = subprocess.run(["bash", "-c", command("grep")], cwd=tmp_path, capture_output=True, check=True)
    numbers = [int(line.partition(":")[0]) for line in shown.stdout.decode().splitlines()]
    assert numbers == [1, 3, 5, 10]
