"""Says in words what ended a job, from the flight recorders of its ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvpipe.blackbox.files import SUFFIX, Flight, FlightEvent, read_flight, to_json
from hvpipe.blackbox.running import runs
from hvpipe.errors import HvpipeError, listed

LOST_A_PEER = ("DeadlineError", "DeadlineExceededError", "PeerError", "UnavailableError")
"""Errors of a rank that lost another one. Any other error is its own."""
_BEAT_S = 1.0
"""A rank that lives gives a sign of life within this time, also on a busy host."""
_FROZEN_S = 2.0
"""A recorder notes that its rank did not run for this long."""
_THAWED_S = 3.0
"""The launcher wakes a stopped rank up to end it."""
_ALONE_S = 0.05
"""The launcher sends SIGTERM to all ranks within a shorter time."""
_LATELY_S = 10.0
"""Clocks of two hosts hardly differ by more."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_MOST_NAMED = 8
_WORTH_SAYING_S = 0.5
_ABORTED = 1
"""The exit code of a job that a rank has aborted."""
_BY_SIGNAL = 128
"""Exit codes of jobs that a signal has ended begin here."""


@dataclass(frozen=True)
class Wait:
    """An operation that a rank was ready for and that did not end."""

    what: str
    sequence: int
    since_s: float


@dataclass(frozen=True)
class Records:
    """The recorders of one start of a job.

    Attributes:
        folder: Where they are.
        flights: The recorders, by rank.
        problems: What is wrong with some of them.
        running: Ranks that still run.
        ended: If some do, the newest of the other starts that has ended.
    """

    folder: Path
    flights: tuple[Flight, ...]
    problems: tuple[str, ...]
    running: frozenset[int] = frozenset()
    ended: Path | None = None


def read_records(folder: Path) -> Records:
    """Read a folder of recorders, or the newest start in a folder of several.

    Raises:
        HvpipeError: There is none.
    """
    if not os.path.isdir(folder):
        raise HvpipeError(f"There is no folder {folder}. DIR should be that of a flight recorder")
    if any(folder.glob(f"*{SUFFIX}")):
        return _of_start(folder)
    starts = {path.parent for path in folder.glob(f"*/*{SUFFIX}")}
    if not starts:
        raise HvpipeError(
            f"{folder} has no files of flight recorders (*{SUFFIX}). Ranks that do not end properly leave "
            "them in the folder of --flight-recorder"
        )
    newest, *others = newest_first(starts)
    found = _of_start(newest)
    if not found.running:
        return found
    return replace(found, ended=next((one for one in others if not _of_start(one).running), None))


def newest_first(starts: Iterable[Path]) -> list[Path]:
    """Return the folders of starts, the one that changed last first."""

    def changed_s(folder: Path) -> float:
        try:
            return folder.stat().st_mtime
        except OSError:  # it was removed meanwhile
            return 0.0

    return sorted(starts, key=lambda start: (changed_s(start), start.name), reverse=True)


def _of_start(folder: Path) -> Records:
    flights, problems = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            flights.append(read_flight(path))
        except HvpipeError as error:
            problems.append(str(error))
    flights.sort(key=lambda flight: flight.rank)
    if flights and (missing := sorted(set(range(flights[0].size)) - {flight.rank for flight in flights})):
        problems.append(
            f"There is no record of {_ranks(missing)}: it ended properly, or its file is on another host"
        )
    return Records(folder, tuple(flights), tuple(problems), _running(flights))


def _running(flights: Sequence[Flight]) -> frozenset[int]:
    """Return the ranks that still run. If some of this host do, others heard as recently count, too."""
    here = [one for one in flights if runs(one)]
    if not here:
        return frozenset()
    hosts, lately_s = {one.host for one in here}, max(one.heard_s for one in here) - _LATELY_S
    away = [one for one in flights if one.host not in hosts and one.ended_s is None]
    return frozenset(one.rank for one in (*here, *(one for one in away if one.heard_s > lately_s)))


def _first_ended(records: Records) -> Flight | None:
    """Return the rank that ended the job, or ended first while others still run."""
    ended = _ended(records)
    first = first_to_end(ended)
    if first is None and records.running:
        return min(ended, key=_end_s, default=None)
    return first


