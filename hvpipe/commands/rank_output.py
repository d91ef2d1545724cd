"""Starts a rank's program, and copies what it prints to files, as `horovodrun --output-filename` does.

    python -m hvpipe.commands.rank_output [--append] DIR PROGRAM ARGUMENTS...

    program -- two pipes --> copier --> DIR/rank.N/stdout, DIR/rank.N/stderr
                                   `--> mpirun, which prints it

The program replaces this process, so its signals, exit code, parent and children are as without files. The
copier is a separate process. It ends when all processes that can write into the pipes have ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from hvpipe.environment.discover import discover
from hvpipe.errors import HvpipeError, LaunchError
from hvpipe.own_folder import check_own, user_name, user_on

_MODULE, _APPEND = "hvpipe.commands.rank_output", "--append"
_READ_BYTES = 1 << 16
_STREAMS = {"stdout": 1, "stderr": 2}
# mpirun and batch systems send these to the rank's process group. The copier must outlive the program.
_OF_THE_PROGRAM = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGPIPE),
)


def recorded(command: Sequence[str], folder: str, *, dry_run: bool) -> tuple[str, ...]:
    """Return the command of a rank that also writes its output below `folder`. Creates the folder.

    Args:
        command: The command of a rank; it begins with the path of a program.
        folder: The folder for all ranks. Ranks on other hosts create it there.
        dry_run: Create nothing.

    Raises:
        LaunchError: If the folder cannot be created.
    """
    path = Path(folder).absolute()
    if not dry_run:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                "--output-filename should be a folder, or one that can be created. "
                f"Received: --output-filename {folder!r}: {error.strerror}"
            ) from error
    return (sys.executable, "-m", _MODULE, str(path), *command)


def appending(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command for a later start of the same job, which goes on in the files of the first start."""
    after = command.index(_MODULE) + 1 if _MODULE in command else 0
    if after == 0 or command[after] == _APPEND:
        return tuple(command)
    return (*command[:after], _APPEND, *command[after:])


def rank_folder(folder: Path, rank: int, size: int) -> Path:
    """Return the folder of a rank. As in Horovod, zeros make names sort by rank: rank.07 of 12 ranks."""
    return folder / f"rank.{rank:0{len(str(size - 1))}d}"


def main(arguments: Sequence[str]) -> int:
    """Start the program with its output copied. Returns only if it cannot be started."""
    append = arguments[0] == _APPEND
    folder, *program = arguments[1:] if append else arguments
    try:
        launch = discover()
        if launch.rank is None or launch.size is None:
            raise LaunchError(f"The launcher should tell each rank its number. Received: {launch}")
        files = open_files(rank_folder(Path(folder), launch.rank, launch.size), append)
    except (HvpipeError, OSError) as error:
        print(f"hvpipe run: --output-filename: {error}", file=sys.stderr)
        return 2
    _start_copier(files)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and programs inherit that
    os.execv(program[0], program)


def open_files(own: Path, append: bool) -> dict[str, int]:
    """Open the files of a rank for writing; make its folder if it is missing.

    Args:
        own: The folder.
        append: Whether to keep what is in the files.

    Raises:
        OSError: They cannot be written, or another user has put something in their place.
    """
    own.mkdir(parents=True, exist_ok=True)
    user = user_on(own.parent)
    check_own(own, user)
    folder = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return {name: _open(folder, own / name, append, user) for name in _STREAMS}
    finally:
        os.close(folder)


def _open(folder: int, path: Path, append: bool, user: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_APPEND if append else 0)
    file = os.open(path.name, flags, 0o666, dir_fd=folder)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != user:
        os.close(file)
        raise PermissionError(
            errno.EACCES, f"{path} of {user_name(found.st_uid)} should be a file of {user_name(user)}"
        )
    os.set_blocking(file, True)
    if not append:
        os.truncate(file, 0)
    return file


def _start_copier(files: dict[str, int]) -> None:
    """Put pipes in the place of this process's stdout and stderr, and start the process that reads them."""
    pipes = {name: os.pipe() for name in _STREAMS}
    child = os.fork()
    if child == 0:
        # Started by a process that ends, the copier is no child that the program could find or wait for.
        if os.fork() == 0:
            os.close(0)
            for _, writing in pipes.values():
                os.close(writing)
            for number in _OF_THE_PROGRAM:
                signal.signal(number, signal.SIG_IGN)
            copy({pipes[name][0]: (files[name], console) for name, console in _STREAMS.items()})
        os._exit(0)
    os.waitpid(child, 0)
    for name, (_, writing) in pipes.items():
        os.dup2(writing, _STREAMS[name])


def copy(targets: dict[int, tuple[int, ...]]) -> None:
    """Copy each file descriptor to its targets until all have ended. A target that fails gets no more.

    Args:
        targets: For each descriptor to read, those to write, the most important one first.
    """
    left = {reading: list(writing) for reading, writing in targets.items()}
    while left:
        ready, _, _ = select.select(list(left), [], [])
        for reading in ready:
            data = os.read(reading, _READ_BYTES)
            if not data:
                del left[reading]
            for target in [target for target in left.get(reading, ()) if not _write(target, data)]:
                left[reading].remove(target)


def _write(target: int, data: bytes) -> bool:
    """Write everything. Return whether it worked: not on a full disk, or if nobody reads any more."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # somebody else has set this on a shared terminal or pipe
            select.select([], [target], [])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(2, f"hvpipe run: output of this rank is lost: {error.strerror}\n".encode())
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
