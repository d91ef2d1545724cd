"""One rank of bench.gpu.check: `check_worker ROWS.json all|small|leave|hang`.

It verifies collectives of device arrays, then measures them, with much or little data; or it ends while a sum
is under way; or it waits for one that another rank never begins.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import hvpipe
from bench.gpu.measure import MeasuredBucket, Measurement
from bench.gpu.rows import Rows
from bench.gpu.sizes import SMALL, Sizes
from bench.gpu.verify import Verification
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import DeadlineError
from hvpipe.session import current

if TYPE_CHECKING:
    from bench.gpu.torch_gpu import TorchGpu

COUNT = 1_000_000  # elements of a sum that does not end as usual
MOST_CLOSE_S = 5.0
HANG_PATIENCE_S = 30.0


def check(engine: EngineClient, gpu: TorchGpu, sizes: Sizes, path: Path) -> bool:
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
        parts.append(measurement.measure_overlap)
    parts.append(measurement.measure_all_reduce)
    if hvpipe.size() > 1:  # last: an error ends the engine
        parts += [verification.verify_messages, verification.verify_group_sums]
    for part in parts:
        rows.part(part)
    rows.part(partial(close, rows))
    return not rows.failed


def close(rows: Rows) -> None:
    """Close the engine, and with it NCCL's communicators, which wait for all ranks."""
    begin_s = time.monotonic()
    hvpipe.shutdown()
    taken_s = time.monotonic() - begin_s
    rows.note("close", f"{taken_s:.1f} s (wanted: {MOST_CLOSE_S:g})", rows.judged(taken_s <= MOST_CLOSE_S))


def leave(engine: EngineClient, gpu: TorchGpu, path: Path) -> None:
    """End with sums under way that nobody collects."""
    rows = Rows(path, judged=True)
    bucket = MeasuredBucket(engine, gpu, "left", [COUNT])
    bucket.begin()
    bucket.submit()
    close(rows)
    gpu.synchronize()
    rows.note("sums under way at the end", "ended", True)


def hang(engine: EngineClient, gpu: TorchGpu, path: Path) -> None:
    """Let rank 0 alone begin a sum. It must get an error in time, and its GPU must be free again."""
    rows = Rows(path, judged=True)
    bucket = MeasuredBucket(engine, gpu, "hangs", [COUNT])
    hvpipe.barrier()
    bucket.begin()
    begin_s = time.monotonic()
    if hvpipe.rank() > 0:
        time.sleep(2 * HANG_PATIENCE_S)  # rank 0 ends the job before that
        os._exit(1)
    bucket.submit()
    try:
        bucket.collect()
        rows.note("a sum that hangs", "FAILED: it ended", False)
    except DeadlineError as error:
        gpu.synchronize()
        taken_s = time.monotonic() - begin_s
        good = taken_s <= HANG_PATIENCE_S
        rows.note("a sum that hangs", f"ended after {taken_s:.1f} s: {error}", good)


def main(open_gpu: Callable[[int], TorchGpu]) -> None:
    """Run as one rank. `open_gpu` takes the local rank."""
    path, what = Path(sys.argv[1]), sys.argv[2]
    hvpipe.init()  # bench.gpu.check sets HVPIPE_TIMEOUT
    gpu, engine = open_gpu(hvpipe.local_rank()), current().engine
    if what in ENDINGS:
        engine.use_device()
        return ENDINGS[what](engine, gpu, path)
    sys.exit(not check(engine, gpu, SMALL if what == "small" else Sizes(), path))


ENDINGS: dict[str, Callable[[EngineClient, TorchGpu, Path], None]] = {"leave": leave, "hang": hang}


if __name__ == "__main__":
    from bench.gpu.torch_gpu import TorchGpu

    main(TorchGpu)
