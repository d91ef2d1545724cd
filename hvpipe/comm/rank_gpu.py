"""The GPU of a rank: chooses it, opens it in the engine, and finds NCCL to move its data."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from hvpipe.comm.native import REBUILD, cuda_library, import_native
from hvpipe.comm.settings import Settings
from hvpipe.errors import HvpipeError
from hvpipe.log import logger


def assign_gpu(local_rank: int, local_size: int, visible: int) -> int:
    """Choose the GPU of a rank: the one with the rank's local number, or the only one.

    Args:
        local_rank: This rank's number among the ranks of its host.
        local_size: The number of ranks on this host.
        visible: The number of GPUs that this process sees.

    Returns:
        The ordinal of the GPU among the visible ones.

    Raises:
        HvpipeError: If the host has more ranks than GPUs.
    """
    if visible >= local_size:
        return local_rank
    if visible == 1:
        return 0  # The launcher gave each rank its own GPU, or ranks share one: NCCL tells when it starts.
    raise HvpipeError(
        "Each rank should have its own GPU: start at most as many ranks on a host as it has GPUs. "
        f"Received: {local_size} ranks on this host, {visible} GPUs visible (CUDA_VISIBLE_DEVICES)"
    )


def find_nccl(named: str) -> str:
    """Return the library to load NCCL from, or "" for no NCCL.

    Args:
        named: HVPIPE_NCCL_LIBRARY: a path, "none", or "" to look for it. Then the NVIDIA wheel's library
            comes before the system's.
    """
    if named:
        return "" if named == "none" else named
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            return str(library)
    return "libnccl.so.2"


def has_gpu_library(settings: Settings) -> bool:
    """Tell whether hvpipe was built with its GPU library, or the settings name another one."""
    return bool(settings.device_library) or cuda_library().exists()


def open_gpu(core: Any, settings: Settings, ordinal: int | None) -> str:
    """Open this rank's GPU and, between several ranks, NCCL. All ranks call it together, once.

    Args:
        core: The C++ engine.
        settings: The settings of rank 0, the same on all ranks.
        ordinal: Number of the GPU among those that CUDA_VISIBLE_DEVICES shows; None for the local rank's.

    Returns:
        The route of data on GPUs, for people: "by NCCL ..." or "through the host ..." with the reason.
    """
    library = settings.device_library or str(cuda_library())
    if ordinal is None:
        visible = import_native().count_devices(library)
        ordinal = assign_gpu(core.local_rank, core.local_size, visible)
    required = settings.nccl_library not in ("", "none")
    nccl = find_nccl(settings.nccl_library)
    route = str(
        core.use_device(*(library, ordinal, nccl, required, settings.gpus_may_be_shared, settings.nccl_span))
    )
    # A warning only if NCCL was wanted: a user who set HVPIPE_NCCL_LIBRARY=none asked for the host.
    slow = route.startswith("through the host") and settings.nccl_library != "none"
    level = logging.WARNING if slow and core.local_rank == 0 else logging.INFO
    logger.log(level, "hvpipe: data on GPUs goes %s", route)
    return route


def warn_of_missing_gpu_library() -> None:
    """Log that gradients take the slow route through host memory, and how to change that."""
    logger.warning(
        "hvpipe was built without its GPU library: gradients go from the GPU through ordinary host "
        "memory to MPI, which is slow. To use NCCL, rebuild with CUDA's compiler (nvcc on PATH), %s",
        REBUILD,
    )
