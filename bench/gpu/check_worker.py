"""One rank of bench.gpu.check: verifies collectives of device arrays, then measures them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import hvpipe
from bench.gpu.measure import Measurement
from bench.gpu.rows import Rows
from bench.gpu.sizes import SMALL, Sizes
from bench.gpu.verify import Verification
from hvpipe.comm.engine import Engine
from hvpipe.session import current

if TYPE_CHECKING:
    from bench.gpu.torch_gpu import TorchGpu


def check(engine: Engine, gpu: TorchGpu, sizes: Sizes, path: Path) -> bool:
    """Verify and measure on one rank. Return whether all parts could be done here.

    A part that fails does not stop the others. Without a device there are none.
    """
    rows = Rows(path, judged=sizes.judged)
    seed = int(hvpipe.broadcast_object(int.from_bytes(np.random.default_rng().bytes(4), "little")))

    def prepare() -> None:
        way = engine.use_device()
        if hvpipe.size() > 1:
            rows.way = ", NCCL" if way.startswith("by NCCL") else ", host"
        rows.note("data goes", way)
        rows.note("device", gpu.name)
        rows.note("seed of the numbers", str(seed))

    rows.part(prepare)
    if rows.failed:
        return False
    verification = Verification(engine, gpu, sizes, rows, seed)
    measurement = Measurement(engine, gpu, sizes, rows)
    parts = [
        verification.verify_all_reduce,
        verification.verify_broadcast,
        verification.verify_side_stream,
        verification.verify_steps,
    ]
    if hvpipe.size() == 1:
        parts += [verification.verify_faces, measurement.measure_packing, measurement.measure_sampler]
    else:
        parts += [verification.verify_messages, verification.verify_group_sums, measurement.measure_overlap]
    for part in [*parts, measurement.measure_all_reduce]:
        rows.part(part)
    return not rows.failed


def main(open_gpu: Callable[[int], TorchGpu]) -> None:
    """Run as one rank: `check_worker ROWS.json [small]`. `open_gpu` takes the local rank."""
    hvpipe.init()  # bench.gpu.check sets HVPIPE_TIMEOUT
    gpu = open_gpu(hvpipe.local_rank())
    sizes = SMALL if sys.argv[2:] == ["small"] else Sizes()
    done = check(current().engine, gpu, sizes, Path(sys.argv[1]))
    hvpipe.shutdown()
    sys.exit(not done)


if __name__ == "__main__":
    from bench.gpu.torch_gpu import TorchGpu

    main(TorchGpu)
