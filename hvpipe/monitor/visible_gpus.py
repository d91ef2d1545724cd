"""Which GPU is a rank's: CUDA_VISIBLE_DEVICES and the local rank, read as CUDA reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Instance:
    """A MIG device: a slice of a GPU that CUDA takes for a whole one."""

    uuid: str
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host in the order of nvidia-smi; with `instances` where it is in MIG mode."""

    uuid: str
    name: str
    memory_bytes: int | None = None
    instances: tuple[Instance, ...] = ()

    @property
    def device_uuid(self) -> str:
        """What CUDA uses when this GPU is named: in MIG mode, its first instance."""
        return self.instances[0].uuid if self.instances else self.uuid


def visible_uuids(setting: str | None, gpus: Sequence[Gpu]) -> list[str]:
    """UUIDs of the devices that CUDA shows, in its order; `setting` is CUDA_VISIBLE_DEVICES, None if unset.

    Indices, UUIDs or beginnings of one, MIG UUIDs, MIG-GPU-<uuid>/<gpu instance>/<compute instance>. As
    with CUDA, the first one that names nothing, or more than one, ends the list.
    """
    if setting is None:
        return [gpu.device_uuid for gpu in gpus]
    uuids: list[str] = []
    for word in setting.split(","):
        found = _named(word.strip(), gpus)
        if found is None:
            break
        uuids.append(found)
    return uuids


def uuid_of_rank(setting: str | None, local_rank: int, gpus: Sequence[Gpu]) -> str | None:
    """The device of the rank with this local rank; None where CUDA shows none.

    Local ranks count through the visible devices. A launcher that shows each rank a device of its own
    leaves a list of one.
    """
    uuids = visible_uuids(setting, gpus)
    return uuids[local_rank % len(uuids)] if uuids else None


def _named(word: str, gpus: Sequence[Gpu]) -> str | None:
    if word.isdecimal():
        return gpus[int(word)].device_uuid if int(word) < len(gpus) else None
    if word.startswith("GPU-"):
        matching = [gpu.device_uuid for gpu in gpus if gpu.uuid.startswith(word)]
    elif word.startswith("MIG-GPU-") and "/" in word:
        matching = [
            one.uuid
            for gpu in gpus
            for one in gpu.instances
            if word == f"MIG-{gpu.uuid}/{one.gpu_instance}/{one.compute_instance}"
        ]
    elif word.startswith("MIG-"):
        matching = [one.uuid for gpu in gpus for one in gpu.instances if one.uuid.startswith(word)]
    else:
        return None
    return matching[0] if len(matching) == 1 else None
