"""PipeDream's graphs: published files, single lines, errors for bad ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile, read_pipedream

PROFILES = Path(__file__).parents[1] / "data" / "profiles"


@pytest.mark.parametrize(
    ("model", "layers", "edges", "weights_mb"),
    [
        ("alexnet", 23, 23, 244),
        ("vgg16", 41, 41, 553),
        ("resnet50", 177, 193, 102),
        ("inception_v3", 326, 362, 109),
        ("gnmt", 48, 58, 775),
    ],
)
def test_pipedream_graphs(model: str, layers: int, edges: int, weights_mb: int) -> None:
    profile = Profile.read(PROFILES / f"{model}.txt")
    assert (len(profile.layers), len(profile.edges)) == (layers, edges)
    assert sum(layer.weight_bytes for layer in profile.layers) / 1e6 == pytest.approx(weights_mb, abs=0.6)
    assert profile.layers[0] == LayerCost("node1", 0.0, 0.0)  # an Input layer
    assert profile.model == model


def test_pipedream_lines(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    sizes = "activation_size=[6.0; 2.0], parameter_size=3.000"
    line = f"node1 -- LSTM(1, 2) -- forward_compute_time=1.5, backward_compute_time=2, {sizes}"
    for text in (line, f"{line} -- stage_id=3\n", f"\N{ZERO WIDTH NO-BREAK SPACE}{line}\n"):
        path.write_text(text, encoding="utf-8")
        (layer,) = read_pipedream(path, slots_per_weight=2).layers
        assert layer == LayerCost("node1", 0.0015, 0.002, 3, 6, 8, 8)


@pytest.mark.parametrize("slots", [math.nan, math.inf, -1])
def test_slots_out_of_range(slots: float) -> None:
    with pytest.raises(HvpipeError, match="slots_per_weight should be a number from 0"):
        read_pipedream("g.txt", slots_per_weight=slots)


def test_a_superscript_is_no_number(tmp_path: Path) -> None:
    """Regression: int('\N{SUPERSCRIPT TWO}') ended in a traceback."""
    path = tmp_path / "g.txt"
    rest = "-- C -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1"
    path.write_text(f"\N{SUPERSCRIPT TWO} {rest}\nn10 {rest}\nn9 {rest}\n", encoding="utf-8")
    assert [layer.name for layer in read_pipedream(path).layers] == ["n9", "n10", "\N{SUPERSCRIPT TWO}"]


TIMES = "forward_compute_time=1, backward_compute_time=2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"g\.txt is empty: it should have at least one layer$"),
        ("node1 -- Conv2d", r"g\.txt, line 1: should be 'NAME -- LAYER"),
        (
            "n -- C -- forward_compute_time=x, backward_compute_time=2, activation_size=1, parameter_size=1",
            r"g\.txt, line 1: times and sizes should be finite numbers",
        ),
        (
            f"n -- C -- {TIMES}, activation_size=1, parameter_size=inf",
            r"g\.txt, line 1: times and sizes should be finite numbers",
        ),
        (
            "n -- C -- forward_compute_time=-1, backward_compute_time=2, activation_size=1, parameter_size=1",
            r"g\.txt, line 1: forward_s of layer 'n' should be finite and at least 0",
        ),
        (
            f"n -- C -- {TIMES.replace('=1', '=1e-320')}, activation_size=1, parameter_size=1",
            r"g\.txt, line 1: times should be 0, or at least 1e-18 s",
        ),
        (
            f"n\x1b -- C -- {TIMES}, activation_size=1, parameter_size=1",
            r"line 1: the name should be .*\. Received: 'n\\x1b'",
        ),
        ("\ta -- b", r"g\.txt: An edge should join two layers"),
    ],
)
def test_bad_pipedream_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "g.txt"
    path.write_text(line)
    with pytest.raises(HvpipeError, match=message):
        read_pipedream(path)
