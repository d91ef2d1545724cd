"""What launchers print around a failure is kept back; everything else passes, whole and in order."""

from __future__ import annotations

import pytest

from hvpipe.commands.launcher_noise import NoiseFilter

RULE = "-" * 74 + "\n"
ABORT = f"""{RULE}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[33938,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{RULE}"""
EXITED = f"""{RULE}prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{RULE}"""
KILLED = f"""{RULE}prterun noticed that process rank 1 with PID 24323 on node vm exited on
signal 9 (Killed).
{RULE}"""
CODE = f"""{RULE}prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-19876@1,1]
   Exit code:    5
{RULE}"""
MPICHS_ABORT = (
    "Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7) - process 1\n"
)
# One word differs.
OTHER = ABORT.replace("kill all", "spare all")
UNKNOWN = f"{RULE}There are not enough slots available in the system to satisfy the 4\nslots\n{RULE}"
LONG = RULE + "a table of the user's own\n" * 20 + RULE


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_known_blocks_are_kept_and_all_else_passes(size: int) -> None:
    said = f"a\n{ABORT}b\n{EXITED}\0{UNKNOWN}{KILLED}{CODE}\0c\n{MPICHS_ABORT}Abort(7) f\n"
    said += f"{LONG}{OTHER}--- d\n-- e"
    passed, data, noise = b"", said.encode(), NoiseFilter()
    for at in range(0, len(data), size):
        passed += noise.feed(data[at : at + size])
    passed += noise.release()
    assert noise.kept.decode() == ABORT + EXITED + KILLED + CODE + MPICHS_ABORT
    assert passed.decode() == f"a\nb\n{UNKNOWN}c\nAbort(7) f\n{LONG}{OTHER}--- d\n-- e"


def test_a_progress_bar_is_not_held_back() -> None:
    """Lines without an end pass at once, unless they may be the begin of a block."""
    noise = NoiseFilter()
    assert noise.feed(b"\r50 %") == b"\r50 %"
    assert noise.feed(b"\n---") == b"\n"
    assert noise.feed(b" not a rule") == b"--- not a rule"
    assert noise.feed(RULE.encode()) == b""
    assert noise.release() == RULE.encode()
