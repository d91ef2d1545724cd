"""Which GPU a rank gets, and where NCCL is searched."""

from __future__ import annotations

from typing import Any

import pytest

from hvpipe.engine.rank_gpu import assign_gpu, find_nccl
from hvpipe.errors import HvpipeError


@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible", "gpu"),
    [(0, 1, 1, 0), (0, 1, 8, 0), (3, 4, 4, 3), (3, 4, 8, 3), (2, 4, 1, 0)],
)
def test_a_rank_gets_the_gpu_of_its_local_rank(
    local_rank: int, local_size: int, visible: int, gpu: int
) -> None:
    assert assign_gpu(local_rank, local_size, visible) == gpu


@pytest.mark.parametrize(("local_size", "visible"), [(3, 2), (1, 0), (8, 4)])
def test_more_ranks_than_gpus_is_an_error(local_size: int, visible: int) -> None:
    with pytest.raises(HvpipeError, match=f"Received: {local_size} ranks on this host, {visible} GPUs"):
        assign_gpu(0, local_size, visible)


def test_nccl_is_the_configured_library_or_the_wheels_or_the_systems(tmp_path: Any, monkeypatch: Any) -> None:
    assert find_nccl("/opt/libnccl.so.2") == "/opt/libnccl.so.2"
    assert find_nccl("none") == ""
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_nccl("") == "libnccl.so.2"  # a folder without the library
    library.touch()
    assert find_nccl("") == str(library)
