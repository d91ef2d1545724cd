"""Hosts from --hosts and from a hostfile."""

from __future__ import annotations

import pytest

from hvpipe.commands.hosts import HostSlots, parse_hostfile, parse_hosts
from hvpipe.errors import LaunchError


def test_hosts() -> None:
    assert parse_hosts("a:2,b:12") == (HostSlots("a", 2), HostSlots("b", 12))
    assert parse_hosts("a, b") == (HostSlots("a", 1), HostSlots("b", 1))


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:-1", "a:two", ":2", "a:2,", "a:2:3"])
def test_bad_hosts_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=f"host:slots.*Received: --hosts '{text}'"):
        parse_hosts(text)


def test_a_hostfile() -> None:
    text = "# both racks\na slots=2\n\nb:3  # the larger\nc slots = 4 max_slots=8\nd\n"
    assert parse_hostfile(text, "hosts") == (
        *(HostSlots("a", 2), HostSlots("b", 3), HostSlots("c", 4), HostSlots("d", 1)),
    )


def test_a_hostfile_of_a_batch_system_has_a_line_per_rank() -> None:
    assert parse_hostfile("a\na\nb\nb\n", "nodes") == (HostSlots("a", 2), HostSlots("b", 2))


@pytest.mark.parametrize("line", ["a slots=0", "a slots=two", "a 2", "a:2:3", "a,b", "=2"])
def test_a_bad_line_of_a_hostfile(line: str) -> None:
    with pytest.raises(LaunchError, match=f"host slots=N. Received: '{line}' on line 2 of hosts"):
        parse_hostfile(f"a\n{line}\n", "hosts")


def test_a_hostfile_without_hosts() -> None:
    with pytest.raises(LaunchError, match="--hostfile names no host: hosts should"):
        parse_hostfile("# nothing yet\n", "hosts")


def test_a_host_named_twice() -> None:
    with pytest.raises(LaunchError, match=r"each host once. Received: --hosts 'a:1,a:2'"):
        parse_hosts("a:1,a:2")


NO_NAMES = [
    "-oProxyCommand=id",
    "-x",
    "a;id",
    "a$(id)",
    "a b",
    "../a",
    "a/b",
    "a[1-2]",
    "@a",
    "-x@a",
    "a@-x",
    "\u202ea",
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_a_program_could_take_for_something_else(name: str) -> None:
    """Regression: a name with a dash was an option of ssh, some of which run a command."""
    with pytest.raises(
        LaunchError, match=r"A host should be a name|each line of --hostfile|--hosts should be"
    ):
        parse_hosts(f"b:2,{name}:2")
    with pytest.raises(LaunchError, match=r"A host should be a name|Each line of --hostfile"):
        parse_hostfile(f"b\n{name} slots=2\n", "hosts")
    with pytest.raises(LaunchError, match="A host should be a name"):
        HostSlots(name, 1)


@pytest.mark.parametrize("name", ["a", "node-1.example", "10.0.0.1", "me@node_1", "1a"])
def test_names(name: str) -> None:
    assert parse_hosts(f"{name}:2") == parse_hostfile(f"{name} slots=2", "hosts") == (HostSlots(name, 2),)
