"""The program of each rank of `hvpipe tune`: times all-reduces by each algorithm; rank 0 writes the file."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median

import numpy as np

from hvpipe import collectives, session
from hvpipe.engine.engine import EngineClient
from hvpipe.specs.tuning import ALGORITHMS, Tuning, carrier, setting

_SIZES = tuple(1 << power for power in range(10, 25, 2))  # 1 KB to 16 MB
_SAMPLES, _SAMPLE_S = 7, 0.02
_MPI = "mpi"  # which only MPI's own network has


def main(path: str) -> None:
    """Measure, print a table, and write the file; collective."""
    session.init()
    joined = session.current()
    world, hosts, settings = joined.world, joined.hosts, joined.settings
    if 1 < hosts < world.size:
        if world.rank == 0:
            print(
                "hvpipe tune: Each host should have one rank: only these meet on the network. Give hosts "
                f"without slots, as in --hosts a,b. Received: {world.size} ranks on {hosts} hosts",
                file=sys.stderr,
            )
        raise SystemExit(2)
    names = [name for name in ALGORITHMS if name != _MPI or world.network.startswith("MPI")]
    settings = replace(settings, flight_path="")  # the session's engine has the recorder
    engines = {name: EngineClient(world, replace(settings, algorithms=((name, 0),))) for name in names}
    seconds = {size: _measured(engines, size) for size in _SIZES}
    if world.rank == 0:
        found = Tuning(world.size, carrier(world.network, world.messages, hosts), seconds)
        _print(found)
        found.write(path)
        print(f"written: {path}; use it with HVPIPE_ALL_REDUCE={path}")
        if hosts == 1:
            print("On one host it has an effect only with HVPIPE_SHARED_MEMORY=0.")
    for engine in engines.values():
        engine.stop()
    session.shutdown()


def _measured(engines: dict[str, EngineClient], size: int) -> dict[str, float]:
    """Return the median time of the slowest rank by algorithm, which take turns."""
    array, out = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32)
    world = session.current().world

    def sample(engine: EngineClient, times: int) -> float:
        collectives.barrier()
        begun = time.perf_counter()
        for _ in range(times):
            engine.allreduce(array, op="sum", out=out)
        return float(max(world.allgather_object((time.perf_counter() - begun) / times)))

    times = {name: max(1, int(_SAMPLE_S / sample(engine, 2))) for name, engine in engines.items()}
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(_SAMPLES):
        for name, engine in engines.items():
            samples[name].append(sample(engine, times[name]))
    return {name: median(each) for name, each in samples.items()}


def _print(found: Tuning) -> None:
    names = list(next(iter(found.seconds.values())))
    print("      bytes" + "".join(f"{name:>12}" for name in names) + "   (us)")
    for size, each in found.seconds.items():
        print(f"{size:11d}" + "".join(f"{each[name] * 1e6:12.1f}" for name in names))
    print(f"fastest: {setting(found.algorithms)}")


if __name__ == "__main__":
    main(sys.argv[1])
