"""One rank of bench.gpu.check: verifies collectives of device arrays, then measures them."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvpipe
from hvpipe.engine import Engine
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16}
# Relative to the largest sum: a few roundings of the type that travels.
TOLERANCE = {"float32": 1e-6, "float64": 1e-14, "float16": 4e-3, "bfloat16": 3e-2}
COUNTS = (1, 7, 4096, 1_000_003)
MEGABYTES = (4, 16, 64, 256)
ROUNDS = 11
AHEAD_CYCLES = 20_000_000  # some 10 ms, in which the host runs ahead of what is measured
SEED = int.from_bytes(np.random.default_rng().bytes(4), "little")

rows: list[dict[str, object]] = []


def note(what: str, result: str, ok: bool | None = None) -> None:
    """One line of the table; `ok` is None for a figure."""
    rows.append({"what": f"{hvpipe.size()} rank(s): {what}", "result": result, "ok": ok})


def numbers(seed: int, rank: int, count: int) -> Any:
    return np.random.default_rng([seed, rank, count]).standard_normal(count)


def worst(found: Any, wanted: Any) -> float:
    """The largest error, relative to the largest number wanted; infinite where something was not written."""
    error = np.abs(found.double().cpu().numpy() - wanted).max()
    return float(error / np.abs(wanted).max()) if np.isfinite(error) else float("inf")


def verify_allreduce(engine: Engine, seed: int) -> None:
    """Sums of all sizes and types, into poisoned outputs, against float64."""
    for name, dtype in DTYPES.items():
        errors = []
        for count in COUNTS:
            terms = [torch.tensor(numbers(seed, r, count)).to(dtype) for r in range(hvpipe.size())]
            mine = terms[hvpipe.rank()].cuda()
            out = torch.full_like(mine, float("nan"))
            engine.allreduce(mine, op="sum", out=out)
            errors.append(worst(out, sum(t.double().numpy() for t in terms)))
        note(f"all-reduce {name}", f"error {max(errors):.1e}", max(errors) <= TOLERANCE[name])


def gradients(seed: int, rank: int, counts: list[int]) -> list[Any]:
    generator = torch.Generator(device="cuda").manual_seed(seed + 7919 * rank)
    return [torch.randn(n, generator=generator, device="cuda") for n in counts]


def verify_steps(engine: Engine, seed: int) -> None:
    """Three steps of buckets of many tensors, also misaligned ones, with and without compression."""
    counts = [1, 3, 1000, 4097, 250_000, *[5] * 300]
    for compression in (None, "bf16", "fp16"):
        plan = plan_buckets(
            [Gradient(str(i), (n,), "float32") for i, n in enumerate(counts)], 1 << 20, compression
        )
        plan_id = engine.add_plan(f"check {compression}", plan, on_device=True)
        errors = []
        for step in range(3):
            scale, _ = engine.core.begin_step(plan_id, step, 1.0, True)
            terms = [gradients(seed + step, r, counts) for r in range(hvpipe.size())]
            # One element into a larger tensor: 4 bytes beyond what 16-byte accesses want.
            room = torch.empty(250_001, device="cuda")
            room[1:] = terms[hvpipe.rank()][4]
            terms[hvpipe.rank()][4] = room[1:]
            outs = [torch.full((n,), float("nan"), device="cuda") for n in counts]
            for number, bucket in enumerate(plan.buckets):
                engine.submit_on_device(
                    plan_id, number, [terms[hvpipe.rank()][i] for i in bucket.members], scale
                )
            for number, bucket in enumerate(plan.buckets):
                engine.collect_on_device(plan_id, number, [outs[i] for i in bucket.members])
            for i, out in enumerate(outs):
                errors.append(worst(out, scale * sum(t[i].double().cpu().numpy() for t in terms)))
        wire = {"bf16": "bfloat16", "fp16": "float16"}.get(compression or "", "float32")
        note(f"steps, compression {compression}", f"error {max(errors):.1e}", max(errors) <= TOLERANCE[wire])


def device_s(work: Callable[[], None], ahead: bool = True) -> float:
    """The median time of `work` on the device."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[1:])


