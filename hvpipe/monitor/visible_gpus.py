"""The GPU of a rank, from CUDA_VISIBLE_DEVICES and the local rank, by CUDA's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MigDevice:
    """A slice of a GPU in MIG mode, which CUDA treats as a GPU."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    memory_bytes: int | None = None


@dataclass(frozen=True)
class GpuInfo:
    """A GPU of this host; `instances` are its MIG devices, if it is in MIG mode."""

    uuid: str
    name: str
    memory_bytes: int | None = None
    instances: tuple[MigDevice, ...] = ()

    @property
    def device_uuid(self) -> str:
        """The UUID of the device that CUDA uses for this GPU: in MIG mode, its first MIG device."""
        return self.instances[0].uuid if self.instances else self.uuid


def visible_uuids(setting: str | None, gpus: Sequence[GpuInfo]) -> list[str]:
    """Return the UUIDs of the devices that CUDA shows, in CUDA's order.

    Args:
        setting: CUDA_VISIBLE_DEVICES; None if unset. It lists indices, UUIDs or their first characters, MIG
            UUIDs, or MIG-GPU-<uuid>/<gpu instance>/<compute instance>. As with CUDA, the first entry that
            does not name exactly one device ends the list.
        gpus: The GPUs of this host, in the order of nvidia-smi.
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


def uuid_of_rank(setting: str | None, local_rank: int, gpus: Sequence[GpuInfo]) -> str | None:
    """Return the UUID of a rank's device; None if CUDA shows no device.

    Local ranks count through the visible devices. If the launcher shows each rank only its own device, the
    list has one entry.
    """
    uuids = visible_uuids(setting, gpus)
    return uuids[local_rank % len(uuids)] if uuids else None


def memory_of(uuid: str | None, gpus: Sequence[GpuInfo]) -> int | None:
    """Return the memory of a device in bytes; None if the driver does not tell it."""
    sizes = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
    sizes |= {one.uuid: one.memory_bytes for gpu in gpus for one in gpu.instances}
    return None if uuid is None else sizes.get(uuid)


def _named(word: str, gpus: Sequence[GpuInfo]) -> str | None:
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
