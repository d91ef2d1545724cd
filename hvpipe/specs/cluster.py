"""A cluster: devices with speed and memory, their hosts, and the links between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from hvpipe.config_file import Document, Table, fingerprint, short
from hvpipe.errors import HvpipeError, listed

FORMAT, VERSION = "hvpipe-cluster", 1

MOST_HOSTS = 1 << 16
"""The largest `count` of a host."""


Port = tuple[str, str]
"""One direction of the link of a host or a rack: ("out of", its name), ("into", its name), or the same with
"out of rack" and "into rack"."""


@dataclass(frozen=True)
class Device:
    """A processor that runs one rank.

    Args:
        name: Unique name in the cluster.
        speed: Relative speed, above 0. A layer takes its profiled seconds divided by this speed.
        memory_bytes: Memory that training may use, in bytes; None for no limit.
        type: The type whose `time_s` in a profile count; empty for the profile's usual times.

    Raises:
        HvpipeError: If a value is out of range.

    Example:
        ```python
        slow = Device("old/gpu0", speed=0.5, memory_bytes=8_000_000_000)
        ```
    """

    name: str
    speed: float = 1.0
    memory_bytes: int | None = None
    type: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise HvpipeError(
                f"speed of device {self.name!r} should be above 0. Received: speed={self.speed}"
            )
        if self.memory_bytes is not None and not 0 <= self.memory_bytes < math.inf:
            raise HvpipeError(
                f"memory_bytes of device {self.name!r} should be at least 0 or None. "
                f"Received: memory_bytes={self.memory_bytes}"
            )
        # Convert to the types that a file gives: the fingerprints of 1 and 1.0 differ.
        object.__setattr__(self, "speed", float(self.speed))
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", int(self.memory_bytes))

    @property
    def room_bytes(self) -> float:
        """Memory that training may use, in bytes; infinite without a limit."""
        return math.inf if self.memory_bytes is None else float(self.memory_bytes)


@dataclass(frozen=True)
class Link:
    """A connection in the alpha-beta model (Hockney, 1994): a message takes latency + bytes / bandwidth.

    Args:
        latency_s: Seconds per message, at least 0.
        bandwidth_bytes_per_s: Bytes per second, above 0; infinite for no limit.

    Raises:
        HvpipeError: If a value is out of range.

    Example:
        ```python
        ethernet = Link(latency_s=1e-4, bandwidth_bytes_per_s=1.25e9)
        ethernet.time_s(1_250_000)  # 0.0011 s
        ```
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise HvpipeError(
                f"latency_s should be finite and at least 0. Received: latency_s={self.latency_s}"
            )
        if not self.bandwidth_bytes_per_s > 0:
            raise HvpipeError(
                "bandwidth_bytes_per_s should be above 0. "
                f"Received: bandwidth_bytes_per_s={self.bandwidth_bytes_per_s}"
            )
        object.__setattr__(self, "latency_s", float(self.latency_s))
        object.__setattr__(self, "bandwidth_bytes_per_s", float(self.bandwidth_bytes_per_s))

    def time_s(self, size_bytes: float, messages: int = 1) -> float:
        """Return the seconds that `size_bytes` take in this number of messages, one after the other."""
        return messages * self.latency_s + size_bytes / self.bandwidth_bytes_per_s

    def joined(self, other: Link) -> Link:
        """Return the path over both links: the longer latency, the smaller bandwidth."""
        return Link(
            max(self.latency_s, other.latency_s),
            min(self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s),
        )


@dataclass(frozen=True)
class Host:
    """Devices that share a machine.

    Args:
        name: Unique name in the cluster.
        devices: The devices of this host.
        link: The link to the network, the same in each direction.
        inner: The link between any two devices of this host.
        rack: The name of its rack; empty if it is in none.

    Example:
        ```python
        Host("node1", (Device("node1:0"), Device("node1:1")), Link(1e-4, 1.25e9), rack="left")
        ```
    """

    name: str
    devices: tuple[Device, ...]
    link: Link = Link()
    inner: Link = Link()
    rack: str = ""


@dataclass(frozen=True)
class Rack:
    """Hosts that share a link to the other racks, and to hosts without a rack.

    Args:
        name: Unique name among the racks.
        link: The link, the same in each direction.

    Example:
        ```python
        Cluster(hosts, racks=(Rack("left", Link(1e-4, 5e9)), Rack("right", Link(1e-4, 5e9))))
        ```
    """

    name: str
    link: Link = Link()


