"""What `hvpipe doctor --all-hosts` makes of the facts of all hosts: what differs, and what of it matters."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from hvpipe.commands.host_facts import LEAST_SHARED_BYTES, NOT_INSTALLED, UNLIMITED

Facts = Mapping[str, Any]
"""The facts of a host: those of `host_facts`, with "host", "ranks", "cores", "clock_s" and "size"."""
State = Literal["same", "differs", "problem"]

MOST_CLOCK_S = 1.0
"""How far the clocks of hosts may be apart: beyond it logs and shared files have a wrong order."""

_SAME_ON_ALL = {
    "hvpipe": "install the same version on all hosts, at the same path",
    "code": "the Python files of hvpipe differ: install the same version on all hosts",
    "build": "build hvpipe once and install that wheel on all hosts",
    "TensorFlow": "install the same version on all hosts",
    "Keras": "install the same version on all hosts",
    "MPI": "load the same MPI on all hosts",
}
_PACE = "the slowest host sets the pace of all"


@dataclass(frozen=True)
class Row:
    """What the hosts have of one thing: values, each with its hosts. A "problem" has advice."""

    name: str
    state: State
    values: tuple[tuple[str, tuple[str, ...]], ...]
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        values = [{"value": value, "hosts": list(hosts)} for value, hosts in self.values]
        return {"name": self.name, "state": self.state, "values": values, "advice": self.advice}


def compare(hosts: Sequence[Facts], failure: str = "") -> list[Row]:
    """Return a row for each thing that the hosts have.

    Args:
        hosts: The facts of one host each.
        failure: Why nothing can carry data between the ranks; "": something does.
    """
    rows = [_must_be_same(hosts, name, advice) for name, advice in _SAME_ON_ALL.items()]
    rows += [_python(hosts), _missing(hosts), _engine(hosts)]
    rows += [_may_differ(hosts, name, itemgetter(name)) for name in ("NumPy", "mpi4py")]
    rows += [_networks(hosts, not failure), _cards(hosts), _clocks(hosts), _shared_memory(hosts)]
    rows += [_open_files(hosts), _locked_memory(hosts), _ports(hosts), *_pace(hosts)]
    rows.append(_may_differ(hosts, "kernel", lambda facts: str(facts["kernel"])))
    if failure:
        rows.append(Row("data", "problem", ((failure, tuple(str(facts["host"]) for facts in hosts)),)))
    return [row for row in rows if row.values]


def to_text(hosts: Sequence[Facts], rows: Sequence[Row], network: str, colours: bool) -> str:
    """Return one table: first what is the same on all hosts, then what differs, with the hosts."""
    ranks = ", ".join(f"{facts['host']} ({facts['ranks']})" for facts in hosts)
    lines = [f"hosts and their ranks: {ranks}", f"data between ranks: {network}"]
    same = [row for row in rows if row.state == "same"]
    if same:
        lines += ["", f"the same on {'this host' if len(hosts) == 1 else f'all {len(hosts)} hosts'}:"]
        lines += [f"{_mark('ok', colours)} {row.name:<14} {row.values[0][0]}" for row in same]
    other = [row for row in rows if row.state != "same"]
    if other:
        lines += ["", "different, or too little:"]
    for row in other:
        width = max(len(value) for value, _ in row.values)
        for number, (value, names) in enumerate(row.values):
            mark = _mark("~" if row.state == "differs" else "!!", colours) if number == 0 else "   "
            lines.append(f"{mark} {row.name if number == 0 else '':<14} {value:<{width}}  {_listed(names)}")
        if row.advice:
            lines.append(f"{'':<18} -> {row.advice}")
    problems = sum(row.state == "problem" for row in rows)
    lines += ["", f"Matters: {problems}." if problems else "Nothing that matters differs."]
    return "\n".join(lines)


def _mark(text: str, colours: bool) -> str:
    colour = {"ok": 32, "~": 33, "!!": 31}[text]
    return f"\033[{colour}m{text:<3}\033[0m" if colours else f"{text:<3}"


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _row(
    hosts: Sequence[Facts], name: str, show: Callable[[Facts], str], bad: bool | None = None, advice: str = ""
) -> Row:
    """Group the hosts by what `show` returns. `bad`: a problem; None: no problem, whatever differs."""
    groups: dict[str, list[str]] = {}
    for facts in hosts:
        groups.setdefault(show(facts), []).append(str(facts["host"]))
    # The value of most hosts first.
    values = tuple((value, tuple(names)) for value, names in sorted(groups.items(), key=lambda g: -len(g[1])))
    state: State = "problem" if bad else "same" if len(values) == 1 else "differs"
    return Row(name, state, values, advice if state != "same" else "")


def _must_be_same(hosts: Sequence[Facts], name: str, advice: str) -> Row:
    return _row(
        hosts, name, lambda facts: str(facts[name]), len({facts[name] for facts in hosts}) > 1, advice
    )


def _may_differ(hosts: Sequence[Facts], name: str, show: Callable[[Facts], str], advice: str = "") -> Row:
    return _row(hosts, name, show, None, advice)


def _python(hosts: Sequence[Facts]) -> Row:
    """Compare what the ranks compare: 3.11.2 and 3.11.7 train together."""
    minors = {tuple(facts["Python"].split(".")[:2]) for facts in hosts}
    return _row(
        hosts, "Python", lambda facts: facts["Python"], len(minors) > 1, "use one Python on all hosts"
    )


def _missing(hosts: Sequence[Facts]) -> Row:
    names = ("TensorFlow", "Keras", "NumPy", "mpi4py")
    lacking = [facts for facts in hosts if any(facts[name] == NOT_INSTALLED for name in names)]
    return _row(
        lacking,
        "packages",
        lambda facts: "no " + ", ".join(name for name in names if facts[name] == NOT_INSTALLED),
        bool(lacking),
        "install them on all hosts",
    )


def _engine(hosts: Sequence[Facts]) -> Row:
    broken = any(facts["engine"] != "loads" for facts in hosts)
    return _row(
        hosts, "engine", lambda facts: facts["engine"], broken, "`hvpipe doctor` on that host says more"
    )


def _networks(hosts: Sequence[Facts], connected: bool) -> Row:
    """The networks that all hosts are in, if there is one. Routers may connect others, as those of pods."""

    def of(facts: Facts) -> dict[str, str]:
        named = ((ipaddress.ip_interface(address), name, mbit) for name, address, mbit in facts["interfaces"])
        return {str(at.network): f"{name} {mbit / 1000:g} Gb/s" if mbit else name for at, name, mbit in named}

    shared = set.intersection(*(set(of(facts)) for facts in hosts))
    bad = not connected and not all(facts["interfaces"] for facts in hosts)
    advice = "a host has no address for others; name the interface of its network with --net"
    show = (
        (lambda facts: _joined(of(facts), shared))
        if shared
        else (lambda facts: _joined(of(facts), of(facts)))
    )
    return _row(hosts, "networks", show, bad, advice if bad else "")


def _joined(named: Mapping[str, str], networks: Any) -> str:
    listed = sorted(f"{network} ({name})" for network, name in named.items() if network in networks)
    return ", ".join(listed) or "none but loopback"


def _cards(hosts: Sequence[Facts]) -> Row:
    some = {bool(facts["card"]) for facts in hosts}
    advice = "MPI uses fast cards only if all hosts have one"
    return _row(hosts, "fast card", lambda facts: facts["card"] or "none", len(some) > 1, advice)


def _clocks(hosts: Sequence[Facts]) -> Row:
    farthest_s = max(abs(facts["clock_s"]) for facts in hosts)
    first = hosts[0]["host"]
    if farthest_s <= MOST_CLOCK_S:
        told = hosts if len(hosts) > 1 else ()
        return _row(told, "clocks", lambda _: f"at most {_time(farthest_s)} apart")

    def show(facts: Facts) -> str:
        return f"{facts['clock_s']:+.2f} s against {first}" if facts["clock_s"] else "0"

    return _row(
        hosts, "clocks", show, True, "set the clocks by NTP (chrony); logs and files of several hosts mix up"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else "0.1 ms"


def _size(amount: int | None) -> str:
    if amount is None or amount == UNLIMITED:
        return "unknown" if amount is None else "unlimited"
    return f"{amount / 1e9:.1f} GB" if amount >= 1e8 else f"{amount / 1e6:.2f} MB"


def _shared_memory(hosts: Sequence[Facts]) -> Row:
    def is_short(facts: Facts) -> bool:
        return facts["ranks"] > 1 and int(facts.get("shared_free_bytes", 0)) < LEAST_SHARED_BYTES

    def show(facts: Facts) -> str:
        size = _size(facts.get("shared_bytes"))
        return f"{size}, {facts.get('shared_free_bytes', 0) / 1e6:.0f} MB free" if is_short(facts) else size

    advice = f"{LEAST_SHARED_BYTES / 1e6:.0f} MB should be free (docker run --shm-size=2g)"
    return _row(hosts, "/dev/shm", show, any(map(is_short, hosts)), advice)


def _open_files(hosts: Sequence[Facts]) -> Row:
    wanted = 256 + 4 * hosts[0]["size"]  # connections of MPI and hvpipe to each rank, and files of TensorFlow
    bad = any(facts["open_files"] != UNLIMITED and facts["open_files"] < wanted for facts in hosts)
    advice = f"a rank of this job may need {wanted}: raise the limit (ulimit -n)" if bad else ""
    return _row(hosts, "open files", lambda facts: _count(facts["open_files"]), bad, advice)


def _count(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _locked_memory(hosts: Sequence[Facts]) -> Row:
    bad = any(facts["card"] and facts["locked_bytes"] != UNLIMITED for facts in hosts)
    advice = "cards pin memory: ulimit -l unlimited (in a container --ulimit memlock=-1)" if bad else ""
    return _row(hosts, "locked memory", lambda facts: _size(facts["locked_bytes"]), bad, advice)


def _ports(hosts: Sequence[Facts]) -> Row:
    """Ports of a range that was asked for; some are taken by the ranks that count."""

    def show(facts: Facts) -> str:
        free = facts["ports_free"]
        return facts["ports"] if free is None else f"{facts['ports']}, {free} free"

    bad = any(facts["ports_free"] == 0 for facts in hosts)
    return _row(hosts, "ports", show, bad, "a host needs a port for the launcher and two for each rank")


def _pace(hosts: Sequence[Facts]) -> list[Row]:
    def gpus(facts: Facts) -> str:
        names = sorted(set(facts["gpus"]))
        return ", ".join(f"{facts['gpus'].count(name)} x {name}" for name in names) or "none"

    def short(facts: Facts) -> bool:
        return 0 < len(facts["gpus"]) < int(facts["ranks"])

    some = {bool(facts["gpus"]) for facts in hosts}
    lacking = len(some) > 1 or any(map(short, hosts))
    advice = "each rank should have a GPU of its own, or none of the ranks" if lacking else _PACE
    return [
        _may_differ(hosts, "CPU", lambda facts: facts["cpu"], _PACE),
        _may_differ(hosts, "cores a rank", lambda facts: f"{facts['cores'] / facts['ranks']:g}", _PACE),
        _may_differ(hosts, "memory", lambda facts: _size(facts["memory_bytes"]), _PACE),
        _row(hosts, "GPUs", gpus, lacking, advice),
        _may_differ(hosts if True in some else (), "GPU driver", lambda facts: facts["driver"] or "none"),
    ]
