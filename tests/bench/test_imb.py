"""The Intel MPI Benchmarks as the referee: their output, and an environment without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.all_reduce.imb import main, parse

OUTPUT = """\
# Benchmarking Allreduce
# #processes = 2
#----------------------------------------------------------------
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
            0           20         0.03         0.03         0.03
      1048576         1000        41.70        44.86        43.28
     16777216            2     40040.09     40045.29     40042.69


# All processes entering MPI_Finalize
"""


def test_the_slowest_rank_counts() -> None:
    assert parse(OUTPUT) == pytest.approx({0: 0.03e-6, 1 << 20: 44.86e-6, 1 << 24: 40045.29e-6})


def test_an_environment_without_them_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--environment", str(tmp_path)]) == 1
    assert f"impi-rt, mpi4py, numpy and psutil. Received: {tmp_path}" in capsys.readouterr().err