@dataclass(frozen=True)
class Cluster(Document):
    """Hosts around one switch, or in racks whose switches are around one switch.

    Args:
        hosts: The hosts; together they have at least one device.
        measured: Links measured between two devices, as (device name, device name, link). They override what
            the hosts' links give for this pair.
        racks: The racks that hosts are in.
        action_s: Seconds that a rank needs to start an action of a pipeline and to hand over its tensors,
            beside the layers' own time. An action is a forward or a backward of a micro-batch.

    Raises:
        HvpipeError: If `action_s` is negative or not finite, names repeat, a measured link names an unknown
            device, a host an unknown rack, or there is no device.

    Example:
        ```python
        cluster = Cluster.read("cluster.toml")
        cluster.link("new/gpu0", "old/gpu0").bandwidth_bytes_per_s
        ```
    """

    hosts: tuple[Host, ...]
    measured: tuple[tuple[str, str, Link], ...] = ()
    racks: tuple[Rack, ...] = ()
    action_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.action_s < math.inf:
            raise HvpipeError(
                f"action_s should be seconds, finite, from 0. Received: action_s={self.action_s}"
            )
        names = [device.name for device in self.devices]
        if not names:
            raise HvpipeError("A cluster should have at least one device.")
        hosts = [host.name for host in self.hosts]
        racks = [rack.name for rack in self.racks]
        for what, given in (("devices", names), ("hosts", hosts), ("racks", racks)):
            if twice := sorted(name for name, count in Counter(given).items() if count > 1):
                raise HvpipeError(f"Names of {what} should differ. Received: {twice[0]!r} twice")
        if lost := sorted({host.rack for host in self.hosts} - {"", *racks}):
            wanted = f"one of {listed(racks)}" if racks else "left out, as the cluster lists no racks"
            raise HvpipeError(f"A host's rack should be {wanted}. Received: rack={lost[0]!r}")
        for one, other, _ in self.measured:
            if one == other or not {one, other} <= set(names):
                raise HvpipeError(
                    f"A measured link should join two devices of the cluster ({listed(names)}). "
                    f"Received: between=[{short(one)}, {short(other)}]"
                )
        pairs = Counter(frozenset(link[:2]) for link in self.measured)
        if again := [sorted(pair) for pair, count in pairs.items() if count > 1]:
            raise HvpipeError(
                f"Two devices should have at most one measured link. Received: between={again[0]} twice"
            )

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, host by host."""
        return tuple(device for host in self.hosts for device in host.devices)

    @cached_property
    def _device(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _host_of(self) -> dict[str, Host]:
        return {device.name: host for host in self.hosts for device in host.devices}

    @cached_property
    def _measured(self) -> dict[frozenset[str], Link]:
        return {frozenset((one, other)): link for one, other, link in self.measured}

    def device(self, name: str) -> Device:
        """Return the device of this name; raise HvpipeError if the cluster has none."""
        if name not in self._device:
            raise HvpipeError(f"A device should be one of {listed(self._device)}. Received: device={name!r}")
        return self._device[name]

    def only(self, names: Container[str]) -> Cluster:
        """Return the cluster without the devices of other names, and without hosts that then have none."""
        hosts = [replace(h, devices=tuple(d for d in h.devices if d.name in names)) for h in self.hosts]
        measured = tuple(link for link in self.measured if link[0] in names and link[1] in names)
        return replace(self, hosts=tuple(host for host in hosts if host.devices), measured=measured)

    def host_of(self, device: str) -> Host:
        """Return the host of the device of this name."""
        return self._host_of[self.device(device).name]

    def link(self, one: str, other: str) -> Link:
        """Return the link between two devices: as measured, else from the links of their hosts.

        A device reaches itself in no time.
        """
        if one == other:
            return Link()
        if found := self._measured.get(frozenset((one, other))):
            return found
        a, b = self.host_of(one), self.host_of(other)
        if a is b:
            return a.inner
        between = a.link.joined(b.link)
        if a.rack != b.rack:
            for rack in (self._racks[name] for name in (a.rack, b.rack) if name):
                between = between.joined(rack.link)
        return between

    @cached_property
    def _racks(self) -> dict[str, Rack]:
        return {rack.name: rack for rack in self.racks}

    def ports(self, one: str, other: str) -> tuple[tuple[Port, Link], ...]:
        """Return the ports that a message from `one` device to `other` shares with other traffic.

        The result is empty inside a host. Otherwise it has the port out of the sender's host and the port
        into the receiver's, and the same of their racks if these differ. Each comes with the link that this
        port would allow without other limits: the link of the host or rack, or the fastest measured link from
        the host to another.
        """
        source, target = self.host_of(one), self.host_of(other)
        if source is target:
            return ()
        out, into = ("out of", source.name), ("into", target.name)
        found = [(out, self._outward[source.name]), (into, self._outward[target.name])]
        if source.rack != target.rack:
            if source.rack:
                found.append((("out of rack", source.rack), self._racks[source.rack].link))
            if target.rack:
                found.append((("into rack", target.rack), self._racks[target.rack].link))
        return tuple(found)

    @cached_property
    def _outward(self) -> dict[str, Link]:
        found: dict[str, list[Link]] = {host.name: [] for host in self.hosts}
        for one, other, link in self.measured:
            if self.host_of(one) is not self.host_of(other):
                found[self.host_of(one).name].append(link)
                found[self.host_of(other).name].append(link)
        return {
            host.name: max(links, key=lambda link: link.bandwidth_bytes_per_s) if links else host.link
            for host, links in ((host, found[host.name]) for host in self.hosts)
        }

    @cached_property
    def common_link(self) -> Link | None:
        """The link between any two devices if all pairs have the same; else None."""
        pairs = combinations(self.devices if self.measured else self._unlike_devices(), 2)
        links = (self.link(one.name, other.name) for one, other in pairs)
        first = next(links, Link())
        return first if all(link == first for link in links) else None

    def _unlike_devices(self) -> list[Device]:
        """Return two devices of each host, of the first two hosts of each kind; links of others are equal."""
        alike = Counter[tuple[Link, Link, str, bool]]()
        found: list[Device] = []
        for host in self.hosts:
            kind = (host.link, host.inner, host.rack, len(host.devices) > 1)
            alike[kind] += 1
            if alike[kind] <= 2:
                found += host.devices[:2]
        return found

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that identify the cluster: all that `to_json` has."""
        return fingerprint(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as a JSON object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "host": [
                {
                    "name": host.name,
                    "link": _link_json(host.link),
                    "inner": _link_json(host.inner),
                    **({"rack": host.rack} if host.rack else {}),
                    "device": [_device_json(device) for device in host.devices],
                }
                for host in self.hosts
            ],
            "link": [{"between": [one, other], **_link_json(link)} for one, other, link in self.measured],
            **({"rack": [_rack_json(rack) for rack in self.racks]} if self.racks else {}),
            **({"action_s": self.action_s} if self.action_s else {}),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any] | Table, place: str = "The cluster") -> Cluster:
        """Return the cluster of a JSON object, or of a parsed TOML file; these may omit `format` and
        `version`.

        Args:
            document: The result of `to_json`, or the content of a TOML file such as this one:

                ```toml
                [[host]]
                name = "h0"
                link = { latency_s = 1e-4, bandwidth_bytes_per_s = 125e6 }
                [[host.device]]
                name = "h0/gpu0"
                speed = 0.5
                memory_bytes = 16e9
                ```
            place: The document's name in errors.

        Returns:
            The cluster.

        Raises:
            HvpipeError: If a field is missing, unknown or out of range; the message names it.
        """
        table = document if isinstance(document, Table) else Table(document, place)
        if table.has("format"):
            table.check_format(FORMAT, VERSION)
        table.allow(("format", "version", "host", "link", "rack", "action_s"))
        measured = [_measured_link(row) for row in table.tables("link")] if table.has("link") else []
        with table.named_in_errors():
            rows = table.tables("rack") if table.has("rack") else []
            made = [(row, _racks(row)) for row in rows]
            racks = [rack for _, of_row in made for rack in of_row]
            counted = {row.name("name"): of_row for row, of_row in made if row.has("count")}
            hosts = [host for row in table.tables("host") for host in _hosts(row, counted)]
            if any(row.has("count") for row in rows):  # the hosts of a rack side by side
                number = {rack.name: number for number, rack in enumerate(racks)}
                hosts.sort(key=lambda host: number.get(host.rack, -1))
            action_s = table.seconds("action_s") if table.has("action_s") else 0.0
            return Cluster(tuple(hosts), tuple(measured), tuple(racks), action_s)


