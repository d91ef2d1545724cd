"""The program of each rank of `hvpipe profile`: measures the model, then the cluster; rank 0 writes both."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from hvpipe import collectives, session
from hvpipe.environment.this_host import CpuMeter
from hvpipe.errors import HvpipeError
from hvpipe.keras.profiling.cluster import measure_ranks
from hvpipe.keras.profiling.measure import measure_built
from hvpipe.keras.profiling.model_loader import load_model_and_batch
from hvpipe.keras.profiling.noise import RankNoise, noise_of
from hvpipe.keras.profiling.stopwatch import Stopwatch
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile
from hvpipe.specs.profile_request import ProfileTask

# The exit code if the model cannot be measured.
_WRONG_USAGE = 2
_REPORT_EVERY_S = 5.0

Found = TypeVar("Found")


def main(arguments: Sequence[str]) -> None:
    """Run the task that the only argument holds as text; collective."""
    task = ProfileTask.from_text(arguments[0])
    session.init()
    model, batch = _on_all_ranks(lambda: load_model_and_batch(task))
    report = _reporter() if session.rank() == 0 else lambda done, count, name: None
    # Start together as in training, because the ranks of a host share its cores and memory bandwidth.
    collectives.barrier()
    stopwatch, meter = Stopwatch(task.repeats), CpuMeter()
    profile = _on_all_ranks(
        lambda: measure_built(model, batch, stopwatch=stopwatch, optimizer=task.optimizer, report=report)
    )
    mine = RankNoise.since(meter, session.current().world.host, stopwatch.spread)
    noise = noise_of(collectives.allgather_object(mine))
    _on_all_ranks(lambda: _check_batch(task, profile))
    profile, cluster = _on_all_ranks(lambda: measure_ranks(profile))
    if session.rank() == 0:
        profile.write(task.profile_path)
        cluster.write(task.cluster_path)
        print(summary(profile, cluster))
        print(noise.to_line())
        print(f"written: {_shown(task.profile_path)}, {_shown(task.cluster_path)}", flush=True)
        if (warning := noise.warning()) is not None:
            print(warning, file=sys.stderr, flush=True)


def summary(profile: Profile, cluster: Cluster) -> str:
    """Return a text that summarises the measurements."""
    layers = profile.layers
    lines = [
        f"{profile.model}: {len(layers)} layers, {profile.batch_size} samples: "
        f"forward {_ms(sum(layer.forward_s for layer in layers))}, "
        f"backward {_ms(sum(layer.backward_s for layer in layers))}; "
        f"weights {_mb(sum(layer.weight_bytes for layer in layers))}, "
        f"slots {_mb(sum(layer.slot_bytes for layer in layers))}, "
        f"saved {_mb(sum(layer.saved_bytes for layer in layers))}"
    ]
    for device in cluster.devices:
        memory = "any memory" if device.memory_bytes is None else _mb(device.memory_bytes)
        kind = f", {device.type}" if device.type else ""
        lines.append(f"  {device.name}: speed {device.speed:.2f}, {memory}{kind}")
    for one, other, link in cluster.measured:
        rate = f"{link.bandwidth_bytes_per_s / 1e6:.0f} MB/s"
        lines.append(f"  {one} - {other}: {1e6 * link.latency_s:.0f} us, {rate}")
    if cluster.action_s:
        lines.append(f"  an action of a pipeline: {_ms(cluster.action_s)} besides its layers")
    return "\n".join(lines)


def _check_batch(task: ProfileTask, profile: Profile) -> None:
    if task.microbatch not in (None, profile.batch_size):
        raise HvpipeError(
            f"Leave --microbatch out, or give the number of samples that {task.function} returns, "
            f"{profile.batch_size}. Received: --microbatch {task.microbatch}"
        )


def _on_all_ranks(action: Callable[[], Found]) -> Found:
    """Call `action` and return its result. An HvpipeError on any rank is printed once, and ends all ranks."""
    message, found = None, None
    try:
        found = action()
    except HvpipeError as error:
        message = str(error)
    running = session.current()
    # A slow device measures for minutes longer than a fast one: that is no stall.
    running.agree_patiently("hvpipe profile (a rank may still measure)")
    messages = collectives.allgather_object(message)
    failed = [rank for rank, received in enumerate(messages) if received is not None]
    if failed:
        if session.rank() == failed[0]:
            print(f"hvpipe profile: {message}", file=sys.stderr, flush=True)
        raise SystemExit(_WRONG_USAGE)
    assert message is None
    return found  # type: ignore[return-value]  # it may itself be None


def _reporter() -> Callable[[int, int, str], None]:
    """Return a function that prints the progress every few seconds."""
    reported_s = time.monotonic()

    def report(done: int, count: int, name: str) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s >= _REPORT_EVERY_S and done < count:
            reported_s = time.monotonic()
            print(f"layer {done + 1} of {count}: {name}", file=sys.stderr, flush=True)

    return report


def _shown(path: str) -> str:
    """Return a path relative to the working directory if it is below it."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    main(sys.argv[1:])
