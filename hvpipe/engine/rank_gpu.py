"""The GPU of a rank: chooses it, opens it in the engine, and finds NCCL to move its data."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from hvpipe.environment.native import cuda_library, import_native
from hvpipe.environment.settings import Settings
from hvpipe.errors import HvpipeError, listed
from hvpipe.log import logger

_MADE_BY_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one in WSL 2
_NO_GPU, _GPU = 0.0, 1.0  # what a rank tells the others


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
        return 0  # each rank has its own from the launcher, or they share one: nccl_setup.cc finds out
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


def may_have_gpu(settings: Settings) -> bool:
    """Tell whether this process may find a GPU of NVIDIA's. Asks no driver, which would fix its devices."""
    if settings.device_library:
        return True
    first = (settings.visible_gpus or "all").split(",")[0].strip()
    hidden = settings.visible_gpus == "" or first in ("", "-1", "NoDevFiles")
    return not hidden and any(os.path.exists(path) for path in _MADE_BY_DRIVERS)


def open_gpu(core: Any, settings: Settings, ordinal: int | None) -> tuple[bool, str]:
    """Open this rank's GPU and, between several ranks, NCCL. All ranks call it together, once.

    Args:
        core: The C++ engine.
        settings: The settings of rank 0, the same on all ranks.
        ordinal: Number of the GPU among those that CUDA_VISIBLE_DEVICES shows; None for the local rank's.

    Returns:
        Whether all ranks opened their GPUs, and the route of data on GPUs, for people: "by NCCL ..." or
        "through the host ..." with the reason. If they did not: which rank could not,
        and why. The same on all ranks.

    Raises:
        HvpipeError: If HVPIPE_NCCL_LIBRARY names an NCCL that not all ranks can use.
        PeerError: If that NCCL does not start.
    """
    library = settings.device_library or str(cuda_library())
    refusal = ""
    if ordinal is None:
        try:
            visible = import_native().count_devices(library)
            ordinal = assign_gpu(core.local_rank, core.local_size, visible)
        except HvpipeError as error:
            refusal = str(error)
    required = settings.nccl_library not in ("", "none")
    opened, text = core.use_device(
        *(library, ordinal or 0, find_nccl(settings.nccl_library), required),
        *(settings.gpus_may_be_shared, refusal),
    )
    if opened:
        # A warning only if NCCL was wanted: a user who set HVPIPE_NCCL_LIBRARY=none asked for the host.
        slow = text.startswith("through the host") and settings.nccl_library != "none"
        level = logging.WARNING if slow and core.rank == 0 else logging.INFO
        logger.log(level, "hvpipe: data on GPUs goes %s", text)
    return opened, text


def open_gpus_of_all(core: Any, settings: Settings, ordinal: int | None, route: str | None) -> str | None:
    """Open the GPUs of all ranks for their gradients, if each rank can open its own; collective.

    If not, rank 0 warns of the rank that cannot. It does not if no rank has a GPU.

    Args:
        core: The C++ engine.
        settings: The settings of rank 0, the same on all ranks.
        ordinal: As for `open_gpu`, of the GPU that holds this rank's gradients; None if host memory does.
        route: Of data on GPUs, if `open_gpu` has opened them before.

    Returns:
        The route of data on GPUs; None if gradients go through host memory.

    Raises:
        HvpipeError: If HVPIPE_NCCL_LIBRARY names an NCCL, and not all ranks can use their GPUs.
    """
    mine = _NO_GPU if ordinal is None else _GPU
    found = core.agree("GPUs of all ranks", mine)
    if set(found) == {_NO_GPU}:
        return None
    if set(found) == {_GPU}:
        opened, why = (True, route) if route is not None else open_gpu(core, settings, ordinal)
        if opened:
            return why
    else:
        without = [str(rank) for rank, each in enumerate(found) if each != _GPU]
        why = f"ranks {listed(without)} of {len(found)} have no GPU that TensorFlow sees"
    if settings.nccl_library not in ("", "none"):
        raise HvpipeError(f"HVPIPE_NCCL_LIBRARY needs a GPU that works on every rank. Received: {why}")
    if core.rank == 0:
        logger.warning(
            "hvpipe: every rank should open its GPU; until then gradients go from the GPU through ordinary "
            "host memory to MPI, which is slow. Received: %s",
            why,
        )
    return None
