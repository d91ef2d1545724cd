"""64 ranks under mpirun, as eight hosts of eight ranks. tests/csrc/collectives has as many in one process."""

from __future__ import annotations

from pathlib import Path

from distributed import launch

SMALL_SLOTS = {"HVPIPE_RANKS_PER_HOST": "8", "HVPIPE_SLOT_BYTES": "8192", "HVPIPE_TIMEOUT": "200"}


def test_64_ranks() -> None:
    script = Path(__file__).with_name("mpi") / "many_ranks.py"
    done = launch(64, [script], limit_s=300.0, env=SMALL_SLOTS)
    assert done.returncode == 0, done.describe()
    assert "all ranks have passed" in done.output, done.describe()
