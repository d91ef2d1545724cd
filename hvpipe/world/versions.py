"""Versions: those that hvpipe works with, and a check that all ranks run the same ones."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvpipe.errors import InitError

if TYPE_CHECKING:
    from hvpipe.world.world import World

# hvpipe was tried with these and with those between. A newer one may do, unless it lacks a private name.
OLDEST_KERAS = "3.12.0"
NEWEST_KERAS = "3.15.1"

_PACKAGES = {"hvpipe": "hvpipe", "TensorFlow": "tensorflow", "Keras": "keras"}


def check_same_versions(world: World) -> None:
    """Raise InitError, on all ranks, if the versions of two ranks differ; collective."""
    if world.size == 1:
        return
    everyone = world.allgather_object((world.host, own_versions()))
    if differs := difference([(host, dict(versions)) for host, versions in everyone]):
        raise InitError(
            "All ranks should run the same versions: install them on all hosts, and let all ranks use that "
            f"Python. Received: {differs}"
        )


def own_versions() -> dict[str, str]:
    """Return the versions of this process, by name; of TensorFlow and Keras, if they are imported."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name, module in _PACKAGES.items():
        version = getattr(sys.modules.get(module), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def difference(everyone: Sequence[tuple[str, dict[str, str]]]) -> str:
    """Say which two ranks differ, and in what; "": none do. A rank has no version of what it did not import.

    Args:
        everyone: The host and the versions, by rank.
    """
    for name in dict.fromkeys(name for _, versions in everyone for name in versions):
        having = [(rank, host, v[name]) for rank, (host, v) in enumerate(everyone) if name in v]
        first, *others = having
        for other in others:
            if other[2] != first[2]:
                one, two = (f"{version} on rank {rank} ({host})" for rank, host, version in (first, other))
                return f"{name} {one}, and {two}"
    return ""


def is_older(version: str, least: str) -> bool:
    """Return whether the first two numbers of a version are less than those of `least`."""
    first, second = ([int(number) for number in re.findall(r"\d+", text)[:2]] for text in (version, least))
    return first < second
