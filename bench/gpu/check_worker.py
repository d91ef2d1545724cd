"""One rank of bench.gpu.check: verifies collectives of device arrays, then measures them."""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hvpipe
from bench.gpu.interface import GpuUnderTest, Numbers
from hvpipe.comm.engine import Compression, Engine
from hvpipe.monitor.utilization import Sampler, SamplerOptions
from hvpipe.plan.buckets import WIRE_DTYPE, Gradient, plan_buckets
from hvpipe.session import current

# Of the largest sum of absolute values: a few roundings of the type that travels.
TOLERANCE = {"float32": 1e-6, "float64": 1e-14, "float16": 4e-3, "bfloat16": 3e-2}
TENSORS = 40  # in a bucket whose packing is measured

# What is wanted of the figures; one that falls short is as wrong as a wrong sum.
LEAST_COPY_SHARE = 0.85  # of the device's own copy, by pack and unpack
LEAST_HIDDEN = 0.90  # of a reduce by NCCL, behind products on a GPU of the rank's own
MOST_SAMPLER_CORES = 0.01


def _resnet50() -> list[int]:
    """Elements of ResNet-50's gradients (He et al. 2015), as keras.applications has it: 214, 25.6 million."""
    counts = [7 * 7 * 3 * 64, 64, 64, 64]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels = [before * width, 9 * width * width, width * 4 * width]
            if block == 0:
                kernels.insert(0, before * 4 * width)
            widths = [*([4 * width] if block == 0 else []), width, width, 4 * width]
            for kernel, out in zip(kernels, widths, strict=True):
                counts += [kernel, out, out, out]  # with a bias, and normalization's scale and offset
            before = 4 * width
    return [*counts, 2048 * 1000, 1000]


RESNET50 = tuple(_resnet50())


@dataclass(frozen=True)
class Sizes:
    """How much is verified and measured: elements, megabytes (10^6 bytes), rounds, seconds."""

    counts: tuple[int, ...] = (1, 7, 4096, 1_000_003)
    largest: int = 250_000
    megabytes: tuple[int, ...] = (4, 16, 64, 256)
    gradients: tuple[int, ...] = RESNET50
    overlapped_megabytes: int = 64
    rounds: int = 11
    sampled_s: float = 5.0
    judged: bool = True  # whether figures are held against what is wanted


SMALL = Sizes((1, 7, 4097), 20_000, (1,), RESNET50[:24], 1, 3, 1.0, judged=False)


