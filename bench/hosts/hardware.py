"""The hardware of a host that an evaluation ran on, without its name.

``python -m bench.hosts.hardware FILE`` prints it as JSON, and whether the host sees a file.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvpipe import __version__
from hvpipe.environment.this_host import cpu_name


@dataclass(frozen=True)
class HostHardware:
    """Hardware and software of a host, one line each for people."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    hvpipe: str

    def describe(self) -> str:
        memory = f"{self.memory_bytes / (1 << 30):.0f} GB"
        return f"{self.cores} cores ({self.cpu}), {memory}, {self.system}, Python {self.python}"


def describe_hardware() -> HostHardware:
    return HostHardware(
        cpu_name(),
        os.cpu_count() or 1,
        psutil.virtual_memory().total,
        f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        platform.python_version(),
        __version__,
    )


if __name__ == "__main__":
    mine = describe_hardware()
    seen = Path(sys.argv[1]).exists()
    print(json.dumps({"cores": mine.cores, "machine": mine.describe(), "sees": seen}))