def first_to_end(flights: Sequence[Flight]) -> Flight | None:
    """Return the rank that ended the job; None if all were alive and waited."""
    if not flights:
        return None
    own = [one for one in flights if _ended_by_itself(one)]
    first = min(own, key=_end_s, default=None)
    lost = [one.ended_s for one in flights if one.ended_s is not None and _lost_a_peer(one)]
    launcher = [one.ended_s for one in flights if one.ended_s is not None and _ended_by_sigterm(one)]
    if len(launcher) == len(flights) > 1 and len({one.host for one in flights}) == 1:  # one clock
        sooner, later = sorted(flights, key=_end_s)[:2]
        return sooner if _end_s(later) - _end_s(sooner) > _ALONE_S else None
    # Ranks that the launcher killed also end without a word, but after others have noticed the loss.
    known_s = min([*([_end_s(first)] if first else []), *lost, *launcher], default=None)
    silent = [one for one in flights if one.ended_s is None]
    earliest = min(silent, key=_end_s, default=None)
    if earliest is None or (first is not None and _end_s(earliest) > _end_s(first) - _BEAT_S):
        return first
    # The launcher wakes a stopped rank up to end it, so its last sign of life may be newer than the others'.
    if any(
        one.frozen and _ended_frozen(one) and one.frozen[0] < _end_s(earliest) - _FROZEN_S for one in flights
    ):
        return None
    if known_s is None and len(silent) == len(flights):
        return earliest if max(map(_end_s, silent)) - _end_s(earliest) > _BEAT_S else None
    return earliest if known_s is None or _end_s(earliest) <= known_s + _BEAT_S else first


def open_wait(flight: Flight) -> Wait | None:
    """Return what a rank had waited for longest when it ended."""
    ready: dict[int, FlightEvent] = {}
    for event in flight.events:
        if event.kind == "ready":
            ready[event.sequence] = event
        elif event.kind == "done":
            ready.pop(event.sequence, None)
    if not ready:
        return None
    event = min(ready.values(), key=lambda one: one.at_s)
    return Wait(event.what, event.sequence, event.at_s)


def to_text(records: Records) -> str:
    """Return what happened, in words."""
    flights = records.flights
    lines = [
        f"{records.folder}: {len(flights)} of {flights[0].size if flights else '?'} ranks left a record."
    ]
    lines += [f"  {problem}" for problem in records.problems]
    if not flights:
        return "\n".join(lines)
    lines.append(f"What happened: {_so_far(records)}")
    if records.ended is not None:
        lines.append(f"The newest start that has ended: hvpipe blackbox {records.ended}")
    first = _first_ended(records)
    for flight in flights:
        ended = f"ended {_end_words(flight, first=flight is first)}"
        if flight.rank in records.running:
            ended = f"still runs, its last sign of life at {_clock(flight.heard_s)}"
        lines.append(f"  rank {flight.rank} on {flight.host}: {flight.steps} steps begun; {ended}")
        if flight.frozen is not None:
            lines.append(f"    {_frozen_words(flight)}")
        wait = open_wait(flight)
        if wait is not None:
            waited_s = _end_s(flight) - wait.since_s
            lines.append(f"    had waited {waited_s:.1f} s in {wait.what}")
        lines += [f"    {_clock(event.at_s)} {event.what}" for event in _said(flight)]
    return "\n".join(lines)


def _ended(records: Records) -> list[Flight]:
    return [one for one in records.flights if one.rank not in records.running]


def _so_far(records: Records) -> str:
    """Return the verdict, and which ranks still run."""
    if not records.running:
        return verdict(records.flights)
    many = len(records.running) > 1
    still = f"{_ranks(sorted(records.running))} still {'run' if many else 'runs'}."
    first = _first_ended(records)
    return f"nothing yet: {still}" if first is None else f"{_ended_first(first)}. {still.capitalize()}"


def verdict(flights: Sequence[Flight], code: int | None = None) -> str:
    """Return who ended first and why, and who waited for it, in one or two sentences.

    Args:
        flights: The recorders.
        code: The exit code of the job, if it is known.
    """
    first = first_to_end(flights)
    waiting = {one.rank: wait for one in flights if one is not first and (wait := open_wait(one)) is not None}
    if first is not None:
        said = _ended_first(first, code)
    else:
        late = [one.rank for one in flights if one.rank not in waiting]
        if frozen := [one for one in flights if _ended_frozen(one)]:
            longest = max(frozen, key=_frozen_s)
            waiting = {rank: wait for rank, wait in waiting.items() if rank != longest.rank}
            said = f"{_name(longest)} {_frozen_words(longest)}"
        elif all(one.ended_s is None for one in flights):
            return _all_killed(flights)
        elif not waiting:
            return "All ranks ended at the same time, and none of them waited for another."
        elif late:
            said = f"{_ranks(late).capitalize()} lived, but did not come to what the others waited for"
        else:
            said = (
                "All ranks waited, and none ended before the others: a link between two of them was down or "
                "slow, or they waited for different things"
            )
    by_rank = {one.rank: one for one in flights}
    waited = {rank: _end_s(by_rank[rank]) - wait.since_s for rank, wait in waiting.items()}
    waited_s = max(waited.values(), default=0.0)
    if waited_s < _WORTH_SAYING_S:
        return f"{said}."
    wait = waiting[max(waited, key=waited.__getitem__)]
    return f"{said}. {_ranks(sorted(waiting)).capitalize()} waited, up to {waited_s:.1f} s, in {wait.what}."