class Check:
    """What one rank verifies and measures; rank 0 keeps the rows so far in a file.

    `failed` says that a part of it could not be done on this rank.
    """

    def __init__(self, engine: Engine, gpu: GpuUnderTest, sizes: Sizes, path: Path) -> None:
        self._engine, self._gpu, self._sizes, self._path = engine, gpu, sizes, path
        self._rows: list[dict[str, object]] = []
        self._way = ""
        self.failed = False
        self._seed = int(hvpipe.broadcast_object(int.from_bytes(np.random.default_rng().bytes(4), "little")))

    def run(self) -> None:
        """Every part, whatever becomes of the others; none without a device."""
        self._part(self._prepare)
        if self.failed:
            return
        for part in (
            self._verify_all_reduce,
            self._verify_broadcast,
            self._verify_side_stream,
            self._verify_steps,
        ):
            self._part(part)
        if hvpipe.size() == 1:
            for part in (self._verify_faces, self._measure_packing, self._measure_sampler):
                self._part(part)
        else:
            for part in (self._verify_messages, self._measure_messages, self._measure_overlap):
                self._part(part)
        self._part(self._measure_all_reduce)

    def _part(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            name = part.__name__.strip("_").replace("_", " ")
            self._note(name, f"FAILED: {type(error).__name__}: {error}", ok=False)

    def _note(self, what: str, result: str, ok: bool | None = None, **figures: float) -> None:
        """A row; `ok` is None where there is nothing to be right or wrong."""
        ranks = f"{hvpipe.size()} rank{'s' if hvpipe.size() > 1 else ''}{self._way}"
        self._rows.append({"what": f"{ranks}: {what}", "result": result, "ok": ok, "figures": figures})
        if hvpipe.rank() == 0:
            self._path.write_text(json.dumps(self._rows))

    def _judged(self, good: bool) -> bool | None:
        return good if self._sizes.judged else None

    def _verified(self, what: str, errors: Sequence[float], tolerance: float) -> None:
        """A row for the largest error of any rank."""
        error = max(hvpipe.allgather_object(max(errors)))
        self._note(what, f"error {error:.1e}", error <= tolerance, error=error, tolerance=tolerance)

    def _prepare(self) -> None:
        way = self._engine.use_device()
        if hvpipe.size() > 1:
            self._way = ", NCCL" if way.startswith("by NCCL") else ", host"
        self._note("data goes", way)
        self._note("device", self._gpu.name)
        self._note("seed of the numbers", str(self._seed))

    def _terms(self, count: int, dtype: str, *key: int) -> tuple[Any, Numbers]:
        """This rank's random device array, and what all ranks have, [ranks, count]."""
        arrays = [
            self._gpu.put(np.random.default_rng([self._seed, *key, r]).standard_normal(count), dtype)
            for r in range(hvpipe.size())
        ]
        return arrays[hvpipe.rank()], np.stack([self._gpu.get(array) for array in arrays])

    def _poisoned(self, count: int, dtype: str) -> Any:
        return self._gpu.put(np.full(count, np.nan), dtype)

    def _verify_all_reduce(self) -> None:
        for dtype, tolerance in TOLERANCE.items():
            errors = []
            for count in self._sizes.counts:
                mine, terms = self._terms(count, dtype, count)
                out = self._poisoned(count, dtype)
                self._engine.allreduce(mine, op="sum", out=out)
                errors.append(worst(self._gpu.get(out), terms))
            self._verified(f"all-reduce {dtype}", errors, tolerance)

    def _verify_broadcast(self) -> None:
        root = hvpipe.size() - 1
        array, terms = self._terms(self._sizes.counts[-1], "float32")
        self._engine.broadcast(array, root)
        self._verified("broadcast", [worst(self._gpu.get(array), terms[root:])], 0.0)

    def _verify_side_stream(self) -> None:
        """An array that is still to be made, on a stream that the default one does not wait for."""
        mine, terms = self._terms(1000, "float32")
        late, out = self._poisoned(1000, "float32"), self._poisoned(1000, "float32")
        self._gpu.synchronize()
        with self._gpu.side_stream():
            self._gpu.hold()
            self._gpu.copy(late, mine)
            self._engine.allreduce(late, op="sum", out=out)
            found = self._gpu.get(out)
        self._verified("all-reduce on a stream of its own", [worst(found, terms)], TOLERANCE["float32"])

    def _verify_faces(self) -> None:
        """Arrays that are not the library's own."""
        mine, terms = self._terms(1000, "float32")
        out = self._poisoned(1000, "float32")
        outs = self._gpu.faces(out)
        for name, array in self._gpu.faces(mine).items():
            self._gpu.copy(out, self._poisoned(1000, "float32"))
            self._engine.allreduce(array, op="sum", out=outs[name])
            self._verified(f"all-reduce of {name}", [worst(self._gpu.get(out), terms)], 0.0)

    def _verify_messages(self) -> None:
        """Arrays around the ring of ranks, all under way at once; every bit is to come."""
        before = (hvpipe.rank() - 1) % hvpipe.size()
        errors = []
        for number, dtype in enumerate(TOLERANCE):
            sent, found = [], []
            for tag, count in enumerate(self._sizes.counts):
                mine, terms = self._terms(count, dtype, number, count)
                out = self._poisoned(count, dtype)
                found.append((out, terms[before : before + 1]))
                sent += self._passed_on(mine, out, tag)
            for request in sent:
                request.wait()
            errors += [worst(self._gpu.get(out), terms) for out, terms in found]
        self._verified("messages", errors, 0.0)

    def _passed_on(self, array: Any, out: Any, tag: int = 0) -> list[Any]:
        """Requests of a message to the next rank, and of one from the rank before."""
        rank, size = hvpipe.rank(), hvpipe.size()
        received = self._engine.receive_on_device(out, (rank - 1) % size, tag, "a message")
        return [self._engine.send(array, (rank + 1) % size, tag, "a message"), received]

    def _verify_steps(self) -> None:
        """Three steps of buckets of many tensors, one of them misaligned, with and without compression."""
        counts = [self._sizes.largest, 1, 3, 1000, 4097, *[5] * 300]
        for compression in (None, "bf16", "fp16"):
            plan = plan_buckets(
                [Gradient(str(i), (n,), "float32") for i, n in enumerate(counts)], 1 << 20, compression
            )
            plan_id = self._engine.add_plan(f"steps {compression}", plan, on_device=True)
            errors = []
            for step in range(3):
                scale, _ = self._engine.core.begin_step(plan_id, step, 1.0, True)
                mine, terms = zip(
                    *(self._terms(n, "float32", step, i) for i, n in enumerate(counts)), strict=True
                )
                outs = [self._poisoned(n, "float32") for n in counts]
                # One element into a larger tensor: 4 bytes beyond what 16-byte accesses want.
                room = self._poisoned(counts[0] + 1, "float32")[1:]
                self._gpu.copy(room, mine[0])
                given = [room, *mine[1:]]
                for number, bucket in enumerate(plan.buckets):
                    self._engine.submit_on_device(plan_id, number, [given[i] for i in bucket.members], scale)
                for number, bucket in enumerate(plan.buckets):
                    self._engine.collect_on_device(plan_id, number, [outs[i] for i in bucket.members])
                errors += [
                    worst(self._gpu.get(out), scale * term) for out, term in zip(outs, terms, strict=True)
                ]
            wire = WIRE_DTYPE[compression] if compression else "float32"
            self._verified(f"steps, compression {compression}", errors, TOLERANCE[wire])

    def _median_s(self, ready: Callable[[], object], work: Callable[[], None]) -> float:
        """What `work` takes on the device, the first round left out; `ready` comes before, untimed."""
        times = []
        for _ in range(self._sizes.rounds):
            self._gpu.synchronize()
            ready()
            begin = self._gpu.mark()
            work()
            times.append(self._gpu.elapsed_s(begin, self._gpu.mark()))
        return statistics.median(times[1:])

    def _measure_packing(self) -> None:
        """Pack and unpack against the device's own copy of as many bytes, also cast and scaled."""
        for megabytes in self._sizes.megabytes:
            counts = [megabytes * 1_000_000 // 4 // TENSORS] * TENSORS
            for compression in (None, "bf16", "fp16"):
                self._measure_pack(f"{megabytes} MB", counts, compression)
        for compression in (None, "bf16"):
            self._measure_pack("ResNet-50's gradients", self._sizes.gradients, compression)

    def _measure_pack(self, what: str, counts: Sequence[int], compression: Compression) -> None:
        """Of float32 gradients of these counts, in one bucket, which has halves if compressed."""
        gpu, count = self._gpu, sum(counts)
        name = f"{what} as {compression}, scaled" if compression else what
        bucket = MeasuredBucket(self._engine, gpu, f"pack {name}", counts, compression)
        source, target = (gpu.put(np.ones(count), "float32") for _ in range(2))
        copy_s = self._median_s(gpu.hold, lambda: gpu.copy(target, source))
        moved_bytes = (4 + (2 if compression else 4)) * count
        for half, taken_s in zip(("pack", "unpack"), self._halves_s(bucket), strict=True):
            rate = moved_bytes / taken_s / 1e9
            share = copy_s * moved_bytes / (8 * count) / taken_s
            self._note(
                f"{half} {name}",
                f"{rate:.0f} GB/s, {share:.0%} of a copy's (wanted: {LEAST_COPY_SHARE:.0%})",
                self._judged(share >= LEAST_COPY_SHARE),
                gb_per_s=rate,
                share=share,
            )

    def _halves_s(self, bucket: MeasuredBucket) -> tuple[float, float]:
        """What packing and unpacking take on the device, the host being ahead of it."""
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

    def _measure_all_reduce(self) -> None:
        """Bandwidth as nccl-tests defines it: 2 (n - 1) / n of the bytes in the time of a call."""
        size = hvpipe.size()
        for megabytes in self._sizes.megabytes:
            array = self._gpu.put(np.ones(megabytes * 250_000), "float32")

            def work(array: Any = array) -> None:
                self._engine.allreduce(array, op="average", out=array)

            taken_s = self._median_s(hvpipe.barrier, work)
            bus = 2 * (size - 1) / size * megabytes * 1e6 / taken_s / 1e9
            self._note(
                f"all-reduce {megabytes} MB",
                f"{taken_s * 1e3:.2f} ms" + (f", bus {bus:.1f} GB/s" if size > 1 else ""),
                taken_s=taken_s,
                bus_gb_per_s=bus,
            )

    def _measure_messages(self) -> None:
        """What each rank sends to the next one, while it receives as much."""
        for megabytes in self._sizes.megabytes:
            array = self._gpu.put(np.ones(megabytes * 250_000), "float32")
            out = self._gpu.put(np.ones(megabytes * 250_000), "float32")

            def work(array: Any = array, out: Any = out) -> None:
                for request in self._passed_on(array, out):
                    request.wait()

            taken_s = self._median_s(hvpipe.barrier, work)
            rate = megabytes * 1e6 / taken_s / 1e9
            self._note(
                f"messages of {megabytes} MB",
                f"{taken_s * 1e3:.2f} ms, {rate:.1f} GB/s each way",
                taken_s=taken_s,
                gb_per_s=rate,
            )

    def _measure_overlap(self) -> None:
        """A stream of matrix products slowed by a bucket's reduce, and how much of the reduce it hides."""
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
        # Two ranks on one GPU have its products and its links in common, and MPI has the host's.
        meant = self._way == ", NCCL" and not current().settings.gpus_may_be_shared
        self._note(
            f"overlap, {megabytes} MB",
            f"products {products_s * 1e3:.2f} ms, reduce {reduce_s * 1e3:.2f} ms, both {both_s * 1e3:.2f} ms"
            f": {hidden:.0%} hidden (wanted: {LEAST_HIDDEN:.0%}), products slowed by {slowed:.0%}",
            self._judged(hidden >= LEAST_HIDDEN) if meant else None,
            products_s=products_s,
            reduce_s=reduce_s,
            both_s=both_s,
            hidden=hidden,
            slowed=slowed,
        )

    def _measure_sampler(self) -> None:
        """What looking at the GPU 10 times a second takes while it computes."""
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
        self._note(
            "sampler (NVML)",
            f"{cores:.2%} of a core (wanted: {MOST_SAMPLER_CORES:.0%}), {rate:.1f} looks/s, {busy}",
            self._judged(cores <= MOST_SAMPLER_CORES),
            cores=cores,
            looks_per_s=rate,
        )
        if sampler.notes():
            self._note("not sampled", "; ".join(sampler.notes()))


class MeasuredBucket:
    """A plan of one bucket of float32 tensors of these counts; each step is begun, submitted, collected.

    With compression they are scaled by a half as well: without, numbers go through as they are.
    """

    def __init__(
        self,
        engine: Engine,
        gpu: GpuUnderTest,
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
        self._engine.core.begin_step(self._plan_id, self._step, 1.0, True)
        self._step += 1

    def submit(self) -> None:
        self._engine.submit_on_device(self._plan_id, 0, self._tensors, self._scale)

    def collect(self) -> None:
        self._engine.collect_on_device(self._plan_id, 0, self._tensors)


def worst(found: Numbers, terms: Numbers) -> float:
    """The largest error of a sum over the ranks, relative to the largest sum of absolute values.

    `found` [count], `terms` [ranks, count]; infinite where something was not written.
    """
    error = np.abs(found - terms.sum(0)).max()
    return float(error / np.abs(terms).sum(0).max()) if np.isfinite(error) else float("inf")


def main(open_gpu: Callable[[int], GpuUnderTest]) -> None:
    """Run as one rank: `check_worker ROWS.json [small]`; `open_gpu` takes the local rank."""
    hvpipe.init()  # HVPIPE_TIMEOUT is check's
    gpu = open_gpu(hvpipe.local_rank())
    sizes = SMALL if sys.argv[2:] == ["small"] else Sizes()
    check = Check(current().engine, gpu, sizes, Path(sys.argv[1]))
    check.run()
    hvpipe.shutdown()
    sys.exit(check.failed)


if __name__ == "__main__":
    from bench.gpu.torch_gpu import TorchGpu

    main(TorchGpu)
