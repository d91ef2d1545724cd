"""Measures packing, all-reduces, overlap and the sampler on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import hvpipe
from bench.gpu.rows import Rows
from bench.gpu.sizes import Sizes
from hvpipe.engine.engine import Compression, EngineClient
from hvpipe.monitor.utilization import Sampler, SamplerOptions
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current

if TYPE_CHECKING:
    from bench.gpu.torch_gpu import TorchGpu

TENSORS = 40  # in a bucket whose packing is measured

# A figure that falls short of these fails the check, like a wrong sum.
LEAST_COPY_SHARE = 0.85  # of the device's own copy, by pack and unpack
LEAST_HIDDEN = 0.90  # of a reduce by NCCL, behind products on a GPU of the rank's own
LEAST_JUDGED_BYTES = 64_000_000  # of gradients: launching a smaller copy takes a good part of its time
MOST_SAMPLER_CORES = 0.01


class Measurement:
    """What one rank measures: a row for each figure."""

    def __init__(self, engine: EngineClient, gpu: TorchGpu, sizes: Sizes, rows: Rows) -> None:
        self._engine, self._gpu, self._sizes, self._rows = engine, gpu, sizes, rows

    def _median_s(self, ready: Callable[[], object], work: Callable[[], None]) -> float:
        """Return the seconds of `work` on the device, without the first round. `ready` runs before it."""
        times = []
        for _ in range(self._sizes.rounds):
            self._gpu.synchronize()
            ready()
            begin = self._gpu.mark()
            work()
            times.append(self._gpu.elapsed_s(begin, self._gpu.mark()))
        return statistics.median(times[1:])

    def measure_packing(self) -> None:
        """Measure pack and unpack, also cast and scaled, against the device's own copy of as many bytes."""
        for megabytes in self._sizes.megabytes:
            counts = [megabytes * 1_000_000 // 4 // TENSORS] * TENSORS
            for compression in (None, "bf16", "fp16"):
                self._measure_pack(f"{megabytes} MB", counts, compression)
        for compression in (None, "bf16"):
            self._measure_pack("ResNet-50's gradients", self._sizes.gradients, compression)

    def _measure_pack(self, what: str, counts: Sequence[int], compression: Compression) -> None:
        """Measure float32 gradients of these counts in one bucket, which is half as large if compressed."""
        gpu, count = self._gpu, sum(counts)
        name = f"{what} as {compression}, scaled" if compression else what
        bucket = MeasuredBucket(self._engine, gpu, f"pack {name}", counts, compression)
        source, target = (gpu.put(np.ones(count), "float32") for _ in range(2))
        copy_s = self._median_s(gpu.hold, lambda: gpu.copy(target, source))
        moved_bytes = (4 + (2 if compression else 4)) * count
        for half, taken_s in zip(("pack", "unpack"), self._halves_s(bucket), strict=True):
            rate = moved_bytes / taken_s / 1e9
            share = copy_s * moved_bytes / (8 * count) / taken_s
            self._rows.note(
                f"{half} {name}",
                f"{rate:.0f} GB/s, {share:.0%} of a copy's (wanted: {LEAST_COPY_SHARE:.0%})",
                self._rows.judged(share >= LEAST_COPY_SHARE) if 4 * count >= LEAST_JUDGED_BYTES else None,
                gb_per_s=rate,
                share=share,
            )

    def _halves_s(self, bucket: MeasuredBucket) -> tuple[float, float]:
        """Return the seconds of packing and unpacking on the device, with the host ahead of it."""
        gpu = self._gpu
        packs, unpacks = [], []
        for _ in range(self._sizes.rounds):
            bucket.begin()
            gpu.synchronize()
            gpu.hold()
            begin = gpu.mark()
            bucket.submit()
            middle = gpu.mark()
            bucket.collect()
            end = gpu.mark()
            packs.append(gpu.elapsed_s(begin, middle))
            unpacks.append(gpu.elapsed_s(middle, end))
        return statistics.median(packs[1:]), statistics.median(unpacks[1:])

    def measure_all_reduce(self) -> None:
        """Measure bandwidth as nccl-tests defines it: 2 (n - 1) / n of the bytes over the time of a call."""
        size = hvpipe.size()
        for megabytes in self._sizes.megabytes:
            array = self._gpu.put(np.ones(megabytes * 250_000), "float32")

            def work(array: Any = array) -> None:
                self._engine.allreduce(array, op="average", out=array)

            taken_s = self._median_s(hvpipe.barrier, work)
            bus = 2 * (size - 1) / size * megabytes * 1e6 / taken_s / 1e9
            self._rows.note(
                f"all-reduce {megabytes} MB",
                f"{taken_s * 1e3:.2f} ms" + (f", bus {bus:.1f} GB/s" if size > 1 else ""),
                taken_s=taken_s,
                bus_gb_per_s=bus,
            )

    def measure_overlap(self) -> None:
        """Measure how much of a bucket's reduce a stream of matrix products hides, and how it slows them."""
        megabytes = self._sizes.overlapped_megabytes
        bucket = MeasuredBucket(self._engine, self._gpu, "overlap", [megabytes * 250_000])
        repeats = 20

        def begin() -> None:
            bucket.begin()
            hvpipe.barrier()

        def reduce() -> None:
            bucket.submit()
            bucket.collect()

        def products() -> None:
            for _ in range(repeats):
                self._gpu.multiply()

        def both() -> None:
            bucket.submit()
            products()
            bucket.collect()

        reduce_s = self._median_s(begin, reduce)
        once_s = self._median_s(hvpipe.barrier, products)
        repeats = max(hvpipe.allgather_object(max(repeats, int(repeats * 2 * reduce_s / once_s))))
        products_s = self._median_s(hvpipe.barrier, products)
        both_s = self._median_s(begin, both)
        hidden = (products_s + reduce_s - both_s) / reduce_s
        slowed = both_s / products_s - 1
        # Two ranks on one GPU share its products and links, and MPI uses those of the host.
        meant = self._rows.way == ", NCCL" and not current().settings.gpus_may_be_shared
        self._rows.note(
            f"overlap, {megabytes} MB",
            f"products {products_s * 1e3:.2f} ms, reduce {reduce_s * 1e3:.2f} ms, both {both_s * 1e3:.2f} ms"
            f": {hidden:.0%} hidden (wanted: {LEAST_HIDDEN:.0%}), products slowed by {slowed:.0%}",
            self._rows.judged(hidden >= LEAST_HIDDEN) if meant else None,
            products_s=products_s,
            reduce_s=reduce_s,
            both_s=both_s,
            hidden=hidden,
            slowed=slowed,
        )

    def measure_sampler(self) -> None:
        """Measure what sampling the GPU 10 times a second costs while it computes."""
        visible = current().settings.visible_gpus
        with Sampler(options=SamplerOptions(visible_gpus=visible)) as sampler:
            end_s = time.monotonic() + self._sizes.sampled_s
            while time.monotonic() < end_s:
                self._gpu.multiply()
                self._gpu.synchronize()
        found = sampler.summary()
        cores = found.sampler_cores or 0.0
        rate = found.samples / self._sizes.sampled_s
        busy = "no figures of the GPU" if found.gpu_share is None else f"GPU busy {found.gpu_share:.0%}"
        self._rows.note(
            "sampler (NVML)",
            f"{cores:.2%} of a core (wanted: {MOST_SAMPLER_CORES:.0%}), {rate:.1f} looks/s, {busy}",
            self._rows.judged(cores <= MOST_SAMPLER_CORES),
            cores=cores,
            looks_per_s=rate,
        )
        if sampler.notes():
            self._rows.note("not sampled", "; ".join(sampler.notes()))


class MeasuredBucket:
    """A plan of one bucket of float32 tensors. Each step is begun, submitted and collected.

    With compression the tensors are also scaled by a half. Without, numbers go through unchanged.
    """

    def __init__(
        self,
        engine: EngineClient,
        gpu: TorchGpu,
        name: str,
        counts: Sequence[int],
        compression: Compression = None,
    ) -> None:
        layers = [Gradient(str(i), (n,), "float32") for i, n in enumerate(counts)]
        plan = plan_buckets(layers, 1 << 40, compression)
        self._engine = engine
        self._scale = 0.5 if compression else 1.0
        self._plan_id = engine.add_plan(name, plan, on_device=True)
        self._tensors = [gpu.put(np.ones(counts[i]), "float32") for i in plan.buckets[0].members]
        self._step = 0

    def begin(self) -> None:
        self._engine.native.begin_step(self._plan_id, self._step, 1.0, True)
        self._step += 1

    def submit(self) -> None:
        self._engine.submit_on_device(self._plan_id, 0, self._tensors, self._scale)

    def collect(self) -> None:
        self._engine.collect_on_device(self._plan_id, 0, self._tensors)
