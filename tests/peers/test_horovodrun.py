"""A real horovodrun starts examples/train.py. Needs `make peers`; `make horovod-test` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.skipif(not (BIN / "horovodrun").exists(), reason="needs Horovod: make horovod-test"),
    pytest.mark.timeout(900),
]

WEIGHTS = """
import hashlib, sys, keras
found = hashlib.sha256()
for value in keras.models.load_model(sys.argv[1], compile=False).get_weights():
    found.update(value.tobytes())
print("weights", found.hexdigest())
"""
# Both in one process, and Horovod is in use before and after hvpipe trains.
BOTH = """
import horovod.tensorflow as hvd
import numpy as np, keras, tensorflow as tf
import hvpipe, hvpipe.keras as hk
hvd.init()
hvpipe.init()
assert (hvd.rank(), hvd.size()) == (hvpipe.rank(), hvpipe.size())
def total(): return int(hvd.allreduce(tf.constant(hvd.rank()), op=hvd.Sum))
assert total() == sum(range(hvd.size()))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model = hk.data_parallel(model)
model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
assert total() == sum(range(hvd.size()))
hvpipe.shutdown()
assert total() == sum(range(hvd.size()))
hvd.shutdown()
print("both", flush=True)
"""


def run(*command: object, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        # The order of additions must not depend on the cores that a rank may use.
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


def train(path: Path, *launcher: object, ranks: int = 2) -> str:
    """Run the example and return the hash of its weights."""
    script = [sys.executable, "examples/train.py", "--progress", "none", "--epochs", "1", "--save", path]
    found = run(*launcher, "-np", ranks, *script, limit_s=600.0)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert "accuracy" in found.stdout, found.stdout[-3000:]
    return run(sys.executable, "-c", WEIGHTS, path).stdout.split()[-1]


def test_horovodrun_on_mpi_trains_the_same_weights_as_mpirun(tmp_path: Path) -> None:
    by_mpirun = train(tmp_path / "a.keras", "mpirun")
    assert train(tmp_path / "b.keras", "horovodrun", "--mpi") == by_mpirun


def test_horovod_and_hvpipe_in_one_process(tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(BOTH)
    found = run("horovodrun", "--mpi", "-np", 2, sys.executable, script)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert found.stdout.count("both") == 2


def test_gloo_is_refused_on_every_rank() -> None:
    """MPI would be a world of one there."""
    found = run("horovodrun", "--gloo", "-np", 2, sys.executable, "examples/train.py", "--progress", "none")
    assert found.returncode != 0
    assert "horovodrun --mpi" in found.stdout + found.stderr, found.stdout[-3000:] + found.stderr[-3000:]
