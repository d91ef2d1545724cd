"""How the benchmarks use MPI: ranks on the hosts of a virtual cluster, sums that can be verified."""

from __future__ import annotations

import os
import sys

import mpi4py
import pytest

from bench.cluster import network
from bench.cluster.virtual_cluster import VirtualCluster, equal_hosts
from bench.errors import BenchError

WHERE_AM_I = (
    "from mpi4py import MPI; import socket, os; world = MPI.COMM_WORLD;"
    "local = world.Split_type(MPI.COMM_TYPE_SHARED).size;"
    "every = world.gather((world.rank, socket.gethostname(), local, os.environ['HV_SEEN']));"
    "every and print(every)"
)


def test_ranks_live_on_different_hosts() -> None:
    try:
        network.require_privileges()
    except BenchError as error:
        pytest.skip(str(error))
    with VirtualCluster(equal_hosts(2, "100mbit"), f"hvmpi{os.getpid()}") as cluster:
        result = cluster.run(2, [sys.executable, "-c", WHERE_AM_I], timeout_s=60, env={"HV_SEEN": "yes"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str([(0, "h0", 1, "yes"), (1, "h1", 1, "yes")])


def test_the_verification_pattern_has_an_exact_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi4py.rc, "initialize", False)  # so that the import does not start MPI
    from bench.all_reduce.worker import expected_and_mine

    parts = [expected_and_mine(600, rank, 3)[1] for rank in range(3)]
    expected = expected_and_mine(600, 0, 3)[0]
    assert (sum(parts) == expected).all()
    assert len({part.tobytes() for part in parts}) == 3
    # Element 5: 5 x (1 + 2 + 3) + (0 + 1 + 2).
    assert expected[5] == 33
