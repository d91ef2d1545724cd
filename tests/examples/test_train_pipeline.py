"""examples/train_pipeline.py as a user runs it: it learns, ranks print their layers, plain Keras loads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distributed import ALONE, Run, launch

TRAIN = Path(__file__).parents[2] / "examples" / "train_pipeline.py"
SUMMARY = re.compile(
    r"(\w+) on (\d+) ranks?, (\d+) stages: loss ([\d.]+) in the first epoch, ([\d.]+) in the last, "
)
SMALL = ("--blocks", "1", "--width", "32", "--length", "32", "--epochs", "3", "--steps", "8")

LOAD = """
import json, sys
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
found = model.predict(np.zeros((1, *model.input_shape[1:])), verbose=0)
print(json.dumps({"shape": found.shape, "hvpipe": "hvpipe" in sys.modules}))
"""


def train(size: int, *arguments: str | Path, limit_s: float = 300.0) -> Run:
    """Run the example on `size` ranks, and check that it succeeds and that the loss does not go up."""
    result = launch(size, [TRAIN, "--progress", "none", *arguments], limit_s=limit_s)
    assert result.returncode == 0, result.describe()
    found = SUMMARY.findall(result.output)
    assert len(found) == 1, result.describe()
    assert float(found[0][4]) <= float(found[0][3]), result.describe()
    return result


@pytest.mark.older_tensorflow
def test_a_gpt_learns_on_three_ranks_and_is_saved_whole(tmp_path: Path) -> None:
    saved = tmp_path / "models" / "gpt.keras"
    result = train(3, *SMALL, "--tied", "--stages", "2", "--replicas", "2,1", "--save", saved)
    held = re.findall(
        r"rank (\d): stage (\d) of 2: \d+ layer calls, .*, ([\d.]+) MB of weights", result.output
    )
    places = [(rank, stage) for rank, stage, _ in held]
    assert places == [("0", "0"), ("1", "0"), ("2", "1")], result.describe()
    loaded = launch(ALONE, ["-c", LOAD, saved], limit_s=120)
    assert json.loads(loaded.output.splitlines()[-1]) == {"shape": [1, 32, 128], "hvpipe": False}


def test_resnet50_on_two_ranks() -> None:
    """Two steps, which need not learn anything."""
    options = ("--batch", "8", "--microbatches", "2", "--steps", "2", "--epochs", "1", "--recompute")
    result = train(2, "--model", "resnet50", *options, limit_s=500)
    assert "resnet50 on 2 ranks, 2 stages" in result.output, result.describe()
