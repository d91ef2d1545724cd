"""`hvpipe profile` on real ranks, then `hvpipe plan` with its files, then training by that plan."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from distributed import Run, run
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

NETS = """
import os, time
import keras

def small():
    if os.environ.get("OMPI_COMM_WORLD_RANK") == os.environ.get("LATE_RANK", "none"):
        time.sleep(4.0)  # longer than HVPIPE_STALL_WARN below, as if this rank took long to measure
    x = keras.Input((64, 64, 3))
    h = keras.layers.Conv2D(16, 5, activation="relu", name="first")(x)
    h = keras.layers.Conv2D(16, 5, activation="relu", name="second")(h)
    return keras.Model(x, keras.layers.Conv2D(4, 5, name="third")(h), name="small")
"""

TRAIN = """
import hvpipe
import hvpipe.keras as hk
import numpy as np
from nets import small

hvpipe.init()
pipe = hk.pipeline_parallel(small, "plan.json")
pipe.compile("sgd", "mse")
x, y = np.ones((8, 64, 64, 3), np.float32), np.zeros((8, 52, 52, 4), np.float32)
losses = pipe.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
print(f"rank {hvpipe.rank()} has stage {pipe.stage_numbers}, loss falls: {losses[1] < losses[0]}")
"""


def hvpipe(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Run:
    return run([sys.executable, "-m", "hvpipe", *arguments], limit_s=240, cwd=folder, env=env)


def test_two_ranks_profile_plan_and_train(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    late = {"LATE_RANK": "1", "HVPIPE_STALL_WARN": "3"}
    result = hvpipe(tmp_path, "profile", "nets.py:small", "-np", "2", "--microbatch", "4", env=late)
    assert result.returncode == 0, result.describe()
    assert "stall" not in result.output, "a slow rank is no stall"
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

    (tmp_path / "train.py").write_text(TRAIN)
    trained = hvpipe(tmp_path, "run", "-np", "2", "train.py")
    assert trained.returncode == 0, trained.describe()
    stages = re.findall(r"has stage \((.),\), loss falls: True", trained.output)
    assert sorted(stages) == ["0", "1"], trained.describe()
