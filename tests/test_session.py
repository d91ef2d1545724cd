"""Settings that rank 0 decides for all ranks, what it says about Horovod's variables, and forked children."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import hvpipe
from distributed import launch
from hvpipe.engine.engine import EngineClient
from hvpipe.environment.settings import Settings
from hvpipe.errors import PeerError
from hvpipe.session import Session
from hvpipe.world.mpi import MpiWorld

UNEQUAL = """
import os
from dataclasses import asdict

import numpy as np

import hvpipe
from hvpipe.environment.settings import Settings
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


def test_rank_0_names_variables_without_effect_once(tmp_path: Path) -> None:
    script = tmp_path / "init.py"
    script.write_text("import hvpipe; hvpipe.init()")
    horovods = {"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": "1000"}
    result = launch(2, [script], limit_s=120.0, env={**horovods, "HVPIPE_BUCKET_BYTE": "1000"})
    assert result.returncode == 0, result.describe()
    assert [line for line in result.output.splitlines() if "have no effect" in line] == [
        "hvpipe: these variables of Horovod have no effect here: HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME",
        "hvpipe: unknown variables, which have no effect: "
        "HVPIPE_BUCKET_BYTE (did you mean HVPIPE_BUCKET_BYTES?)",
    ]


FORKS = """
import os, sys
import numpy as np
import hvpipe
hvpipe.init(trace=sys.argv[1])
rank = hvpipe.rank()
total = hvpipe.allreduce(np.ones(3, np.float32), op="sum")
sys.stdout.flush()
for way in {ways} if rank == 0 else ():
    child = os.fork()
    if child == 0:
        assert hvpipe.is_initialized() and (hvpipe.rank(), hvpipe.size()) == (0, 2)
        exec(way)
    _, status = os.waitpid(child, 0)
    print("child exited with", os.waitstatus_to_exitcode(status), flush=True)
total = hvpipe.allreduce(np.full(3, rank + 1, np.float32), op="sum")
hvpipe.barrier()
print(f"rank {rank} went on: {total.tolist()}", flush=True)
"""
# What a child does, its exit code, and what it prints.
WAYS_TO_END = (
    ("sys.exit(0)", 0, ""),
    ("raise ValueError('of the child')", 1, "ValueError: of the child"),
    ("hvpipe.shutdown(); sys.exit(3)", 3, ""),
    ("hvpipe.barrier()", 1, "Received: a call of agree in a forked child"),
)


def test_forked_children_that_end_leave_the_job_alone(tmp_path: Path) -> None:
    """Regression: a child shut down its parent's connections, or aborted all ranks."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS.replace("{ways}", repr([way for way, _, _ in WAYS_TO_END])))
    result = launch(2, [script, tmp_path / "trace.json"], limit_s=120.0, env={"HVPIPE_TIMEOUT": "30"})
    assert result.returncode == 0, result.describe()
    went_on = {f"rank {rank} went on: [3.0, 3.0, 3.0]" for rank in range(2)}
    assert went_on <= set(result.output.splitlines()), result.describe()
    codes = [line[18:] for line in result.output.splitlines() if line.startswith("child exited with ")]
    assert codes == [str(code) for _, code, _ in WAYS_TO_END], result.describe()
    for _, _, says in WAYS_TO_END:
        assert says in result.output, result.describe()
    assert (tmp_path / "trace.json").exists()


class LosingWorld(MpiWorld):
    """The first of some ranks, the last of which is lost; a while after `watch`, so is the next."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.local_rank, self.local_size = 0, size

    def survivors(self) -> MpiWorld:
        return LosingWorld(self.size - 1)

    def allgather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def missing_in(self, world: MpiWorld) -> list[int]:
        return list(range(world.size, self.size))

    def watch(self, lost: Callable[[list[int]], None]) -> None:
        if self.size == 3:
            threading.Timer(0.1, lost, [[2]]).start()


def test_a_loss_while_the_new_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: nobody watched yet, so the error of making it ended the job."""

    def make(world: MpiWorld, settings: Settings) -> None:
        if world.size == 3:
            raise PeerError("a rank is lost")

    nothing: Any = SimpleNamespace(set_default=lambda core: None, set_default_named_calls=lambda calls: None)
    monkeypatch.setattr("hvpipe.session.import_native", lambda: nothing)
    monkeypatch.setattr("hvpipe.session.keep_record", lambda core: None)
    session = Session.__new__(Session)
    vars(session).update(
        world=LosingWorld(4),
        settings=Settings(),
        engine=SimpleNamespace(go_on_with=make, lose_ranks=lambda why: None, native=None),
        lost="rank 3 of 4 was lost",
        named_calls=lambda: None,
        _named_calls=None,
        _left_behind=[],
    )
    change = session.go_on_without_lost()
    assert (change.old_size, change.size, change.lost) == (4, 2, (2, 3))


def test_totals_go_on_after_a_loss() -> None:
    cores = [
        SimpleNamespace(
            counters=lambda n=n: {"network_bytes_sent": n},
            take_events=list,
            stop=lambda: None,
            set_requests=lambda bits: None,
        )
        for n in (100, 5)
    ]
    world: Any = SimpleNamespace(make_engine=lambda settings: cores.pop(0))
    engine = EngineClient(world, Settings())
    engine.go_on_with(world, Settings())
    assert engine.counters()["network_bytes_sent"] == 105


def test_a_loss_in_shutdown_that_the_watch_tells_of_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the engine's error came first, and the rank ended all ranks though the work was done."""
    session = Session.__new__(Session)
    world = LosingWorld(2)

    def close(by: str) -> None:
        threading.Timer(0.1, lambda: vars(session).update(lost="rank 1 of 2 was lost")).start()
        raise PeerError("a rank is lost")

    def abort(code: int = 1) -> None:
        raise AssertionError("it should end quietly. Received: abort")

    vars(world).update(abort=abort)
    engine = Mock()
    vars(session).update(world=world, settings=Settings(elastic=True), lost=None, checkpoints=None)
    vars(session).update(close=close, engine=engine)
    monkeypatch.setattr("hvpipe.session._session", session)
    hvpipe.shutdown()
    assert "rank 1 of 2 was lost in shutdown" in caplog.text
    engine.stop.assert_called_once_with()  # its threads must not call MPI once that is finalised


def test_checks_that_custom_loops_do_not_make_are_not_dropped_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = Session.__new__(Session)
    settings = Settings(verify_every=5, nonfinite="skip")
    vars(session).update(world=LosingWorld(2), settings=settings, _warned_of_checks=False)
    for _ in range(2):
        session.warn_without_checks("DistributedOptimizer")
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith("DistributedOptimizer. Received: HVPIPE_VERIFY=5, HVPIPE_NONFINITE=skip")


def test_a_chosen_exit_code_counts_if_nobody_catches_it() -> None:
    """Regression: after a caught exit with 75 `hvpipe run` returned 75, although the program had gone on."""
    program = """
import atexit, sys
from hvpipe.failures.noted_exit import note_exits
from hvpipe.session import _chosen_code
note_exits()
atexit.register(lambda: print(_chosen_code()))
try:
    sys.exit(75)
except SystemExit:
    pass
print(_chosen_code())
sys.exit(75)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (75, ["0", "75"]), done.stderr
