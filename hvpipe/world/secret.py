"""The secret of ranks that `horovodrun --gloo` has started: it never passes through horovodrun's open store.

horovodrun gives its ranks none. The user sets HVPIPE_SECRET, or else ranks on one host share a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvpipe.environment.discover import Launch
from hvpipe.errors import HvpipeError, InitError
from hvpipe.log import logger
from hvpipe.world.rendezvous import Rendezvous
from hvpipe.world.shared_memory import FOLDER

_LEAST = 16
_MOST_BYTES = 4096
_HEAD = "hvpipe secret "
_NAME = re.compile(r"hvpipe-secret-[0-9a-f]{32}")
_PAUSE_S = 0.05


@contextlib.contextmanager
def job_secret(store: Rendezvous, launch: Launch, given: str) -> Iterator[bytes]:
    """Give what the ranks of this job know and nobody else; b"" if there is no such thing. Collective.

    Args:
        store: Where ranks meet. It learns the name of a file at most.
        launch: This rank and its numbers.
        given: The setting HVPIPE_SECRET: the secret, or the path of its file; "": it is not set.

    Raises:
        HvpipeError: For a secret that is short, or a file that others can read.
        InitError: If this rank cannot read the file of rank 0.
    """
    if given:
        yield _given(given)
    elif launch.size == 1:
        yield secrets.token_bytes(32)
    elif launch.local_size != launch.size:
        if launch.rank == 0:
            logger.warning(
                "hvpipe: THE RANKS OF THIS JOB CANNOT PROVE WHO THEY ARE. They meet in the key-value store "
                "of horovodrun. Anybody who reaches the launcher can read and write there, join the job and "
                "change its results. Before horovodrun, set HVPIPE_SECRET to a secret, or to the path of a "
                "file that has one on every host. Until then ranks exchange no pickles: allgather_object and "
                "broadcast_object take plain values only."
            )
        yield b""
    elif launch.rank == 0:
        with _written(store) as secret:
            yield secret
    else:
        yield _read_from_rank_0(store)


def _given(text: str) -> bytes:
    if text.startswith("/"):
        try:
            text = _read_own(Path(text)).strip()
        except OSError as error:
            raise HvpipeError(
                "HVPIPE_SECRET should be a secret, or the path of a file on every host that only its owner "
                f"can read (chmod 600). Received: a value that begins with /: {error.strerror or error}"
            ) from error
    if len(text) < _LEAST:
        raise HvpipeError(
            f"HVPIPE_SECRET should have at least {_LEAST} random characters, as from `openssl rand -hex 32`. "
            f"Received: {len(text)} characters"
        )
    return text.encode(errors="surrogateescape")


@contextlib.contextmanager
def _written(store: Rendezvous) -> Iterator[bytes]:
    """Leave a new secret in a file for the other ranks of this user on this host."""
    name, secret = f"hvpipe-secret-{secrets.token_hex(16)}", secrets.token_hex(32)
    path = _folder() / name
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(number, f"{_HEAD}{secret}".encode())
        finally:
            os.close(number)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise InitError(
            "Rank 0 should leave a file for the other ranks of this host, or set HVPIPE_SECRET. "
            f"Received: {path}: {error.strerror}"
        ) from error
    try:
        store.put("secret", name)
        yield secret.encode()
    finally:
        path.unlink(missing_ok=True)


def _read_from_rank_0(store: Rendezvous) -> bytes:
    """Return what rank 0 has left. A stranger may have stored another name before rank 0 does."""
    deadline_s = time.monotonic() + store.limit_s
    while True:
        name = store.get("secret", "Rank 0")
        why = "no name of such a file"
        if isinstance(name, str) and _NAME.fullmatch(name):
            try:
                text = _read_own(_folder() / name)
                if text.startswith(_HEAD):
                    return text.removeprefix(_HEAD).encode()
                why = "a file without a secret"
            except OSError as error:
                why = f"{_folder() / name}: {error.strerror or error}"
        if time.monotonic() > deadline_s:
            raise InitError(
                "Ranks on one host, of one user, should share a file; otherwise set HVPIPE_SECRET for all of "
                f"them. Received: {why}"
            )
        time.sleep(_PAUSE_S)


def _read_own(path: Path) -> str:
    """Return the text of a file that this user alone can read; raise OSError for any other file."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"its mode is {stat.filemode(found.st_mode)}, its owner {found.st_uid}")
        return os.read(number, _MOST_BYTES).decode(errors="surrogateescape")
    finally:
        os.close(number)


def _folder() -> Path:
    return Path(FOLDER if os.access(FOLDER, os.W_OK) else tempfile.gettempdir())