def measure_packing(engine: Engine) -> None:
    """Pack and unpack of 40 tensors against the device's own copy of as many bytes."""
    for megabytes in MEGABYTES:
        count = megabytes * 1_000_000 // 4 // 40
        plan = plan_buckets([Gradient(str(i), (count,), "float32") for i in range(40)], 1 << 40, None)
        plan_id = engine.add_plan(f"pack {megabytes} MB", plan, on_device=True)
        tensors = gradients(1, 0, [count] * 40)
        source = torch.randn(40 * count, device="cuda")
        target = torch.empty_like(source)
        moved = 2 * source.numel() * 4
        copy_s = device_s(lambda: target.copy_(source))  # noqa: B023
        packs, unpacks = [], []
        for step in range(ROUNDS):
            engine.core.begin_step(plan_id, step, 1.0, True)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD_CYCLES)
            marks[0].record()
            engine.submit_on_device(plan_id, 0, tensors, 0.5)
            marks[1].record()
            engine.collect_on_device(plan_id, 0, tensors)
            marks[2].record()
            torch.cuda.synchronize()
            packs.append(marks[0].elapsed_time(marks[1]) * 1e-3)
            unpacks.append(marks[1].elapsed_time(marks[2]) * 1e-3)
        for what, times in (("pack", packs), ("unpack", unpacks)):
            taken_s = statistics.median(times[1:])
            share = copy_s / taken_s
            note(f"{what} {megabytes} MB", f"{moved / taken_s / 1e9:.0f} GB/s, {share:.0%} of a copy's")


def measure_allreduce(engine: Engine) -> None:
    """Bandwidth as nccl-tests defines it: 2 (n - 1) / n of the bytes in the time of a call."""
    size = hvpipe.size()
    for megabytes in MEGABYTES:
        array = torch.ones(megabytes * 250_000, device="cuda")
        taken_s = device_s(lambda: engine.allreduce(array, op="average", out=array), ahead=False)  # noqa: B023
        bus = 2 * (size - 1) / size * array.numel() * 4 / taken_s / 1e9
        note(
            f"all-reduce {megabytes} MB",
            f"{taken_s * 1e3:.2f} ms" + (f", bus {bus:.1f} GB/s" if size > 1 else ""),
        )


def measure_overlap(engine: Engine) -> None:
    """How much of a bucket's reduce is hidden under matrix products that last longer."""
    count = 64_000_000 // 4
    plan = plan_buckets([Gradient("all", (count,), "float32")], 1 << 40, None)
    plan_id = engine.add_plan("overlap", plan, on_device=True)
    gradient = torch.ones(count, device="cuda")
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    step = 0

    def begin() -> None:
        nonlocal step
        engine.core.begin_step(plan_id, step, 1.0, True)
        step += 1

    def reduce() -> None:
        engine.submit_on_device(plan_id, 0, [gradient], 1.0)
        engine.collect_on_device(plan_id, 0, [gradient])

    def timed(work: Callable[[], None], after: Callable[[], None] = lambda: None) -> float:
        times = []
        for _ in range(ROUNDS):
            begin()
            times.append(_once(work))
            after()
        return statistics.median(times[1:])

    def products() -> None:
        for _ in range(repeats):
            torch.mm(matrix, matrix)

    def submit_then_multiply() -> None:
        engine.submit_on_device(plan_id, 0, [gradient], 1.0)
        products()
        engine.collect_on_device(plan_id, 0, [gradient])

    reduce_s = timed(reduce)
    repeats = 20
    once_s = timed(products, after=reduce)
    repeats = max(20, int(repeats * 2 * reduce_s / once_s))
    products_s = timed(products, after=reduce)
    both_s = timed(submit_then_multiply)
    hidden = (products_s + reduce_s - both_s) / reduce_s
    figures = (
        f"products {products_s * 1e3:.2f} ms, reduce {reduce_s * 1e3:.2f} ms, both {both_s * 1e3:.2f} ms"
    )
    note("overlap, 64 MB", f"{figures}: {hidden:.0%} hidden")


def _once(work: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    hvpipe.barrier()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def main() -> None:
    hvpipe.init(timeout_s=60)
    engine = current().engine
    torch.cuda.set_device(hvpipe.local_rank() % torch.cuda.device_count())
    note("data goes", engine.use_device())
    note("device", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    seed = int(hvpipe.broadcast_object(SEED))
    verify_allreduce(engine, seed)
    verify_steps(engine, seed)
    if hvpipe.size() == 1:
        measure_packing(engine)
    else:
        measure_overlap(engine)
    measure_allreduce(engine)
    if hvpipe.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    hvpipe.shutdown()


if __name__ == "__main__":
    main()
