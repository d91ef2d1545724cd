"""Verifies collectives of device arrays against float64 sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import hvpipe
from bench.gpu.rows import Numbers, Rows
from bench.gpu.sizes import Sizes
from hvpipe.engine.engine import EngineClient
from hvpipe.plan.buckets import WIRE_DTYPE, Gradient, plan_buckets

if TYPE_CHECKING:
    from bench.gpu.torch_gpu import TorchGpu

BUCKET_BYTES = 1 << 14  # several buckets, of which the largest tensor fills one

# Relative to the largest sum of absolute values: a few roundings of the type that travels.
TOLERANCE = {"float32": 1e-6, "float64": 1e-14, "float16": 4e-3, "bfloat16": 3e-2}


class Verification:
    """What one rank verifies: a row for each kind of collective."""

    def __init__(self, engine: EngineClient, gpu: TorchGpu, sizes: Sizes, rows: Rows, seed: int) -> None:
        self._engine, self._gpu, self._sizes, self._rows, self._seed = engine, gpu, sizes, rows, seed

    def _terms(self, count: int, dtype: str, *key: int) -> tuple[Any, Numbers]:
        """Return this rank's random device array, and the numbers of all ranks, [ranks, count]."""
        arrays = [
            self._gpu.put(np.random.default_rng([self._seed, *key, r]).standard_normal(count), dtype)
            for r in range(hvpipe.size())
        ]
        return arrays[hvpipe.rank()], np.stack([self._gpu.get(array) for array in arrays])

    def _poisoned(self, count: int, dtype: str) -> Any:
        return self._gpu.put(np.full(count, np.nan), dtype)

    def verify_all_reduce(self) -> None:
        """Verify sums, and means in place."""
        for dtype, tolerance in TOLERANCE.items():
            errors = []
            for count in self._sizes.counts:
                mine, terms = self._terms(count, dtype, count)
                out = self._poisoned(count, dtype)
                self._engine.allreduce(mine, op="sum", out=out)
                errors.append(worst(self._gpu.get(out), terms))
                self._engine.allreduce(mine, op="average", out=mine)
                errors.append(worst(self._gpu.get(mine), terms / hvpipe.size()))
            self._rows.verified(f"all-reduce {dtype}", errors, tolerance)

    def verify_broadcast(self) -> None:
        root = hvpipe.size() - 1
        array, terms = self._terms(self._sizes.counts[-1], "float32")
        self._engine.broadcast(array, root)
        self._rows.verified("broadcast", [worst(self._gpu.get(array), terms[root:])], 0.0)

    def verify_side_stream(self) -> None:
        """Verify an array that is not ready yet, on a stream that the default stream does not wait for."""
        mine, terms = self._terms(1000, "float32")
        late, out = self._poisoned(1000, "float32"), self._poisoned(1000, "float32")
        self._gpu.synchronize()
        with self._gpu.side_stream():
            self._gpu.hold()
            self._gpu.copy(late, mine)
            self._engine.allreduce(late, op="sum", out=out)
            found = self._gpu.get(out)
        self._rows.verified("all-reduce on a stream of its own", [worst(found, terms)], TOLERANCE["float32"])

    def verify_faces(self) -> None:
        """Verify arrays that other libraries present."""
        mine, terms = self._terms(1000, "float32")
        out = self._poisoned(1000, "float32")
        outs = self._gpu.faces(out)
        for name, array in self._gpu.faces(mine).items():
            self._gpu.copy(out, self._poisoned(1000, "float32"))
            self._engine.allreduce(array, op="sum", out=outs[name])
            self._rows.verified(f"all-reduce of {name}", [worst(self._gpu.get(out), terms)], 0.0)

    def verify_messages(self) -> None:
        """Send arrays around the ring of ranks, all at once. Every bit should arrive."""
        before = (hvpipe.rank() - 1) % hvpipe.size()
        errors = []
        for number, dtype in enumerate(TOLERANCE):
            sent, found = [], []
            for tag, count in enumerate(self._sizes.counts):
                mine, terms = self._terms(count, dtype, number, count)
                out = self._poisoned(count, dtype)
                found.append((out, terms[before : before + 1]))
                sent += pass_on(self._engine, mine, out, tag)
            for request in sent:
                request.wait()
            errors += [worst(self._gpu.get(out), terms) for out, terms in found]
        self._rows.verified("messages", errors, 0.0)

    def verify_group_sums(self) -> None:
        """Sum arrays of all sizes over all ranks, all at once, as the replicas of a pipeline's stage do."""
        group = self._engine.add_group(range(hvpipe.size()))
        for dtype in ("float32", "float64"):
            sums = []
            for count in filter(None, self._sizes.counts):
                mine, terms = self._terms(count, dtype, count)
                request = self._engine.post_group_reduce(group, count, dtype, "a group's sum")
                self._engine.send_posted(request.number, mine)
                sums.append((request, terms, self._poisoned(count, dtype)))
            errors = []
            for request, terms, out in sums:
                request.wait()
                self._engine.take_posted(request.number, out)
                errors.append(worst(self._gpu.get(out), terms))
            self._rows.verified(f"sum over a group, {dtype}", errors, TOLERANCE[dtype])

    def verify_steps(self) -> None:
        """Verify steps of buckets of many tensors, one misaligned, with and without compression.

        Buckets are collected in the order of the next forward, by the host and by the stream in turn.
        """
        counts = [self._sizes.largest, 1, 3, 1000, 4097, *[5] * 300]
        for compression in (None, "bf16", "fp16"):
            plan = plan_buckets(
                [Gradient(str(i), (n,), "float32") for i, n in enumerate(counts)], BUCKET_BYTES, compression
            )
            plan_id = self._engine.add_plan(f"steps {compression}", plan, on_device=True)
            errors = []
            for step in range(4):
                scale, _ = self._engine.native.begin_step(plan_id, step, 1.0, True)
                mine, terms = zip(
                    *(self._terms(n, "float32", step, i) for i, n in enumerate(counts)), strict=True
                )
                outs = [self._poisoned(n, "float32") for n in counts]
                # Start one element into a larger tensor: 4 bytes off a 16-byte boundary.
                room = self._poisoned(counts[0] + 1, "float32")[1:]
                self._gpu.copy(room, mine[0])
                given = [room, *mine[1:]]
                for number, bucket in enumerate(plan.buckets):
                    self._engine.submit_on_device(plan_id, number, [given[i] for i in bucket.members], scale)
                for number, bucket in reversed(list(enumerate(plan.buckets))):
                    self._engine.collect_on_device(
                        plan_id, number, [outs[i] for i in bucket.members], on_stream=step % 2 == 1
                    )
                errors += [
                    worst(self._gpu.get(out), scale * term) for out, term in zip(outs, terms, strict=True)
                ]
            self._engine.remove_plan(plan_id)
            wire = WIRE_DTYPE[compression] if compression else "float32"
            self._rows.verified(f"steps, compression {compression}", errors, TOLERANCE[wire])


def pass_on(engine: EngineClient, array: Any, out: Any, tag: int) -> list[Any]:
    """Start a message to the next rank, and one from the rank before. Return their requests."""
    rank, size = hvpipe.rank(), hvpipe.size()
    received = engine.receive_on_device(out, (rank - 1) % size, tag, "a message")
    return [engine.send(array, (rank + 1) % size, tag, "a message"), received]


def worst(found: Numbers, terms: Numbers) -> float:
    """Return the largest error of a sum over the ranks, relative to the largest sum of absolute values.

    `found` is [count], `terms` is [ranks, count]. Infinite if something was not written.
    """
    error = np.abs(found - terms.sum(0)).max()
    return float(error / np.abs(terms).sum(0).max()) if np.isfinite(error) else float("inf")
