"""Break one line of hvpipe at a time, and check that a test notices: `make mutations`.

    python tests/mutations.py                    all mutations (about an hour: the C++ ones build hvpipe anew)
    python tests/mutations.py --only schedule    those with this text in their name
    python tests/mutations.py --check            only check that each line is still there, once

Each mutation names a code fragment, not a file and line, so that code can move. A fragment must occur once
below its folder. The script works on a copy of the repository and leaves the working tree alone. It prints
`caught` or `survived` for each mutation, and exits with 1 if one survived or cannot be applied.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from distributed import mpirun_command, run  # noqa: E402

LIMIT_S = 900.0
ALONE = 0
IN_ENGINE = "tests/mpi/engine"
DATA_PARALLEL, PIPELINE = "tests/mpi/keras/data_parallel", "tests/mpi/keras/pipeline"


@dataclass(frozen=True)
class Mutation:
    """A fragment of code below `folder`, its replacement, and the tests that should fail then.

    `ranks` processes run the tests, ALONE without a launcher. `env` is added to their environment.
    """

    name: str
    folder: str
    fragment: str
    replacement: str
    tests: tuple[str, ...]
    ranks: int = ALONE
    env: tuple[tuple[str, str], ...] = ()


PLANNING = (
    Mutation(
        "schedule: 1F1B warms up with one forward too few",
        *("hvpipe/schedule", "following <= i + work.lead", "following < i + work.lead"),
        ("tests/schedule",),
    ),
    Mutation(
        "schedule: ZB-H1 puts off W too long",
        *(
            "hvpipe/schedule",
            "work.microbatches[put_off] + work.lag <= microbatch",
            "work.microbatches[put_off] + work.lag < microbatch",
        ),
        ("tests/schedule",),
    ),
    Mutation(
        "schedule: interleaved warms up too little",
        *(
            "hvpipe/schedule",
            "+ 2 * (ranks - rank - 1), len(forwards)",
            "+ (ranks - rank - 1), len(forwards)",
        ),
        ("tests/schedule",),
    ),
    Mutation(
        "schedule: verify accepts messages sent twice",
        *("hvpipe/schedule", "(sends[message], receives[message]) != (1, 1)", "receives[message] != 1"),
        ("tests/schedule",),
    ),
    Mutation(
        "plan: greedy search takes the faster stage of two for the bottleneck",
        *("hvpipe/plan", "(max(float(left_s[end", "(min(float(left_s[end"),
        ("tests/plan",),
    ),
    Mutation(
        "plan: a bucket ends before it is full",
        *("hvpipe/plan", "+ sizes_bytes[place] > bucket_bytes", "+ sizes_bytes[place] >= bucket_bytes"),
        ("tests/plan/test_buckets.py",),
    ),
    Mutation(
        "plan: a bucket has the priority of its last variable",
        *(
            "hvpipe/plan",
            "priority=0 if ignores_priority else min(members)",
            "priority=0 if ignores_priority else max(members)",
        ),
        ("tests/plan/test_buckets.py",),
    ),
    Mutation(
        "plan: recomputed stages count all activations",
        *(
            "hvpipe/plan",
            "saved = 1 if pipelining.recomputes(stage) else in_flight[stage]",
            "saved = in_flight[stage]",
        ),
        ("tests/plan", "tests/forecast"),
    ),
    Mutation(
        "plan: memory of a stage leaves its stash out",
        *("hvpipe/plan", "return self.state_bytes + self.stash_bytes", "return self.state_bytes"),
        ("tests/plan", "tests/forecast"),
    ),
    Mutation(
        "settings: HVPIPE_TIMEOUT is ignored",
        *(
            "hvpipe/environment",
            'timeout_s=_positive(env, "HVPIPE_TIMEOUT", "seconds", default.timeout_s)',
            "timeout_s=default.timeout_s",
        ),
        ("tests/environment/test_settings.py",),
    ),
)

KERAS = (
    Mutation(
        "data parallel: a step counts twice",
        *(
            "hvpipe/keras/data_parallel",
            'last thing that `apply` does."""',
            'last thing that `apply` does."""\n    step_count(optimizer).assign_add(1)',
        ),
        (f"{DATA_PARALLEL}/test_exact.py::test_step_gives_the_bits_of_none[momentum]",),
        ranks=2,
    ),
    Mutation(
        "data parallel: gradients of a scaled loss are not unscaled",
        *("hvpipe/keras/data_parallel", "[gradient / scale for gradient in gradients]", "list(gradients)"),
        (f"{DATA_PARALLEL}/test_bucket_update.py::test_options[loss_scale]",),
        ranks=2,
    ),
    Mutation(
        "data parallel: ranks with unequal batches count alike",
        *(
            "hvpipe/keras/data_parallel",
            "with on_the_host():\n            samples = tf.cast(samples, tf.float64)",
            "with on_the_host():\n            samples = tf.ones_like(tf.cast(samples, tf.float64))",
        ),
        (f"{DATA_PARALLEL}/test_whole_batch.py::test_unequal_batches[momentum]",),
        ranks=2,
    ),
    Mutation(
        "data parallel: accumulated gradients are not weighted by samples",
        *("hvpipe/keras/data_parallel", "[gradient * tf.cast(share, gradient.dtype) for", "[gradient for"),
        (f"{DATA_PARALLEL}/test_whole_batch.py::test_unequal_batches[accumulation]",),
        ranks=2,
    ),
    Mutation(
        "data parallel: accumulators keep the sum of the step before",
        *(
            "hvpipe/keras/data_parallel",
            "accumulator.assign(tf.zeros_like(accumulator))",
            "accumulator.assign_add(tf.zeros_like(accumulator))",
        ),
        (f"{DATA_PARALLEL}/test_whole_batch.py::test_equal_batches[accumulation]",),
        ranks=2,
    ),
    Mutation(
        "data parallel: the optimizer is not broadcast at the start",
        *("hvpipe/keras", "broadcast_model(model, model.optimizer.variables)", "broadcast_model(model)"),
        (f"{DATA_PARALLEL}/test_ranks_equal.py::test_all_ranks_start_from_rank_0s_state",),
        ranks=2,
    ),
    Mutation(
        "data parallel: updates under way are not finished at the end of fit",
        *(
            "hvpipe/keras/data_parallel",
            "        self.buckets.update.update_where_submitted(token)\n        with on_the_host()",
            "        with on_the_host()",
        ),
        (f"{DATA_PARALLEL}/test_finished_weights.py::test_end_of_every_epoch_and_of_fit",),
        ranks=2,
    ),
    Mutation(
        "data parallel: metrics do not count samples",
        *(
            "hvpipe/keras",
            "np.average(theirs, axis=0, weights=counted if counted.sum() > 0 else None)",
            "np.average(theirs, axis=0)",
        ),
        (f"{DATA_PARALLEL}/test_logs.py::test_history_of_unequal_ranks",),
        ranks=2,
    ),
    Mutation(
        "data parallel: a rank that stops does so alone",
        *(
            "hvpipe/keras",
            "if any(self._session.run_section(lambda: self._session.engine.agree(what, wish))):",
            "if self._session.run_section(lambda: self._session.engine.agree(what, wish)) and wish:",
        ),
        (f"{DATA_PARALLEL}/test_stopping.py::test_a_callback_that_only_one_rank_has",),
        ranks=2,
    ),
    Mutation(
        "pipeline: a shared layer gets the gradient of one stage",
        *(
            "hvpipe/keras/pipeline",
            "return sum(values[1:], values[0]) if values",
            "return values[0] if values",
        ),
        (f"{PIPELINE}/test_update.py::test_a_layer_in_two_stages_of_one_rank",),
        ranks=2,
    ),
    Mutation(
        "pipeline: weights of replicas count several times in the norm",
        *(
            "hvpipe/keras/pipeline",
            "if self._holders.get(id(v), (rank,))[0] == rank",
            "if self._holders.get(id(v), (rank,))",
        ),
        (f"{PIPELINE}/test_replicas.py::test_batches_smaller_than_the_replicas_are_trained_on",),
        ranks=2,
    ),
    Mutation(
        "pipeline: a summed loss is not that of the batch",
        *("hvpipe/keras/pipeline", "return value / tf.cast(self.share, value.dtype)", "return value"),
        (f"{PIPELINE}/test_losses.py::test_a_sum_loss_covers_the_whole_batch",),
        ranks=2,
    ),
    Mutation(
        "pipeline: masked entries count",
        *("hvpipe/keras/pipeline", "return value * tf.cast(part / self.share, value.dtype)", "return value"),
        (f"{PIPELINE}/test_losses.py::test_a_masked_loss_covers_the_whole_batch",),
        ranks=2,
    ),
)