def equal_cluster(
    count: int, link: Link = Link(), *, speeds: tuple[float, ...] = (1.0,), memory_bytes: int | None = None
) -> Cluster:
    """Return a cluster of `count` hosts h0, h1, ... with one device each, on equal links.

    Args:
        count: Number of hosts.
        link: The link of every host to the network.
        speeds: Relative speeds of the devices, repeated as often as needed.
        memory_bytes: Memory of every device in bytes; None for no limit.

    Returns:
        The cluster; a device has the name of its host.

    Raises:
        HvpipeError: If `count` is below 1, there are no speeds, or one or the memory is not positive.

    Example:
        ```python
        cluster = equal_cluster(4, Link(1e-4, 1.25e9), speeds=(1.0, 0.5))
        ```
    """
    if not speeds:
        raise HvpipeError("speeds should be at least one. Received: speeds=()")
    hosts = (
        Host(f"h{i}", (Device(f"h{i}", speeds[i % len(speeds)], memory_bytes),), link) for i in range(count)
    )
    return Cluster(tuple(hosts))


def _hosts(row: Table, counted: Mapping[str, Sequence[Rack]]) -> list[Host]:
    """Return the host of a row, or `count` hosts like it; in each of its racks, if these have a count."""
    host = _host(row)
    each = [
        replace(_numbered(host, str(i)), rack=rack.name) for i, rack in enumerate(counted.get(host.rack, ()))
    ] or [host]
    count = _count(row, len(each))
    return each if count is None else [_numbered(one, str(i)) for one in each for i in range(count)]


