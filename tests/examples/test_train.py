"""examples/train.py as a user runs it: it learns digits and custom images; plain Keras loads its model."""

from __future__ import annotations

import json
import platform
import re
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest

from distributed import ALONE, Run, launch, run
from hvpipe.trace.advice import StepParts, step_parts
from hvpipe.trace.events import Trace

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
SUMMARY = re.compile(
    r"(\w+) on (\w+), (\d+) ranks?, overlap=(\w+): test accuracy ([\d.]+)% after (\d+) epochs, "
)

EVALUATE = """
import json, sys
import keras, numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
x, y = load_digits(return_X_y=True)
_, x, _, y = train_test_split(x, y, test_size=0.2, random_state=1, stratify=y)
model = keras.models.load_model(sys.argv[1])
found = model.predict((x * (255 / 16)).reshape(-1, 8, 8, 1), verbose=0).argmax(axis=1)
print(json.dumps({"accuracy": float(np.mean(found == y)), "hvpipe": "hvpipe" in sys.modules}))
"""

PARSE_AND_BUILD = """
import runpy, sys
example = runpy.run_path(sys.argv[1])
for arguments in sys.argv[2:]:
    try:
        example["parse"](arguments.split())
    except SystemExit as error:
        print("exit", error.code, file=sys.stderr, flush=True)
models = {name: example["build_model"](name, (32, 32, 3), 3) for name in ("resnet50", "vgg16")}
print(*(name for name in models if models[name].count_params() > 2e6))
"""


def train(size: int, *arguments: str | Path, limit_s: float = 240.0, cwd: Path | None = None) -> Run:
    """Run the example on `size` ranks, and check that it succeeds."""
    result = launch(size, [TRAIN, "--progress", "epoch", *arguments], limit_s=limit_s, cwd=cwd)
    assert result.returncode == 0, result.describe()
    assert "ran out of data" not in result.output, result.describe()
    return result


def accuracy(result: Run) -> float:
    """Return the test accuracy from the one summary line, as a fraction."""
    found = SUMMARY.findall(result.output)
    assert len(found) == 1, result.describe()
    return float(found[0][4]) / 100