RING = (("HVPIPE_SHARED_MEMORY", "0"),)
MANY_RANKS = "tests/csrc/collectives/test_many_ranks.py"
ENGINE = (
    Mutation(
        "ring: what arrives is not added",
        *(
            "csrc",
            "      SumInto(sum, parts, 2, dtype_, segment.count);",
            "",
        ),
        (f"{IN_ENGINE}/test_all_reduce.py",),
        ranks=2,
        env=RING,
    ),
    Mutation(
        "butterfly: what is being sent is overwritten",
        *("csrc", "if (overwrites_sent() && sends_.done <= receives_.done) return moved;", ""),
        (MANY_RANKS,),
    ),
    Mutation(
        "butterfly: the pairs of other than a power of two get no result",
        *("csrc", "if (places.Takes(rank)) steps.push_back({rank + 1, whole, nothing, false});", ""),
        (MANY_RANKS,),
    ),
    Mutation(
        "ring: chunks are sent in the order of another rank",
        *("csrc", "(rank + 2 * ranks_ - step) % ranks_", "(rank + 2 * ranks_ + step) % ranks_"),
        (f"{IN_ENGINE}/test_all_reduce.py",),
        ranks=3,
        env=RING,
    ),
    Mutation(
        "shared memory: the third rank's terms are left out",
        *("csrc", "dst[i] = (a[i] + b[i]) + c[i];", "dst[i] = a[i] + b[i];"),
        (f"{IN_ENGINE}/test_all_reduce.py",),
        ranks=3,
    ),
    Mutation(
        "shared memory: a slot is written before all have read it",
        *(
            "csrc",
            "!shared_.AllRead(at - shared_.slots() + 1)) break;\n    const Range chunk = Chunk(written_);",
            "false) break;\n    const Range chunk = Chunk(written_);",
        ),
        ("tests/mpi/keras/named/test_collectives.py::test_a_rank_that_is_far_ahead_waits_for_the_readers",),
        ranks=2,
    ),
    Mutation(
        "progress: what is needed last goes first",
        *("csrc", "? a->priority < b->priority", "? a->priority > b->priority"),
        (f"{IN_ENGINE}/test_buckets.py",),
        ranks=2,
        env=RING,
    ),
    Mutation(
        "progress: an operation that is ready is forgotten",
        *("csrc", "if (ready) newly_ready_.push_back(operation);", ""),
        (f"{IN_ENGINE}/test_messages.py",),
        ranks=2,
    ),
    Mutation(
        "tables: a row is cleared after it was unpacked",
        *("csrc", "next = row + 1;", "next = row;"),
        (f"{IN_ENGINE}/test_buckets.py",),
        ranks=2,
    ),
    Mutation(
        "messages: all segments arrive at the beginning",
        *(
            "csrc",
            "transport_.Irecv(data_ + segment.first, segment.count, options_.peer",
            "transport_.Irecv(data_, segment.count, options_.peer",
        ),
        (f"{IN_ENGINE}/test_messages.py",),
        ranks=2,
    ),
    Mutation(
        "buckets: gradients are not scaled by the rank's share",
        *(
            "csrc",
            "ScaleAndCast(first + own_[place] * row_bytes, type, Row(place), wire_, elements_, scale)",
            "ScaleAndCast(first + own_[place] * row_bytes, type, Row(place), wire_, elements_, 1.0)",
        ),
        (f"{IN_ENGINE}/test_buckets.py",),
        ranks=2,
    ),
)


