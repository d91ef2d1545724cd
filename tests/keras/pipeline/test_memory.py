"""A model too large for one rank's memory limit fails on one rank and trains on four."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import launch

SCRIPT = """
import os, re, resource
from pathlib import Path

# oneDNN's allocator doubles its regions, so its peak depends on chance, and a limit below the peak
# leaves no room for the stacks of threads. malloc takes what is asked for.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import keras, numpy as np, tensorflow as tf
import hvpipe, hvpipe.keras as hk

hvpipe.init()
SIDE, LAYERS = 3300, 8  # 44 MB of weights each; with gradients and Adam's two slots 1.4 GB in all

def build():
    model = keras.Sequential([keras.Input((SIDE,))])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(SIDE, use_bias=False))
    return model

# Allocate what is needed once: threads, their stacks and arenas.
small = hk.pipeline_parallel(
    lambda: keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(8))])
)
small.compile("adam", "mse")
small.fit(np.ones((16, 4)), np.ones((16, 4)), batch_size=16, verbose=0)

used_kb = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
limit = used_kb * 1024 + 1_000_000_000  # a rank of four takes 0.6 GB
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
pipe = hk.pipeline_parallel(build)
pipe.compile("adam", "mse")
x = np.ones((16, SIDE), np.float32) / SIDE
history = pipe.fit(x, np.zeros((16, SIDE), np.float32), batch_size=16, verbose=0)
print("trained with loss", history.history["loss"], flush=True)
hvpipe.shutdown()
"""

SHORT_OF_MEMORY = ("OOM", "ResourceExhausted", "bad_alloc", "MemoryError", "Cannot allocate memory")


@pytest.mark.timeout(700)
def test_a_model_too_large_for_one_rank_trains_on_four(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(SCRIPT)
    alone = launch(1, [script], limit_s=300)
    assert not alone.timed_out
    assert alone.returncode != 0, alone.describe()
    assert any(words in alone.output for words in SHORT_OF_MEMORY), alone.describe()
    together = launch(4, [script], limit_s=300)
    assert together.returncode == 0, together.describe()
    assert together.output.count("trained with loss [") == 4
