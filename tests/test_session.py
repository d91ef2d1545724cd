"""Settings that rank 0 decides for all ranks, and what it says about Horovod's variables."""

from __future__ import annotations

from pathlib import Path

from distributed import launch

UNEQUAL = """
import os
from dataclasses import asdict

import numpy as np

import hvpipe
from hvpipe.comm.discover import Settings
from hvpipe.session import current

OWN = {
    "HVPIPE_SHARED_MEMORY": "0",
    "HVPIPE_RANKS_PER_HOST": "1",
    "HVPIPE_SEGMENT_BYTES": "1000",
    "HVPIPE_SLOT_BYTES": "4096",
    "HVPIPE_MESSAGES_IN_FLIGHT": "2",
    "HVPIPE_BUCKET_BYTES": "100",
    "HVPIPE_TABLE_BYTES": "100",
    "HVPIPE_NCCL_LIBRARY": "none",
    "HVPIPE_NCCL_SPAN": "host",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}
if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "1":
    os.environ.update(OWN)
hvpipe.init()
found = hvpipe.allreduce(np.full(300_000, hvpipe.rank() + 1.0, np.float32), op="sum")
assert (found == 3).all()
taken, usual = asdict(current().settings), asdict(Settings())
names = {name.removeprefix("HVPIPE_").lower() for name in OWN if name.startswith("HVPIPE_")}
names.add("gpus_may_be_shared")
assert {name: taken[name] for name in names} == {name: usual[name] for name in names}
print(f"rank {hvpipe.rank()} took them", flush=True)
"""


def test_ranks_whose_environments_differ_take_rank_0s_settings(tmp_path: Path) -> None:
    """Regression: mpirun passes HVPIPE_* only to its own host, so ranks expected different messages."""
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    result = launch(2, [script], limit_s=120.0, env={"HVPIPE_TIMEOUT": "30"})
    assert result.returncode == 0, result.describe()
    assert {"rank 0 took them", "rank 1 took them"} <= set(result.output.splitlines())


def test_rank_0_names_horovods_variables_without_effect_once(tmp_path: Path) -> None:
    script = tmp_path / "init.py"
    script.write_text("import hvpipe; hvpipe.init()")
    env = {"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": "1000"}
    result = launch(2, [script], limit_s=120.0, env=env)
    assert result.returncode == 0, result.describe()
    says = "these variables of Horovod have no effect here: HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME"
    assert [line for line in result.output.splitlines() if "HOROVOD_" in line] == [f"hvpipe: {says}"]