ORDER, MESSAGES = f"{IN_ENGINE}/test_device_order.py", f"{IN_ENGINE}/test_device_messages.py"
BUCKETS, FAILURES = f"{IN_ENGINE}/test_device.py", f"{IN_ENGINE}/test_device_errors.py"


def on_device(name: str, fragment: str, replacement: str, *tests: str, ranks: int = 2) -> Mutation:
    """Return a mutation of the engine's device half. 4 ranks run as two hosts."""
    env = (("HVPIPE_RANKS_PER_HOST", "2"),) if ranks == 4 else ()
    return Mutation(f"device: {name}", "csrc", fragment, replacement, tests, ranks, env)


DEVICE = (
    on_device(
        "NCCL does not wait for the pack",
        "device->device->Wait(stream, begun);\n      call(stream);",
        "call(stream);",
        ORDER,
    ),
    on_device(
        "a copy to the host does not wait for the pack",
        "device->Wait(stream, begun);\n    copy(",
        "copy(",
        ORDER,
    ),
    on_device(
        "the unpack does not wait for NCCL",
        "route_.topology().size == 1 ? buffer.filled() : buffer.moved()",
        "buffer.filled()",
        ORDER,
    ),
    on_device(
        "the host does not wait for a copy",
        "launch); });\n  AddArrival(operation, *device_.device, device_.ranks.get(), ended);",
        "launch); });",
        ORDER,
    ),
    on_device(
        "a bucket is packed again before its sum was read",
        "if (bucket.unpacked_before) device.device->Wait(stream, buffer.read());",
        "",
        ORDER,
    ),
    on_device(
        "the GPU goes on behind a sum that will not be complete",
        "if (buckets_.lost_sums()) EndWithoutUpdate(error);",
        "",
        "tests/test_bad_input.py",
        ranks=ALONE,
    ),
    on_device("NCCL's memory is not cleared", "device.Clear(memory.get(), bytes);", "", ORDER),
    on_device(
        "a plan is freed before its sums were read",
        "if (!bucket->Read()) return false;",
        "",
        ORDER,
    ),
    on_device(
        "an engine ends before its sums were read",
        " && buckets_.WaitUntilRead(kLeaveS)",
        "",
        ORDER,
    ),
    on_device(
        "a call does not wait for its array",
        "device.device->Record(begun, stream);\n    const DeviceReduce",
        "device.device->Record(begun, device.stream.get());\n    const DeviceReduce",
        ORDER,
    ),
    on_device(
        "a broadcast does not wait for its array",
        "device.device->Record(begun, stream);\n  if (device.nccl",
        "device.device->Record(begun, device.stream.get());\n  if (device.nccl",
        ORDER,
    ),
    on_device(
        "a message does not wait for its array",
        "message->BeginBehind(device, stream);\n  message->sends = true;",
        "message->sends = true;",
        ORDER,
    ),
    on_device(
        "a message is received before its array is free",
        "message->BeginBehind(device, stream);\n  ReceiveInto(",
        "ReceiveInto(",
        ORDER,
    ),
    on_device(
        "a message's memory is used again before it was read",
        "AddArrival(*operation, *device_.get().device, nullptr, event.get());",
        "",
        ORDER,
    ),
    on_device(
        "a message is over before its copy",
        "launch); });\n  AddArrival(operation, device, nullptr, ended);",
        "launch); });",
        MESSAGES,
    ),
    on_device(
        "a rank has several messages on its GPU at once",
        "return !std::exchange(taken_, true);",
        "return true;",
        MESSAGES,
    ),
    on_device(
        "a group sums what is not written yet",
        "AddArrival(operation, *device_.device, nullptr, reduce->begun.get());",
        "",
        ORDER,
    ),
    on_device(
        "a rank takes its device for a sum before the ranks below",
        "if (member > 0) {\n    operation.AddStage(",
        "if (member > 9) {\n    operation.AddStage(",
        MESSAGES,
    ),
    on_device(
        "a sum takes no device",
        "if (!device->Take()) return false;\n    if (member",
        "if (member",
        MESSAGES,
    ),
    on_device(
        "memory of a sum is used again before it was taken",
        "nullptr, reduce->memory, bytes, nullptr});",
        "nullptr, OwnedEvent(*device.device), bytes, nullptr});",
        MESSAGES,
    ),
    on_device(
        "a group's sum takes the device before all ranks are ready",
        "for (int other = 1; other < members->size(); ++other) {",
        "for (int other = 1; other < 1; ++other) {",
        MESSAGES,
    ),
    on_device(
        "a message of another size is taken",
        "if (handshake.bytes != message.bytes) {",
        "if (false) {",
        MESSAGES,
    ),
    on_device(
        "NCCL is called while it launches",
        "if (!(first ? device->ranks->ReadySoon() : device->ranks->Ready())) return false;",
        "",
        BUCKETS,
    ),
    on_device(
        "ranks call NCCL in orders of their own",
        "std::make_unique<DeviceLaunch>(launch); },\n                     &device_.order);",
        "std::make_unique<DeviceLaunch>(launch); });",
        BUCKETS,
    ),
    on_device(
        "buckets are gathered as backward goes",
        "return a->priority < b->priority; });\n    operations",
        "return false; });\n    operations",
        ORDER,
    ),
    on_device("buffers are not registered", "if (!nccl_memory_ || registered_) return;", "return;", BUCKETS),
    on_device(
        "float16 is not scaled before the sum",
        "the range of float16\n      device.device->ScaleAndCast({{in, out, count}}, dtype, dtype, scale,",
        "\n      device.device->ScaleAndCast({{in, out, count}}, dtype, dtype, 1.0,",
        BUCKETS,
    ),
    on_device(
        "an abort has no current device",
        "const Here here(device);\n        (void)end(ended);",
        "(void)end(ended);",
        FAILURES,
    ),
)


