"""Clusters: link times, TOML and JSON, errors for bad files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster

SLOW, FAST, BUS = Link(1e-3, 1e6), Link(1e-4, 1e9), Link(1e-6, 1e10)
TWO_HOSTS = Cluster(
    (
        Host("h0", (Device("g0"), Device("g1", 0.5, 10**9)), FAST, BUS),
        Host("h1", (Device("g2"),), SLOW),
    )
)


def test_a_link_takes_latency_for_each_message_and_time_for_each_byte() -> None:
    assert SLOW.time_s(2e6) == pytest.approx(2.001)
    assert SLOW.time_s(2e6, messages=3) == pytest.approx(2.003)
    assert Link().time_s(10**12) == 0


def test_the_slower_link_bounds_a_path_between_hosts() -> None:
    assert TWO_HOSTS.link("g0", "g1") == BUS
    assert TWO_HOSTS.link("g1", "g2") == SLOW
    assert TWO_HOSTS.link("g0", "g0") == Link()
    assert TWO_HOSTS.common_link is None
    assert equal_cluster(3, FAST).common_link == FAST
    with pytest.raises(HvpipeError, match="speeds should be at least one"):
        equal_cluster(2, speeds=())


def test_a_measured_link_takes_precedence() -> None:
    cluster = Cluster(TWO_HOSTS.hosts, (("g2", "g0", BUS),))
    assert cluster.link("g0", "g2") == cluster.link("g2", "g0") == BUS


def test_a_message_between_hosts_shares_their_links() -> None:
    assert TWO_HOSTS.ports("g0", "g1") == ()
    assert TWO_HOSTS.ports("g1", "g2") == ((("out of", "h0"), FAST), (("into", "h1"), SLOW))


def test_measured_links_bound_the_ports_of_their_hosts() -> None:
    """A port is the fastest link measured to another host. Links inside a host do not count."""
    hosts = (*TWO_HOSTS.hosts, Host("h2", (Device("g3"),), SLOW))
    slower = Link(1e-3, 2e6)
    cluster = Cluster(hosts, (("g0", "g1", BUS), ("g2", "g0", slower), ("g3", "g2", Link(1e-3, 3e6))))
    assert cluster.ports("g1", "g2") == ((("out of", "h0"), slower), (("into", "h1"), Link(1e-3, 3e6)))


def test_json_round_trip(tmp_path: Path) -> None:
    cluster = Cluster(TWO_HOSTS.hosts, (("g2", "g0", BUS),), action_s=5e-4)
    assert cluster.only({"g0"}).action_s == 5e-4
    cluster.write(tmp_path / "c.json")
    assert Cluster.read(tmp_path / "c.json") == cluster
    assert Cluster.read(tmp_path / "c.json").fingerprint == cluster.fingerprint
    assert cluster.fingerprint != TWO_HOSTS.fingerprint


def test_integers_and_floats_have_the_same_fingerprint(tmp_path: Path) -> None:
    """Regression: a plan for a cluster with integers was refused with the file of that same cluster."""
    cluster = Cluster((Host("h", (Device("g", 1, 16e9),), Link(0, 10**9)),))  # type: ignore[arg-type]
    cluster.write(tmp_path / "c.json")
    assert Cluster.read(tmp_path / "c.json").fingerprint == cluster.fingerprint
    exact = Cluster((Host("h", (Device("g", 1.0, 16 * 10**9),), Link(0.0, 1e9)),))
    assert exact.fingerprint == cluster.fingerprint


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        """
        [[host]]
        name = "h0"
        link = { latency_s = 1e-4, bandwidth_bytes_per_s = 1e9 }
        inner = { latency_s = 1e-6, bandwidth_bytes_per_s = 1e10 }
        [[host.device]]
        name = "g0"
        [[host.device]]
        name = "g1"
        speed = 0.5
        memory_bytes = 1e9
        [[host]]
        name = "h1"
        link = { latency_s = 1e-3, bandwidth_bytes_per_s = 1e6 }
        [[host.device]]
        name = "g2"
        """
    )
    assert Cluster.read(path) == TWO_HOSTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[host]\n", r"c\.toml should be TOML\. .*line 1"),
        ("", r"c\.toml: host is missing, and should be a list of objects"),
        ("host = []", "at least one device"),
        (f'[[host]]\nname = "h"\ncount = 0x{"f" * 4000}', "Received: count=a number of too many digits"),
        ('[[host]]\nname = "h"\nsped = 2', r"host\[0\] should have only .*'sped'"),
        ('[[host]]\nname = "h"\n[[host]]\nname = "h"', "Names of devices should differ. Received: 'h' twice"),
        (
            '[[host]]\nname = "h"\n[[host]]\nname = "h"\n[[host.device]]\nname = "g"',
            "Names of hosts should differ. Received: 'h' twice",
        ),
        (
            '[[host]]\nname = "h"\n[[host.device]]\nname = "g"\nspeed = 0',
            r"host\[0\]\.device\[0\]\.speed should be a number above 0\. Received: speed=0",
        ),
        ('[[host]]\nname = "h"\n[[link]]\nbetween = ["h", "x"]', "should join two devices"),
        (
            '[[host]]\nname = "h"\n[[host]]\nname = "x"\n'
            '[[link]]\nbetween = ["h", "x"]\n[[link]]\nbetween = ["x", "h"]',
            r"at most one measured link\. Received: between=\['h', 'x'\] twice",
        ),
    ],
)
def test_bad_toml_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(HvpipeError, match=message) as caught:
        Cluster.read(path)
    assert str(path) in str(caught.value)


def test_numbers_are_checked() -> None:
    with pytest.raises(HvpipeError, match="speed=-1"):
        Device("d", -1.0)
    with pytest.raises(HvpipeError, match="memory_bytes=-1"):
        Device("d", 1.0, -1)
    with pytest.raises(HvpipeError, match="memory_bytes=inf"):
        Device("d", 1.0, math.inf)  # type: ignore[arg-type]
    with pytest.raises(HvpipeError, match="latency_s=-1"):
        Link(-1.0)
    with pytest.raises(HvpipeError, match="action_s=-1"):
        Cluster(TWO_HOSTS.hosts, action_s=-1.0)
    with pytest.raises(HvpipeError, match="bandwidth_bytes_per_s=0"):
        Link(0.0, 0.0)
    with pytest.raises(HvpipeError, match=r"one of g0, g1, g2. Received: device='g9'"):
        TWO_HOSTS.device("g9")


def test_like_hosts_are_written_once() -> None:
    row = {"name": "n", "count": 3, "device": [{"name": "g", "speed": 0.5}]}
    cluster = Cluster.from_json({"host": [row]})
    assert [host.name for host in cluster.hosts] == ["n-0", "n-1", "n-2"]
    assert [device.name for device in cluster.devices] == ["g-0", "g-1", "g-2"]
    with pytest.raises(HvpipeError, match=r"count should be at most 65536. Received: count=100000"):
        Cluster.from_json({"host": [{**row, "count": 100_000}]})


def in_racks(rate: float) -> Cluster:
    racks = [{"name": "r", "count": 2, "link": {"bandwidth_bytes_per_s": rate, "latency_s": 0.5}}]
    host = {"name": "h", "count": 2, "rack": "r", "link": {"bandwidth_bytes_per_s": 10.0, "latency_s": 0.25}}
    return Cluster.from_json({"rack": racks, "host": [host]})


def test_racks_are_a_third_level() -> None:
    cluster = in_racks(5.0)
    assert [(host.name, host.rack) for host in cluster.hosts] == [
        ("h-0-0", "r-0"),
        ("h-0-1", "r-0"),
        ("h-1-0", "r-1"),
        ("h-1-1", "r-1"),
    ]
    assert cluster.link("h-0-0", "h-0-1") == Link(0.25, 10)
    assert cluster.link("h-0-0", "h-1-0") == Link(0.5, 5)
    assert [port for port, _ in cluster.ports("h-0-0", "h-0-1")] == [("out of", "h-0-0"), ("into", "h-0-1")]
    assert [(*port, link.bandwidth_bytes_per_s) for port, link in cluster.ports("h-0-1", "h-1-0")] == [
        ("out of", "h-0-1", 10),
        ("into", "h-1-0", 10),
        ("out of rack", "r-0", 5),
        ("into rack", "r-1", 5),
    ]
    assert Cluster.from_json(cluster.to_json()) == cluster
    with pytest.raises(HvpipeError, match=r"rack should be one of r. Received: rack='s'"):
        Cluster.from_json({"rack": [{"name": "r"}], "host": [{"name": "h", "rack": "s"}]})
    with pytest.raises(HvpipeError, match=r"left out, as the cluster lists no racks. Received: rack='s'"):
        Cluster.from_json({"host": [{"name": "h", "rack": "s"}]})
    many = {"name": "h", "rack": "r", "count": 40_000}
    with pytest.raises(HvpipeError, match=r"count should be at most 32768. Received: count=40000"):
        Cluster.from_json({"rack": [{"name": "r", "count": 2}], "host": [many]})
