"""Readings of a rank's GPU, and the reasons why some readings are not available."""

from __future__ import annotations

import os

from hvpipe.monitor.gpu_probes import GpuProbes
from hvpipe.monitor.nvml import Nvml
from hvpipe.monitor.visible_gpus import uuid_of_rank
from hvpipe.trace.sample import GpuReading

# Linux gives this inode to the first PID namespace, whose process numbers the driver uses.
_HOST_PID_NAMESPACE = 0xEFFFFFFC


class GpuMeter:
    """Reads the GPU of one rank. Owns NVML until `close`.

    `uuid` names the GPU (in MIG mode the whole GPU); it is None if CUDA shows this process no GPU. `look`
    never fails, even if the GPU is lost.

    Args:
        visible_gpus: CUDA_VISIBLE_DEVICES; None if unset.
        local_rank: The rank's number on its host.

    Raises:
        NvmlMissing: Without NVML.
    """

    def __init__(self, visible_gpus: str | None, local_rank: int) -> None:
        self.uuid: str | None = None
        self._name = ""
        self._remarks: list[str] = []
        self._probes: GpuProbes | None = None
        self._nvml = Nvml()
        try:
            self._open(visible_gpus, local_rank)
        except self._nvml.library.NVMLError as error:
            self._remarks.append(f"no GPU figures: {error}")
        except BaseException:
            self._nvml.close()
            raise

    def close(self) -> None:
        """Release NVML."""
        self._nvml.close()

    def look(self, now_s: float) -> GpuReading:
        """Return all available readings at this `time.monotonic()`."""
        return GpuReading(**self._probes.look(now_s)) if self._probes is not None else GpuReading()

    def notes(self) -> list[str]:
        """Return sentences about readings that were not available so far, with the reason."""
        notes = list(self._remarks)
        if self._probes is not None:
            for why, labels in self._probes.missing.items():
                notes.append(f"{self._name} gives no {', '.join(labels)}: {why}")
            if self._probes.lost is not None:
                notes.append(f"{self._name} stopped answering: {self._probes.lost}")
        return notes

    def _open(self, visible_gpus: str | None, local_rank: int) -> None:
        gpus = self._nvml.gpus()
        uuid = uuid_of_rank(visible_gpus, local_rank, gpus)
        if uuid is None:
            seen = f"NVML lists {len(gpus)}, CUDA_VISIBLE_DEVICES is {visible_gpus!r}"
            self._remarks.append(f"no GPU figures: CUDA shows this rank no GPU ({seen})")
            return
        device, whole = self._nvml.handles(uuid)
        gpu = next(gpu for gpu in gpus if uuid in (gpu.uuid, *(one.uuid for one in gpu.instances)))
        self.uuid, self._name = gpu.uuid, gpu.name
        self._probes = GpuProbes(self._nvml.library, device, whole)
        if uuid != gpu.uuid:
            self._name = f"a MIG device of {gpu.name}"
            for label in ("utilization", "process utilization"):
                self._probes.leave_out(label, "NVML has none in MIG mode")
            self._remarks.append(
                f"{self._name}: clock, power, energy, temperature, PCIe and NVLink are the whole GPU's"
            )
        if not _in_host_pid_namespace():
            for label in ("process utilization", "process memory"):
                self._probes.leave_out(label, "the driver numbers processes as the host does")


def _in_host_pid_namespace() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _HOST_PID_NAMESPACE
    except OSError:
        return False