def _count(row: Table, times: int = 1) -> int | None:
    """Return the field `count`, which is limited for `times` such rows together; None if it is missing."""
    if not row.has("count"):
        return None
    count = row.integer("count", minimum=1)
    if count * times > MOST_HOSTS:
        raise HvpipeError(
            f"{row.place}.count should be at most {MOST_HOSTS // times}. Received: count={count}"
        )
    return count


def _numbered(host: Host, number: str) -> Host:
    """Return the host with a number behind its name and those of its devices."""
    devices = tuple(replace(device, name=f"{device.name}-{number}") for device in host.devices)
    return replace(host, name=f"{host.name}-{number}", devices=devices)


def _racks(row: Table) -> list[Rack]:
    row.allow(("name", "count", "link"))
    rack = Rack(row.name("name"), _link(row.table("link")) if row.has("link") else Link())
    count = _count(row)
    return [rack] if count is None else [replace(rack, name=f"{rack.name}-{i}") for i in range(count)]


def _host(row: Table) -> Host:
    row.allow(("name", "count", "rack", "link", "inner", "device"))
    devices = [_device(device) for device in row.tables("device")] if row.has("device") else []
    return Host(
        name=row.name("name"),
        devices=tuple(devices) or (Device(row.name("name")),),
        link=_link(row.table("link")) if row.has("link") else Link(),
        inner=_link(row.table("inner")) if row.has("inner") else Link(),
        rack=row.name("rack") if row.has("rack") else "",
    )


def _device(row: Table) -> Device:
    row.allow(("name", "speed", "memory_bytes", "type"))
    return Device(
        name=row.name("name"),
        speed=row.number("speed", above=0) if row.has("speed") else 1.0,
        memory_bytes=row.integer("memory_bytes") if row.has("memory_bytes") else None,
        type=row.name("type") if row.has("type") else "",
    )


def _measured_link(row: Table) -> tuple[str, str, Link]:
    between = row.texts("between")
    if len(between) != 2:
        raise HvpipeError(f"{row.place}.between should name two devices. Received: between={short(between)}")
    return between[0], between[1], _link(row, "between")


def _link(row: Table, *more: str) -> Link:
    row.allow(("latency_s", "bandwidth_bytes_per_s", *more))
    unlimited = not row.has("bandwidth_bytes_per_s")
    return Link(
        latency_s=row.seconds("latency_s") if row.has("latency_s") else 0.0,
        bandwidth_bytes_per_s=math.inf if unlimited else row.number("bandwidth_bytes_per_s", above=0),
    )


def _rack_json(rack: Rack) -> dict[str, Any]:
    return {"name": rack.name, "link": _link_json(rack.link)}


def _device_json(device: Device) -> dict[str, Any]:
    return {name: value for name, value in asdict(device).items() if name != "type" or value}


def _link_json(link: Link) -> dict[str, float | None]:
    """Return a link as JSON. JSON has no infinity, so an unlimited bandwidth is null."""
    unlimited = math.isinf(link.bandwidth_bytes_per_s)
    return {
        "latency_s": link.latency_s,
        "bandwidth_bytes_per_s": None if unlimited else link.bandwidth_bytes_per_s,
    }
