"""`hvpipe profile` as a user runs it, on real ranks, and what it wrote planned with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributed import Run, run
from hvpipe.plan.stages import Plan
from hvpipe.profile import Profile
from hvpipe.topology import Cluster

NETS = """
import keras

def small():
    x = keras.Input((64, 64, 3))
    h = keras.layers.Conv2D(16, 5, activation="relu", name="first")(x)
    h = keras.layers.Conv2D(16, 5, activation="relu", name="second")(h)
    return keras.Model(x, keras.layers.Conv2D(4, 5, name="third")(h), name="small")
"""


def hvpipe(folder: Path, *arguments: str) -> Run:
    return run([sys.executable, "-m", "hvpipe", *arguments], limit_s=240, cwd=folder)


@pytest.mark.slow
def test_two_ranks_are_measured_and_planned_for(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    result = hvpipe(tmp_path, "profile", "nets.py:small", "-np", "2", "--microbatch", "4")
    assert result.returncode == 0, result.describe()
    assert "small: 3 layers, 4 samples: forward " in result.output
    assert "written: profile.json, cluster.json" in result.output
    profile = Profile.read(tmp_path / "profile.json")
    assert [layer.name for layer in profile.layers] == ["first", "second", "third"]
    cluster = Cluster.read(tmp_path / "cluster.json")
    assert [device.name.rpartition(":")[2] for device in cluster.devices] == ["0", "1"]
    assert len(cluster.measured) == 1

    planned = hvpipe(
        tmp_path, "plan", "profile.json", "--cluster", "cluster.json", "--stages", "2", "-o", "plan.json"
    )
    assert planned.returncode == 0, planned.describe()
    Plan.read(tmp_path / "plan.json").check(profile, cluster)


def test_one_message_and_exit_code_2_for_a_model_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    result = hvpipe(tmp_path, "profile", "nets.py:large", "-np", "2", "--microbatch", "4")
    assert result.returncode == 2, result.describe()
    assert result.output.count("hvpipe profile: nets.py should have a function 'large'") == 1
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("*.json"))