def _ended_first(first: Flight, code: int | None = None) -> str:
    steps = f", having begun {first.steps} steps" if first.steps else ""
    return f"{_name(first)} ended first{steps}, {_end_words(first, code, first=True)}"


def _all_killed(flights: Sequence[Flight]) -> str:
    pids = listed(f"rank {one.rank} on {one.host} is {one.pid}" for one in flights)
    return (
        "All ranks were killed within a second (SIGKILL, or the host's memory was used up). Launchers "
        "kill the others after the loss of a host, MPICH's also after that of a rank: its "
        f"message names the first. Pids: {pids}."
    )


def document(records: Records) -> dict[str, Any]:
    """Return all that is known as JSON."""
    first = _first_ended(records)
    waits = {one.rank: open_wait(one) for one in records.flights}
    return {
        "folder": str(records.folder),
        "problems": list(records.problems),
        "verdict": _so_far(records) if records.flights else None,
        "ended_start": None if records.ended is None else str(records.ended),
        "first": None if first is None else first.rank,
        "ranks": [
            {
                **to_json(one),
                "running": one.rank in records.running,
                "waited_in": None if (wait := waits[one.rank]) is None else wait.what,
                "waited_s": None if wait is None else _end_s(one) - wait.since_s,
            }
            for one in records.flights
        ],
    }


def _end_s(flight: Flight) -> float:
    return flight.heard_s if flight.ended_s is None else flight.ended_s


def _lost_a_peer(flight: Flight) -> bool:
    return flight.why.partition(":")[0] in LOST_A_PEER


def _ended_by_itself(flight: Flight) -> bool:
    """Tell whether an error or a crash of its own ended this rank."""
    return flight.ended_s is not None and not _ended_by_sigterm(flight) and not _lost_a_peer(flight)


def _ended_by_sigterm(flight: Flight) -> bool:
    """Tell whether SIGTERM ended this rank. One that handled it, and failed after that, has an error."""
    return flight.signal == signal.SIGTERM and not flight.why


def _end_words(flight: Flight, code: int | None = None, first: bool = False) -> str:
    at = _clock(_end_s(flight))
    if flight.ended_s is None:
        said = f"without a word, its last sign of life at {at}: "
        if code is not None and _ABORTED < code < _BY_SIGNAL:
            return f"{said}it exited with code {code}, without an exception (os._exit, or a library's exit)"
        return (
            f"{said}it was killed (SIGKILL, or the host's memory was used up) or stopped, it left by "
            "os._exit, or its host was lost"
        )
    if flight.why:
        return f"at {at} by {flight.why.partition(chr(10))[0]}"
    if _ended_by_sigterm(flight):
        return f"at {at} by SIGTERM, " + (
            "which came to this rank first" if first else "as the launcher ends the others"
        )
    name = _signal_name(flight.signal)
    return f"at {at} by a crash: {name}" if flight.signal in _CRASHES else f"at {at} by {name}"


def _name(flight: Flight) -> str:
    return f"Rank {flight.rank} on {flight.host} (pid {flight.pid})"


def _frozen_s(flight: Flight) -> float:
    return 0.0 if flight.frozen is None else flight.frozen[1] - flight.frozen[0]


def _ended_frozen(flight: Flight) -> bool:
    """Tell whether this rank did not run until shortly before its end."""
    return flight.frozen is not None and _end_s(flight) - flight.frozen[1] < _THAWED_S


def _frozen_words(flight: Flight) -> str:
    assert flight.frozen is not None
    since, until = map(_clock, flight.frozen)
    return f"did not run from {since} to {until}: it was stopped (SIGSTOP), or its host was frozen"


def _said(flight: Flight) -> list[FlightEvent]:
    return [event for event in flight.events if event.kind in ("note", "stalled", "failed")][-3:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _clock(unix_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(unix_s)) + f".{int(unix_s * 10 % 10)}"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 0, 1, 3" or a shortened list."""
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
