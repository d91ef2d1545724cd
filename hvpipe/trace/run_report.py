"""Summarises a run: step time, images/s, hidden communication, utilization of hosts and GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.trace.computing_time import computing, length, merged, union, within
from hvpipe.trace.events import Trace

COMMUNICATION = ("reduce", "transfer")
"""Trace categories of communication, which computing can hide."""

_FIGURE = (int, float, type(None))
_OF_A_SUMMARY = {"ranks": int, "steps": int}


@dataclass(frozen=True)
class Summary:
    """The figures of one run; None if unknown.

    `step_s` is the median over all ranks' steps without the first, which traces and compiles. `hidden_share`
    is the time in which communication and computing ran together, over the time of communication, summed over
    the ranks. `system_share` is the mean share of the hosts' cores that were busy; `process_cores` is the
    number of cores that all ranks together kept busy. Bytes are summed over the ranks. Mean power and energy
    are summed over the GPUs; two ranks may share a GPU. GPU memory is the largest on any GPU.
    """

    ranks: int
    steps: int
    step_s: float | None
    images_per_s: float | None
    hidden_share: float | None
    exposed_wait_s: float | None
    system_share: float | None
    process_cores: float | None
    gpu_share: float | None
    bytes_sent: int | None
    gpu_memory_peak_bytes: int | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values by field name."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Summary:
        """Return the summary that `to_json` made."""
        return Summary(**document)

    def to_line(self) -> str:
        """Return the known figures on one line."""
        head = f"hvpipe: {_plural(self.ranks, 'rank')}, {_plural(self.steps, 'step')}"
        return ", ".join([head, *(f"{label} {value}" for label, value in self._figures())])

    def to_text(self) -> str:
        """Return the known figures, one per line."""
        rows = [("ranks", str(self.ranks)), ("steps", str(self.steps)), *self._figures()]
        return "\n".join(f"{label:<22}{value}" for label, value in rows)

    def _figures(self) -> list[tuple[str, str]]:
        figures: list[tuple[str, str]] = []
        if self.step_s is not None:
            figures.append(("step", _duration(self.step_s)))
        if self.images_per_s is not None:
            figures.append(("images/s", f"{self.images_per_s:,.1f}"))
        if self.hidden_share is not None:
            figures.append(("communication hidden", f"{self.hidden_share:.0%}"))
        if self.exposed_wait_s is not None:
            figures.append(("waited", _duration(self.exposed_wait_s)))
        if self.system_share is not None:
            figures.append(("CPU", f"{self.system_share:.0%}"))
        if self.process_cores is not None:
            figures.append(("cores", f"{self.process_cores:.1f}"))
        if self.gpu_share is not None:
            figures.append(("GPU", f"{self.gpu_share:.0%}"))
        if self.gpu_memory_peak_bytes is not None:
            figures.append(("GPU memory", _size(self.gpu_memory_peak_bytes)))
        if self.gpu_power_w is not None:
            figures.append(("GPU power", f"{self.gpu_power_w:,.0f} W"))
        if self.gpu_energy_j is not None:
            figures.append(("GPU energy", f"{self.gpu_energy_j / 3600:,.3g} Wh"))
        if self.bytes_sent is not None:
            figures.append(("sent", _size(self.bytes_sent)))
        return figures


def summarise(
    trace: Trace | None,
    counters: Sequence[Mapping[str, float]],
    step_durations_s: Sequence[Sequence[float]],
    images: int,
    utilization: Sequence[Mapping[str, Any]] = (),
) -> Summary:
    """Summarise a run on rank 0 from the records of all ranks.

    `counters`, `step_durations_s` and `utilization` (`Utilization.to_json()`) have one entry per rank.
    `images` counts the samples of all ranks over all steps. Without step durations, the trace's "step" events
    serve. Without a trace, hidden communication is unknown, and utilization comes only from `utilization`.
    """
    if images < 0:
        raise HvpipeError(f"images should be a number of samples, at least 0. Received: images={images}")
    if not any(step_durations_s) and trace is not None:
        step_durations_s = [[e.duration_s for e in trace.of("step", rank)] for rank in trace.ranks()]
    steps = max((len(durations) for durations in step_durations_s), default=0)
    later = [
        s for durations in step_durations_s for s in (durations[1:] if len(durations) > 1 else durations)
    ]
    step_s = median(later) if later else None
    busy: list[Mapping[str, Any]] = list(utilization) or (
        [_sampled(trace, rank) for rank in trace.ranks()] if trace is not None else []
    )
    gpus = {u.get("gpu") or f"of rank {rank}": u for rank, u in enumerate(busy)}.values()
    return Summary(
        ranks=max(len(counters), len(step_durations_s), len(trace.ranks()) if trace is not None else 0),
        steps=steps,
        step_s=step_s,
        images_per_s=images / steps / step_s if images and steps and step_s else None,
        hidden_share=hidden_share(trace) if trace is not None else None,
        exposed_wait_s=_mean(c.get("exposed_wait_s") for c in counters),
        system_share=_mean(u.get("system_share") for u in busy),
        process_cores=_total(u.get("process_cores") for u in busy),
        gpu_share=_mean(u.get("gpu_share") for u in busy),
        bytes_sent=_whole(_total(c.get("bytes_sent") for c in counters)),
        gpu_memory_peak_bytes=max(
            (u["gpu_memory_peak_bytes"] for u in busy if u.get("gpu_memory_peak_bytes")), default=None
        ),
        gpu_power_w=_total(u.get("gpu_power_w") for u in gpus),
        gpu_energy_j=_total(u.get("gpu_energy_j") for u in gpus),
    )


def summarise_trace(trace: Trace) -> Summary:
    """Return the summary in the trace's metadata; without one (a simulated step), make it from the events.

    Raises HvpipeError if the summary or the utilization curves are not numbers.
    """
    written = trace.metadata.get("summary")
    if written is not None:
        names = {column.name for column in fields(Summary)}
        if not isinstance(written, dict) or written.keys() != names:
            raise HvpipeError(f"A trace's summary should hold {sorted(names)}. Received: summary={written!r}")
        if not all(isinstance(value, _OF_A_SUMMARY.get(name, _FIGURE)) for name, value in written.items()):
            raise HvpipeError(f"A trace's summary should hold numbers. Received: summary={written!r}")
        return Summary.from_json(written)
    try:
        return summarise(trace, [], [], 0)
    except (TypeError, ValueError, OverflowError) as error:
        raise HvpipeError(f"In a trace, the utilization should be numbers. Received: {error}") from error


def hidden_share(trace: Trace) -> float | None:
    """Return the share of communication time in which the same rank computed; None if unknown.

    Time in which computing waited for communication does not count, as far as the trace shows it: see
    `computing`.

    compute | ####  ######          hidden = 4 of 7
    reduce  |   ####   ###
    """
    communicated_s = hidden_s = computed_s = 0.0
    for rank in trace.ranks():
        reduce = union(event for category in COMMUNICATION for event in trace.of(category, rank))
        compute = merged(interval for intervals in computing(trace, rank).values() for interval in intervals)
        communicated_s += length(reduce)
        computed_s += length(compute)
        hidden_s += length(within(reduce, compute))
    return hidden_s / communicated_s if communicated_s > 0 and computed_s > 0 else None


def _sampled(trace: Trace, rank: int) -> dict[str, Any]:
    """Return the means of a rank's utilization curves, under the names of Utilization's fields."""
    samples = trace.of("utilization", rank)

    def mean(curve: str, key: str) -> float | None:
        return _mean(event.args.get(key) for event in samples if event.name == curve)

    return {
        "process_cores": mean("cores busy with this rank", "cores"),
        "system_share": mean("host busy", "share"),
        "gpu_share": mean("GPU busy", "share"),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _duration(value_s: float) -> str:
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"


def _size(value_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value_bytes < 1000:
            return f"{value_bytes:.4g} {unit}"
        value_bytes /= 1000
    return f"{value_bytes:,.1f} TB"
