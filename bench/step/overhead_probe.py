"""One fresh process that trains a few steps and measures tracing and memory; see overhead.py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bench.metrics import median
from bench.training.image_model import (
    ImageWorkload,
    compiled_model,
    gradient_bytes,
    images,
    prepare_tensorflow,
    timed_fit,
)

_STEPS = 5


def _memory_bytes(name: str, source: str) -> int:
    for line in Path(source).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{source} must have a line {name}. Received: none")


def _own_bytes() -> int:
    """Return the memory now, without mapped files (libraries) and with a part of shared pages."""
    source = "/proc/self/smaps_rollup"
    return _memory_bytes("Pss_Anon", source) + _memory_bytes("Pss_Shmem", source)


def probe(workload: ImageWorkload, system: str, rank: int) -> dict[str, float]:
    """Train under plain Keras or in an overlap mode of hvpipe. Return seconds and bytes of this process."""
    keras = prepare_tensorflow(workload.threads)
    if system != "plain":
        import hvpipe
        import hvpipe.keras as hk

        hvpipe.init()
        model = hk.data_parallel(compiled_model(keras, workload), overlap=system)
    else:
        model = compiled_model(keras, workload)
    data = images(workload, rank)
    start_s = time.perf_counter()
    step_s, _ = timed_fit(keras, model, data, 1)
    first_fit_s = time.perf_counter() - start_s
    later_s = timed_fit(keras, model, data, _STEPS)[0]
    if system != "plain":
        hvpipe.barrier()  # pages shared with a rank that has already ended would count as this one's alone
    return {
        "trace_s": step_s[0] - median(later_s),
        "first_fit_s": first_fit_s,
        "step_s": median(later_s),
        "peak_bytes": _memory_bytes("VmHWM", "/proc/self/status"),
        "own_bytes": _own_bytes(),
        "gradient_bytes": gradient_bytes(model),
    }


if __name__ == "__main__":
    from hvpipe.comm.discover import discover

    rank = discover().rank or 0
    found = probe(ImageWorkload(**json.loads(sys.argv[1])), sys.argv[2], rank)
    Path(sys.argv[3], f"{rank}.json").write_text(json.dumps(found))