class Copy:
    """A copy of the repository with a venv of its own, in which one line is broken at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / ".venv/bin/python"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        ):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def borrow(self) -> None:
        """Make a venv that takes packages and the compiled engine from the one that runs this script."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder / ".venv"], check=True)
        (packages,) = (self.folder / ".venv/lib").glob("python*/site-packages")
        others = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "copy.pth").write_text("\n".join([str(self.folder), *others]) + "\n")
        import hvpipe._build_info as built

        for path in Path(built.__file__).parent.iterdir():
            if path.suffix == ".so" or path.name == "_build_info.py":
                (self.folder / "hvpipe" / path.name).unlink(missing_ok=True)
                (self.folder / "hvpipe" / path.name).symlink_to(path)

    def build(self) -> None:
        """Compile this copy into its venv. Raises CalledProcessError if that fails."""
        subprocess.run(
            [".ci/setup.sh", ".venv", "constraints.txt"],
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def fails(self, mutation: Mutation) -> bool:
        """Return whether the tests of a mutation fail now."""
        launcher = mpirun_command(mutation.ranks)
        options = ["-q", "-x", "-p", "no:cacheprovider", f"--timeout={LIMIT_S / 3:.0f}"]
        command = [*launcher, str(self.python), "-m", "pytest", *options, *mutation.tests]
        result = run(
            command, limit_s=LIMIT_S, env={"HVPIPE_TIMEOUT": "30", **dict(mutation.env)}, cwd=self.folder
        )
        if not result.timed_out and result.returncode in (4, 5):  # wrong arguments, or no test found
            raise RuntimeError(result.describe())
        return result.timed_out or result.returncode != 0


def find(folder: Path, mutation: Mutation) -> Path:
    """Return the one file that has the fragment. Raises LookupError otherwise."""
    files = [
        p
        for p in sorted((folder / mutation.folder).rglob("*"))
        if p.suffix in (".py", ".cc", ".h") and p.is_file()
    ]
    found = [path for path in files for _ in range(path.read_text().count(mutation.fragment))]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(folder)) for path in found) or "no file"
        raise LookupError(
            f"{mutation.fragment!r} should occur once below {mutation.folder}. Received: {places}"
        )
    return found[0]


