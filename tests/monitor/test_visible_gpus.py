"""CUDA_VISIBLE_DEVICES, interpreted as in CUDA's documentation."""

from __future__ import annotations

import pytest

from hvpipe.monitor.visible_gpus import GpuInfo, MigDevice, uuid_of_rank, visible_uuids

GPUS = [GpuInfo(f"GPU-{letter}{letter}-1", "made up") for letter in "abc"]
MIG = GpuInfo("GPU-dd-1", "in parts", instances=(MigDevice("MIG-d7", 7, 0), MigDevice("MIG-d8", 8, 0)))


@pytest.mark.parametrize(
    ("setting", "letters"),
    [
        (None, "abc"),
        ("", ""),
        ("2,1", "cb"),
        ("0,2,-1,1", "ac"),  # the example in CUDA's documentation
        ("0,3,1", "a"),
        ("1, 0", "ba"),
        ("GPU-bb,GPU-aa-1", "ba"),
        ("GPU-,0", ""),  # ambiguous prefix
        ("NoDevFiles", ""),
        ("GPU-zz,0", ""),
    ],
)
def test_whole_gpus(setting: str | None, letters: str) -> None:
    assert visible_uuids(setting, GPUS) == [f"GPU-{letter}{letter}-1" for letter in letters]


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        (None, ["GPU-aa-1", "MIG-d7"]),  # CUDA takes the first MIG device
        ("1", ["MIG-d7"]),
        ("MIG-d8", ["MIG-d8"]),
        ("MIG-GPU-dd-1/8/0,0", ["MIG-d8", "GPU-aa-1"]),
        ("MIG-GPU-dd-1/8/1", []),
        ("MIG-d", []),
    ],
)
def test_mig(setting: str | None, uuids: list[str]) -> None:
    assert visible_uuids(setting, [GPUS[0], MIG]) == uuids


def test_local_ranks_index_the_visible_gpus() -> None:
    assert [uuid_of_rank("2,0", rank, GPUS) for rank in range(3)] == ["GPU-cc-1", "GPU-aa-1", "GPU-cc-1"]
    # A launcher that shows each rank one GPU.
    assert uuid_of_rank("1", 3, GPUS) == "GPU-bb-1"
    assert uuid_of_rank("", 0, GPUS) is None
