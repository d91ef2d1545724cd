"""Room in /dev/shm: what ranks need, and a job whose /dev/shm is too small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import mpirun_command, run
from hvpipe.environment.settings import Settings
from hvpipe.world.shared_memory import host_memory
from hvpipe.world.world import SingleWorld

MB = 1 << 20


class FourRanks(SingleWorld):
    size = 4
    local_size = 4


def test_needed_bytes_grow_with_ranks_and_slots() -> None:
    usual = Settings(slot_bytes=MB)
    assert host_memory(SingleWorld(), usual).needed_bytes == 0
    assert host_memory(FourRanks(), usual).needed_bytes == 2 * 4 * (4 * MB + 8192)


def test_a_missing_folder_is_not_short(tmp_path: Path) -> None:
    found = host_memory(FourRanks(), Settings(slot_bytes=1 << 50), str(tmp_path / "missing"))
    assert found.free_bytes is None
    assert not found.is_short
    assert host_memory(FourRanks(), Settings(slot_bytes=1 << 50), str(tmp_path)).is_short


# Run a command whose /dev/shm has one megabyte.
SMALL = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
SCRIPT = """
import numpy as np
import hvpipe
hvpipe.init()
total = hvpipe.allreduce(np.ones(100_000, np.float32), op="sum")
assert (total == hvpipe.size()).all()
assert hvpipe.counters()["shared_memory_bytes"] == 0
print("rank", hvpipe.rank(), "summed by the ring", flush=True)
"""


def can_mount() -> bool:
    """Return whether a process can get its own /dev/shm."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run([*SMALL, "true"], check=False, capture_output=True, timeout=20).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs root, and unshare -m")
def test_ranks_with_a_small_dev_shm_go_by_the_ring_with_one_warning(tmp_path: Path) -> None:
    """Regression: init ended with MPI_ERR_INTERN, without a cause."""
    script = tmp_path / "small.py"
    script.write_text(SCRIPT)
    result = run([*SMALL, *mpirun_command(2), sys.executable, str(script)], limit_s=60)
    assert result.returncode == 0, result.describe()
    assert {f"rank {rank} summed by the ring" for rank in range(2)} <= set(result.output.splitlines())
    warnings = [line for line in result.output.splitlines() if "HVPIPE_SHARED_MEMORY=0" in line]
    assert len(warnings) == 1, result.describe()
    assert "--shm-size" in warnings[0]
