"""A real horovodrun starts hvpipe, over MPI and Gloo. Needs `make peers`; `make horovod-test` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.cluster import network
from bench.cluster.virtual_cluster import VirtualCluster, equal_hosts
from bench.errors import BenchError

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
# A model that trains in seconds on many ranks. Each rank starts from values of its own.
SMALL = """
import hashlib, sys, keras, numpy as np
import hvpipe, hvpipe.keras as hk
hvpipe.init()
keras.utils.set_random_seed(hvpipe.rank())
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
model = hk.data_parallel(model)
x = np.random.default_rng(5).normal(size=(64, 8))
model.fit(x, x[:, :1], batch_size=32, epochs=2, verbose=0)
found = hashlib.sha256(b"".join(value.tobytes() for value in model.get_weights()))
sys.stdout.write(f"weights {found.hexdigest()}\\n")  # in one piece, because horovodrun marks each piece
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


FORMS = ("--mpi", "--gloo")


def run(
    *command: object, limit_s: float = 300.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
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
        **(env or {}),
    }
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


def train(path: Path, *launcher: object) -> str:
    """Run the example on two ranks and return the hash of its weights."""
    script = [sys.executable, "examples/train.py", "--progress", "none", "--epochs", "1", "--save", path]
    found = run(*launcher, "-np", 2, *script)
    assert found.returncode == 0, described(found)
    assert "accuracy" in found.stdout, described(found)
    return run(sys.executable, "-c", WEIGHTS, path).stdout.split()[-1]


def described(found: subprocess.CompletedProcess[str]) -> str:
    return found.stdout[-3000:] + found.stderr[-3000:]


def test_horovodrun_trains_the_same_weights_as_mpirun(tmp_path: Path) -> None:
    by_mpirun = train(tmp_path / "mpirun.keras", "mpirun")
    for form in FORMS:
        assert train(tmp_path / f"{form}.keras", "horovodrun", form) == by_mpirun, form


def test_sixteen_ranks_train_the_same_weights() -> None:
    hashes = []
    for form in FORMS:
        found = run("horovodrun", form, "-np", 16, sys.executable, "-c", SMALL)
        assert found.returncode == 0, described(found)
        hashes += re.findall(r"weights (\w+)", found.stdout)
        assert len(hashes) in (16, 32), described(found)
    assert len(set(hashes)) == 1, hashes


@pytest.mark.parametrize("form", FORMS)
def test_horovod_and_hvpipe_in_one_process(form: str, tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(BOTH)
    found = run("horovodrun", form, "-np", 2, sys.executable, script)
    assert found.returncode == 0, described(found)
    assert found.stdout.count("both") == 2


@pytest.mark.parametrize("form", FORMS)
def test_two_hosts(form: str) -> None:
    """horovodrun starts a rank on another host by ssh; here, in another network namespace."""
    try:
        network.require_privileges()
    except BenchError as error:
        pytest.skip(str(error))
    with VirtualCluster(equal_hosts(2, "1gbit")) as cluster:
        names = [host.name for host in cluster.spec.hosts]
        script = [sys.executable, "examples/train.py", "--progress", "none", "--epochs", "1"]
        job = ["horovodrun", form, "-np", "2", "-H", ",".join(f"{name}:1" for name in names), *script]
        path = f"{cluster.ssh.parent}:{BIN}:{os.environ['PATH']}"
        found = run(*cluster.host_command(names[0], job), limit_s=600.0, env={"PATH": path})
    assert found.returncode == 0, described(found)
    assert "2 ranks" in found.stdout, described(found)


def refusal(script: str, *, env: Mapping[str, str], limit_s: float = 120.0) -> str:
    """Return the output of a job that must end with an error on all ranks."""
    found = run("horovodrun", "--gloo", "-np", 2, sys.executable, "-c", script, limit_s=limit_s, env=env)
    assert found.returncode != 0, described(found)
    return found.stdout + found.stderr


def test_half_of_the_ranks_with_another_back_end() -> None:
    script = "import os, hvpipe; hvpipe.init(backend='mpi' if os.environ['HOROVOD_RANK'] == '1' else None)"
    assert "MPI has no ranks under `horovodrun --gloo`" in refusal(script, env={})


def test_a_rendezvous_that_is_gone() -> None:
    script = (
        "import os, hvpipe; os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT'] = '9'; hvpipe.init(); print('joined')"
    )
    output = refusal(script, env={})
    assert "The horovodrun that started this process should answer at" in output
    assert "joined" not in output


def test_a_rank_that_raises_ends_the_others() -> None:
    script = (
        "import hvpipe, numpy\nhvpipe.init()\nif hvpipe.rank() == 1: raise RuntimeError('on purpose')\n"
        "hvpipe.allreduce(numpy.ones(4, 'float32'))"
    )
    output = refusal(script, env={})
    assert "hvpipe: rank 1 of 2" in output
    assert "on purpose" in output
