"""XLA beside communication: TensorFlow's auto-clustering compiles a step without hvpipe's ops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed import launch

SCRIPT = """
import json
import keras, numpy as np, tensorflow as tf
import hvpipe, hvpipe.keras as hk

hvpipe.init()

def trained(overlap, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(16, "gelu") for _ in range(4))])
    model.compile("adam", "mse", **options)
    hk.data_parallel(model, overlap, bucket_bytes=1024)
    random = np.random.default_rng(hvpipe.rank())
    x, y = random.normal(size=(2, 40, 16)).astype("float32")
    model.fit(x[:, :8], y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [float(np.abs(weight).sum()) for weight in model.get_weights()]

found = {overlap: trained(overlap) for overlap in ("none", "backward", "step")}
found["eager"] = trained("none", run_eagerly=True)
if hvpipe.rank() == 0:
    print(json.dumps(found), flush=True)
"""


def test_steps_train_alike_where_xla_compiles_their_computing(tmp_path: Path) -> None:
    script, dump = tmp_path / "train.py", tmp_path / "dump"
    script.write_text(SCRIPT)
    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2"
    environment = {"TF_XLA_FLAGS": flags, "XLA_FLAGS": f"--xla_dump_to={dump}"}
    result = launch(2, [script], limit_s=120, env=environment)
    assert result.returncode == 0, result.describe()
    assert any("cluster_" in path.name for path in dump.iterdir()), "XLA has compiled nothing"
    found = json.loads(next(line for line in result.output.splitlines() if line.startswith("{")))
    for overlap in ("none", "backward", "step"):
        assert found[overlap] == pytest.approx(found["eager"], rel=1e-4)
