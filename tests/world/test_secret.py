"""The secret of ranks under `horovodrun --gloo`, beside somebody who writes into its store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from stores import open_store

from hvpipe.environment.discover import Launch
from hvpipe.errors import HvpipeError, InitError
from hvpipe.world import secret as module
from hvpipe.world.rendezvous import Rendezvous
from hvpipe.world.secret import job_secret

GIVEN = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr(module, "_folder", lambda: tmp_path)
    with open_store() as place:
        yield Rendezvous(*place, "hvpipe-0", 5.0)


def of(rank: int, hosts: int = 1) -> Launch:
    return Launch("horovodrun", rank, 2, rank // hosts, 2 // hosts)


def test_ranks_of_one_host_share_a_file(store: Rendezvous, tmp_path: Path) -> None:
    """A stranger has stored names before rank 0 does: of missing files, and of one that others can read."""
    stranger = "hvpipe-secret-" + "0" * 32
    for name in ("../../etc/passwd", stranger, "hvpipe-secret-" + "1" * 32, 7):
        store.put("secret", name)
    (tmp_path / stranger).write_text("hvpipe secret known")
    both = threading.Barrier(2)

    def join(rank: int) -> bytes:
        time.sleep(0.2 * (1 - rank))
        with job_secret(store, of(rank), "") as found:
            if rank == 0:
                (path,) = (path for path in tmp_path.iterdir() if path.name != stranger)
                assert path.stat().st_mode & 0o777 == 0o600
            both.wait(5)
            return found

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(join, range(2))
    assert one == other
    assert len(one) == 64
    assert [path.name for path in tmp_path.iterdir()] == [stranger]  # its life ends with the connections
    assert one.decode() not in str(store.get("secret", "Rank 0"))


@pytest.mark.parametrize("kind", ["link", "fifo", "mode", "text"])
def test_a_file_that_a_stranger_could_have_made_is_no_secret(
    kind: str, store: Rendezvous, tmp_path: Path
) -> None:
    name = "hvpipe-secret-" + "a" * 32
    path, own = tmp_path / name, tmp_path / "own"
    own.write_text("hvpipe secret known")
    own.chmod(0o600)
    if kind == "link":
        path.symlink_to(own)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.write_text("hvpipe secret known" if kind == "mode" else "known")
        path.chmod(0o640 if kind == "mode" else 0o600)
    store.put("secret", name)
    brief = Rendezvous(store.host, store.port, store.scope, 0.1)
    with pytest.raises(InitError, match="should share a file; otherwise set HVPIPE_SECRET"):
        job_secret(brief, of(1), "").__enter__()


def test_a_secret_that_is_given(store: Rendezvous, tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_text(f"{GIVEN}\n")
    path.chmod(0o600)
    for text in (GIVEN, str(path)):
        with job_secret(store, of(0, hosts=2), text) as found:
            assert found == GIVEN.encode()
    path.chmod(0o644)
    with (
        pytest.raises(HvpipeError, match=r"only its owner can read \(chmod 600\)"),
        job_secret(store, of(0), str(path)),
    ):
        pass
    with pytest.raises(HvpipeError, match=r"at least 16 random characters.* Received: 5 characters") as error:
        job_secret(store, of(0), "short").__enter__()
    assert "short" not in str(error.value)


def test_hosts_without_a_secret_are_warned_of(store: Rendezvous, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        with job_secret(store, of(rank, hosts=2), "") as found:
            assert found == b""
    (record,) = caplog.records  # of rank 0 alone
    assert "THE RANKS OF THIS JOB CANNOT PROVE WHO THEY ARE" in record.getMessage()


def test_values_of_strangers_are_not_read(store: Rendezvous) -> None:
    place = Rendezvous(store.host, store.port, "s", 0.3)
    sealed, other = (replace(place, secret=secret) for secret in (b"a" * 16, b"b" * 16))
    sealed.put("0", [1, "two"])
    assert sealed.get("0", "Rank 0") == [1, "two"]
    moved = place._request("GET", "0")
    place._request("PUT", "1", moved)  # a value in the place of another one
    place.put("2", ["10.0.0.1", 9])
    other.put("3", 3)
    for key in "123":
        with pytest.raises(InitError, match="a value without the seal of this job's secret, at /s/"):
            sealed.get(key, "Rank 0")
    later = threading.Timer(0.1, lambda: sealed.put("2", "right"))
    later.start()
    assert sealed.get("2", "Rank 0") == "right"
    later.join()