def write_bmp(path: Path, pixels: int, colour: tuple[int, int, int]) -> None:
    """Write a square 24-bit image of one colour (blue, green, red). `pixels` is a multiple of 4."""
    data = bytes(colour) * pixels * pixels
    header = struct.pack("<2sIHHI", b"BM", 54 + len(data), 0, 0, 54)
    path.write_bytes(
        header + struct.pack("<IiiHHIIiiII", 40, pixels, pixels, 1, 24, 0, len(data), 0, 0, 0, 0) + data
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make three folders of 40 images, each folder in one colour."""
    folder = tmp_path_factory.mktemp("photos")
    for channel, name in enumerate(("blue", "green", "red")):
        (folder / name).mkdir()
        for number in range(40):
            colour = [number] * 3
            colour[channel] = 160 + 2 * number
            write_bmp(folder / name / f"{number}.bmp", 16, (colour[0], colour[1], colour[2]))
    return folder


@pytest.mark.older_tensorflow
def test_two_ranks_learn_print_once_and_save_a_model_for_plain_keras(tmp_path: Path) -> None:
    """The run is long enough for TensorFlow to measure its kernels. Then it runs them in another order."""
    saved = tmp_path / "models" / "digits.keras"
    result = traced(tmp_path / "trace.json", "--progress", "epoch", "--save", saved)
    assert accuracy(result) >= 0.97
    assert "ran out of data" not in result.output, result.describe()
    (epochs,) = {int(found) for found in re.findall(r"Epoch \d+/(\d+)", result.output)}
    assert result.output.count(f"Epoch {epochs}/{epochs}") == 1, result.describe()
    assert "digits, 2 ranks, overlap=step: " in result.output, result.describe()
    assert result.output.rstrip().splitlines()[-2] == f"saved model: {saved}", result.describe()

    loaded = launch(ALONE, ["-c", EVALUATE, saved], limit_s=120)
    told = json.loads(loaded.output.splitlines()[-1])
    assert told["hvpipe"] is False
    assert told["accuracy"] == pytest.approx(accuracy(result), abs=1e-4)


def test_one_rank_without_a_launcher_and_three_ranks_learn(tmp_path: Path) -> None:
    assert accuracy(train(ALONE, "--epochs", "4", cwd=tmp_path)) >= 0.9
    assert not list(tmp_path.iterdir())  # without --save and --trace
    assert accuracy(train(3, "--batch", "16", "--epochs", "2")) >= 0.9


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = train(ALONE, "--checkpoint", tmp_path / "run", "--epochs", "2")
    assert "Epoch 1/2" in first.output, first.describe()
    second = train(ALONE, "--checkpoint", tmp_path / "run", "--epochs", "3")
    assert "Epoch 3/3" in second.output, second.describe()
    assert "Epoch 2/3" not in second.output, second.describe()


def test_a_model_learns_folders_of_images(photos: Path, tmp_path: Path) -> None:
    """Without overlap, the trace has the same parts."""
    options = ("--data", photos, "--pixels", "16", "--epochs", "6", "--batch", "8", "--rate", "0.2")
    how = ("--overlap", "none", "--compression", "bf16", "--progress", "none")
    result = traced(tmp_path / "trace.json", *options, *how)
    assert accuracy(result) >= 0.9, result.describe()


def test_a_large_model_accepts_custom_folders(photos: Path) -> None:
    options = ("--pixels", "32", "--epochs", "1", "--batch", "24", "--rate", "0.001")
    result = train(ALONE, "--data", photos, "--model", "mobilenetv2", *options, limit_s=400)
    assert f"mobilenetv2 on {photos.name}, 1 rank" in result.output, result.describe()


def traced(trace: Path, *options: str | Path) -> Run:
    """Run the example with a trace on two ranks. Check that the trace is told last and has every part."""
    hvpipe = Path(sys.executable).with_name("hvpipe")
    command = [hvpipe, "run", "-np", "2", "--trace", trace, TRAIN, *options]
    result = run([str(part) for part in command], limit_s=200)
    assert result.returncode == 0, result.describe()
    assert result.output.rstrip().splitlines()[-1].startswith(f"trace: {trace}"), result.describe()
    read = Trace.read(trace)
    parts = {"step", "forward", "backward", "pack", "wait", "reduce", "update", "utilization"}
    for rank in (0, 1):
        found = Counter(event.category for event in read.events if event.rank == rank)
        assert parts <= set(found), f"rank {rank}: {found}"
        moving = [event for event in read.of("utilization", rank) if "communication" in event.name]
        assert max(event.args["cores"] for event in moving) > 0
        # Once per step. The first and the last step may be cut off.
        assert min(found["forward"], found["backward"], found["update"]) >= found["step"] - 2, found
    advised = step_parts(read)
    assert isinstance(advised, StepParts), advised
    assert advised.ranks == 2
    assert min(advised.computing_s, advised.update_s, advised.reducing_s) > 0, advised
    assert read.metadata["trained_with"]["refuses"] == []
    assert isinstance(read.metadata["trained_with"]["onednn"], bool) == (platform.machine() == "x86_64")
    return result


def test_wrong_arguments_are_refused_and_every_model_can_be_built(tmp_path: Path) -> None:
    cases = {
        "--data /nowhere": "wanted: a folder of folders of images. Received: --data /nowhere",
        "--model vgg16": "wanted: --data DIR",
        "--save model.h5": "wanted: a name that ends in .keras. Received: --save model.h5",
        "--epochs 0": "wanted: 1 or more. Received: --epochs 0",
        "--overlap foo": "invalid choice: 'foo'",
    }
    # One process for all cases, since importing TensorFlow takes seconds.
    script = tmp_path / "script.py"
    script.write_text(PARSE_AND_BUILD)
    result = launch(ALONE, [script, TRAIN, *cases], limit_s=120)
    assert result.output.splitlines()[-1] == "resnet50 vgg16", result.describe()
    told = result.output.split("exit 2")
    assert len(told) == len(cases) + 1, result.describe()
    for says, text in zip(cases.values(), told, strict=False):
        assert says in text, result.describe()
