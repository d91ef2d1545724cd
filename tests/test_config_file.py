"""Config files are written completely or not at all, and survive a crash."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from hvpipe.config_file import read_document, write_document
from hvpipe.errors import HvpipeError
from hvpipe.plan.greedy import partition
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster, equal_cluster
from hvpipe.specs.profile import Profile
from model_graphs import chain


def test_the_file_is_synced_before_its_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller then deletes a checkpoint's old shards.

    If a crash undid the new index, the old one would have no shards.
    """
    happened = []
    replace = os.replace

    def noted(source: Any, target: Any) -> None:
        happened.append(f"{Path(source).name} is {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda handle: happened.append(os.readlink(f"/proc/self/fd/{handle}")))
    monkeypatch.setattr(os, "replace", noted)
    write_document(tmp_path / "index.json", {"a": 1})
    partial = Path(happened[0]).name
    assert re.fullmatch(r"\.index\.json\.\d+\.partial", partial)
    assert happened == [str(tmp_path / partial), f"{partial} is index.json", str(tmp_path)]
    assert os.listdir(tmp_path) == ["index.json"]


def test_a_folder_that_cannot_be_synchronized_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def only_files(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).is_dir():
            raise OSError("invalid argument")
        sync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    write_document(tmp_path / "plan.json", {"a": 1})
    assert read_document(tmp_path / "plan.json").integer("a") == 1


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    """Users mix up the files of `hvpipe plan` and `hvpipe profile`: their fields would say less."""
    profile, cluster = chain(1, 2), equal_cluster(1)
    files = {name: tmp_path / f"{name}.json" for name in ("profile", "cluster", "plan")}
    profile.write(files["profile"])
    cluster.write(files["cluster"])
    partition(profile, cluster, 1).write(files["plan"])
    for wanted, kind in (("profile", Profile), ("cluster", Cluster), ("plan", Plan)):
        for other in set(files) - {wanted}:
            with pytest.raises(
                HvpipeError, match=rf"{other}\.json should be a {wanted}\b.*\. Received: a {other}\b"
            ):
                kind.read(files[other])
    by_hand = tmp_path / "mine.toml"
    by_hand.write_text('[[host]]\nname = "h"')
    with pytest.raises(HvpipeError, match=r"mine\.toml should be a profile .*\. Received: a cluster$"):
        Profile.read(by_hand)