def try_out(copy: Copy, mutation: Mutation) -> bool:
    """Apply a mutation to the copy, run its tests, and take it back. Returns whether they failed."""
    path = find(copy.folder, mutation)
    text = path.read_text()
    path.write_text(text.replace(mutation.fragment, mutation.replacement))
    try:
        if mutation.folder == "csrc":
            copy.build()
        return copy.fails(mutation)
    finally:
        path.write_text(text)
        os.utime(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="text in the names of mutations to run")
    parser.add_argument("--check", action="store_true", help="only check that every fragment is there, once")
    arguments = parser.parse_args()
    chosen = [m for m in (*PLANNING, *KERAS, *ENGINE, *DEVICE) if arguments.only in m.name]
    bad = 0
    if arguments.check:
        for mutation in chosen:
            try:
                find(ROOT, mutation)
            except LookupError as error:
                bad += 1
                print(f"{mutation.name}: {error}")
        print(f"{len(chosen)} mutations, {bad} cannot be applied")
        return bool(bad)
    for compiled in (False, True):
        of_kind = [m for m in chosen if (m.folder == "csrc") == compiled]
        if not of_kind:
            continue
        with tempfile.TemporaryDirectory(prefix="hvpipe-mutations-") as folder:
            copy = Copy(Path(folder))
            copy.build() if compiled else copy.borrow()
            for mutation in of_kind:
                started = time.monotonic()
                try:
                    verdict = "caught" if try_out(copy, mutation) else "survived"
                except LookupError as error:
                    verdict = f"cannot be applied: {error}"
                bad += verdict != "caught"
                print(f"{verdict:8}  {time.monotonic() - started:4.0f} s  {mutation.name}", flush=True)
    print(f"{len(chosen)} mutations, {len(chosen) - bad} caught")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
