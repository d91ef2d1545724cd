"""The warning about a launcher that binds ranks to few cores."""

from __future__ import annotations

import logging
import os

import pytest

from hvpipe import log
from hvpipe.environment.discover import Launch
from hvpipe.monitor import core_binding
from hvpipe.monitor.core_binding import log_placement, mostly_idle
from hvpipe.world.world import SingleWorld

MPIRUN, SRUN, NOBODY = (Launch(name, 0, 2, 0, 2) for name in ("mpirun", "srun", "none"))


class TwoRanks(SingleWorld):
    """Rank 0 of two on one host."""

    size = 2
    local_size = 2


@pytest.mark.parametrize(
    ("cores", "ranks", "there", "idle"),
    [
        pytest.param(1, 2, 16, True, id="Open MPI's two ranks"),
        pytest.param(1, 2, 4, True, id="half of them"),
        pytest.param(1, 2, 2, False, id="a core each, and no more"),
        pytest.param(5, 3, 16, False, id="equal shares with a rest"),
        pytest.param(16, 2, 16, False, id="not bound"),
        pytest.param(32, 4, 64, False, id="a socket each"),
    ],
)
def test_when_a_binding_leaves_cores_idle(cores: int, ranks: int, there: int, idle: bool) -> None:
    assert mostly_idle(cores, ranks, there) is idle


@pytest.mark.parametrize(
    ("launch", "bound", "warned"),
    [(MPIRUN, 1, True), (MPIRUN, 16, False), (SRUN, 1, False), (NOBODY, 1, False)],
)
def test_only_ranks_that_mpirun_binds_narrowly_are_warned(
    launch: Launch,
    bound: int,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cores = {0: bound, os.getppid(): 16}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores[process])))
    with caplog.at_level(logging.WARNING, log.logger.name):
        log_placement(TwoRanks(), launch)
    assert ("bound each rank to 1 of the 16 cores" in caplog.text) is warned
    assert ("--bind-to none" in caplog.text) is warned


def test_a_system_without_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert core_binding.usable_cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("allowed", "cores"), [(None, 64), (4.0, 4), (1.5, 1), (0.2, 1), (100.0, 64)], ids=str
)
def test_a_containers_cpu_limit(allowed: float | None, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: under `docker run --cpus=4` each rank started one thread per core of the host."""
    monkeypatch.setattr(core_binding, "usable_cores", lambda: 64)
    monkeypatch.setattr(core_binding, "cores_allowed", lambda: allowed)
    assert core_binding.affordable_cores() == cores
