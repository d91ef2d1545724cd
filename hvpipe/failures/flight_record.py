"""What a rank leaves behind when it ends badly: its flight recorder, and its stacks for the watchdog."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from hvpipe.environment.settings import Settings
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import make_own, user_on
from hvpipe.world.world import World

_STACK_SIGNAL = signal.SIGRTMIN + 5  # batch systems and launchers use none of these
_BYTES = 4096 + 128 * 1000  # of a recorder

_core: Any = None
_stack_file: int | None = None


def flight_path(settings: Settings, world: World) -> str:
    """Return the file of this rank's recorder; "" to keep it in memory. Collective."""
    if settings.flight_folder is not None:
        start = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(8).hex()}"  # nobody can make it first
        folder = Path(settings.flight_folder) / world.allgather_object(start)[0]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_own(folder, user_on(folder.parent))
        except OSError as error:
            raise HvpipeError(
                "HVPIPE_FLIGHT_RECORDER should be a folder that every rank can write. "
                f"Received: {settings.flight_folder!r}: {error.strerror}"
            ) from error
        return str(folder / f"rank-{world.rank}.flight")
    if settings.job_folder is None:
        return ""
    return _path_with_room(settings.job_folder / "flight", world.rank)


def _path_with_room(folder: Path, rank: int) -> str:
    """Return the file of an unrequested recorder; "" without room, since a full disk must not end the job."""
    path = folder / f"rank-{rank}.flight"
    try:
        make_own(folder)
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, _BYTES)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        return ""
    return str(path)


def flight_path_without_lost(path: str, world: World) -> str:
    """Return the file of this rank's recorder in a job that goes on without lost ranks.

    The earlier files stay, because they show the loss.
    """
    if not path:
        return ""
    before = Path(path).parent
    return _path_with_room(before.with_name(f"{before.name}-{world.size}-ranks"), world.rank)


def keep_record(core: Any) -> None:
    """From now on, let errors and signals be recorded, and let the watchdog read Python stacks."""
    global _core, _stack_file
    _core = core
    core.mark_signals()
    if _stack_file is None:
        _stack_file = _open_stack_file()
        # In C, so it works whatever the interpreter does.
        faulthandler.register(_STACK_SIGNAL, file=_stack_file, all_threads=True, chain=False)
    core.use_stacks(int(_STACK_SIGNAL), _stack_file)


def _open_stack_file() -> int:
    try:
        return os.memfd_create("hvpipe-stacks")
    except (AttributeError, OSError):  # Pythons that were built with an older glibc, and kernels that refuse
        number, path = tempfile.mkstemp(prefix="hvpipe-stacks-")
        os.unlink(path)
        return number


def mark_signals() -> None:
    """Let SIGTERM be recorded again, after Python has had a handler for it that is gone now."""
    if _core is not None:
        _core.mark_signals()


def end_record(path: str) -> None:
    """Forget the recorder of a session that has ended properly, and remove its folder with the last rank."""
    global _core
    _core = None
    if path:
        with contextlib.suppress(OSError):
            Path(path).parent.rmdir()


def tell_recorder(why: str) -> None:
    """Record why this rank ends."""
    if _core is not None:
        _core.end(why)
