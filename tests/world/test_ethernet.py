"""Which ranks of MPI use TCP connections of hvpipe's own, and what happens if these cannot be made."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvpipe.environment.discover import Launch, tcp_interfaces
from hvpipe.environment.settings import Settings
from hvpipe.environment.this_host import Interface, interfaces
from hvpipe.errors import InitError
from hvpipe.world import ethernet, tcp
from hvpipe.world.ethernet import Place, address_of, idle_card, over_tcp, usable, why_mpi
from rank_threads import LIMIT_S, Together

LAUNCH = Launch("mpirun", None, None, None, None)


def place(host: int, *addresses: str, **others: Any) -> Place:
    """Return a rank on a host with these cards, of 1 Gb/s unless "@ Mb/s" follows; "~" begins a bridge's."""
    found = []
    for each in addresses:
        address, _, speed = each.removeprefix("~").partition("@")
        found.append(Interface("eth0", address, True, int(speed or 1000), physical=not each.startswith("~")))
    own = frozenset(each.ip for each in found)
    return Place(host, (f"boot of {host}",), own, tuple(found), **others)


@pytest.mark.parametrize(
    ("places", "why"),
    [
        pytest.param([place(0), place(1)], "", id="two hosts"),
        pytest.param([place(0), place(0)], "all ranks are on one host", id="one host"),
        pytest.param([place(0, backend="tcp"), place(0)], "", id="tcp was asked for"),
        pytest.param([place(0, backend="mpi"), place(1)], "the backend is mpi", id="mpi was asked for"),
        pytest.param([place(0), place(1, backend="mpi")], "", id="rank 0 decides"),
        pytest.param([place(0, elastic=True), place(1)], "the job is elastic", id="elastic"),
        pytest.param(
            [place(0), place(1, fast_network="mlx5_0")],
            "rank 1 has a faster network, mlx5_0",
            id="InfiniBand",
        ),
        pytest.param([place(0), place(0), place(2)], "a host has several ranks", id="several ranks"),
        pytest.param([place(n) for n in range(129)], "there are more than 128 ranks", id="many ranks"),
        pytest.param([place(0, "10.0.0.1/24"), place(1, "10.0.0.2/24")], "", id="one network"),
        pytest.param(
            [place(n, f"10.0.0.{n}/24", f"10.1.0.{n}/24") for n in (1, 2)],
            "all hosts share several networks of one speed",
            id="two networks",
        ),
        pytest.param(
            [place(n, f"10.0.0.{n}/24", f"10.1.0.{n}/24@10000") for n in (1, 2)],
            "",
            id="a slow one, a fast one",
        ),
        pytest.param([place(n, f"10.0.0.{n}/24", f"~10.1.0.{n}/24") for n in (1, 2)], "", id="and a bridge"),
    ],
)
def test_what_carries_the_data(places: list[Place], why: str) -> None:
    assert why_mpi(places) == why


@pytest.mark.parametrize(
    ("places", "layer", "card"),
    [
        pytest.param([place(0), place(1, fast_network="mlx5_0")], "ob1", "mlx5_0", id="MPI sends by TCP"),
        pytest.param([place(0), place(1, fast_network="mlx5_0")], "ucx", "", id="it is used"),
        pytest.param([place(0), place(1)], "ob1", "", id="no card"),
        pytest.param([place(0, fast_network="mlx5_0")] * 2, "ob1", "", id="one host"),
        pytest.param(
            [place(n, fast_network="mlx5_0", backend="mpi") for n in (0, 1)],
            "ob1",
            "",
            id="mpi was asked for",
        ),
    ],
)
def test_a_card_that_mpi_leaves_idle(
    places: list[Place], layer: str, card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMPI_MCA_pml", raising=False)
    assert idle_card(places, layer) == card
    monkeypatch.setenv("OMPI_MCA_pml", layer)
    assert idle_card(places, layer) == ""


@pytest.mark.parametrize(
    ("theirs", "mine", "address"),
    [
        pytest.param(["10.0.0.2/24"], ["10.0.0.1/24"], "10.0.0.2", id="one network"),
        pytest.param(["10.0.1.2/32"], ["10.0.0.1/32"], "10.0.1.2", id="routed"),
        pytest.param(
            ["172.17.0.1/16", "10.0.0.2/24"], ["172.17.0.1/16", "10.0.0.1/24"], "10.0.0.2", id="a bridge"
        ),
        pytest.param(["172.17.0.1/16"], ["172.17.0.1/16"], "", id="only a bridge"),
        pytest.param(
            ["192.168.1.2/24", "10.0.0.2/24@10000"],
            ["192.168.1.1/24", "10.0.0.1/24@10000"],
            "10.0.0.2",
            id="the faster one",
        ),
        pytest.param(
            ["10.9.0.2/24@100000", "10.0.0.2/24"], ["10.0.0.1/24"], "10.0.0.2", id="a common network"
        ),
        pytest.param(["~10.8.0.1/24@10000", "10.1.0.2/32"], ["10.0.0.1/32"], "10.1.0.2", id="a card first"),
        pytest.param([], ["10.0.0.1/24"], "", id="none"),
    ],
)
def test_at_which_address(theirs: list[str], mine: list[str], address: str) -> None:
    assert address_of(place(1, *theirs), place(0, *mine)) == address


ADDRESSES = st.lists(
    st.builds("10.{}.0.{}/{}".format, st.integers(0, 2), st.integers(1, 3), st.sampled_from([8, 24, 32])),
    max_size=4,
)


@given(theirs=ADDRESSES, mine=ADDRESSES)
def test_an_address_is_theirs_alone(theirs: list[str], mine: list[str]) -> None:
    own = {each.ip for each in place(0, *mine).interfaces}
    usable = {each.ip for each in place(1, *theirs).interfaces} - own
    found = address_of(place(1, *theirs), place(0, *mine))
    assert found in usable if usable else found == ""


def test_processes_of_one_machine_use_its_loopback() -> None:
    assert address_of(place(0, "10.0.0.1/24"), place(0, "10.0.0.1/24")) == "127.0.0.1"


def test_an_address_of_this_host_is_not_used_even_if_its_interface_is_down() -> None:
    mine = replace(place(0, "10.0.0.1/24"), addresses=frozenset({"10.0.0.1", "172.17.0.1"}))
    assert address_of(place(1, "172.17.0.1/16@10000", "10.2.0.2/24"), mine) == "10.2.0.2"


def test_interfaces_that_lead_to_no_other_host_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(number: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=number, netmask="255.255.255.0")

    def state(flags: str, isup: bool = True) -> SimpleNamespace:
        return SimpleNamespace(flags=flags, isup=isup, speed=1000)

    found = {
        "lo": [address("127.0.0.1")],
        "eth0": [address("fe80::1", socket.AF_INET6), address("10.0.0.1")],
        "eth1": [address("10.1.0.1")],
        "eth2": [address("10.2.0.1")],
        "eth3": [address("169.254.1.1")],
        "tun0": [address("10.3.0.1")],
        "eth2:1": [address("10.5.0.1")],
        "new": [address("10.4.0.1")],
    }
    states = {
        **{name: state("up,broadcast,running") for name in ("lo", "eth0", "eth2", "eth3")},
        "eth1": state("broadcast", isup=False),
        "tun0": state("up,pointopoint,running"),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)

    def numbers(net: str = "", **environ: str) -> list[str]:
        asked = tcp_interfaces(net, {f"OMPI_MCA_btl_tcp_if_{name}": text for name, text in environ.items()})
        return [each.ip for each in usable(interfaces(), asked)]

    assert numbers() == ["10.0.0.1", "10.2.0.1", "10.5.0.1", "10.4.0.1"]
    assert numbers(include="eth0, eth1") == ["10.0.0.1"]
    assert numbers(include="10.0.0.0/16") == ["10.0.0.1"]
    assert numbers(exclude="lo,10.0.0.0/24,new") == ["10.2.0.1", "10.5.0.1"]
    assert numbers("eth2", include="eth0") == ["10.2.0.1", "10.5.0.1"]


def test_a_kernel_that_does_not_tell_of_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(25, "Inappropriate ioctl for device")

    before = interfaces()
    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    assert {each.address for each in before} <= {each.address for each in interfaces()}


@dataclass
class Ranks:
    """One rank of a world of MPI, on a thread, on a host of its own."""

    rank: int
    together: Together
    size: int = 3
    local_rank: int = 0
    local_size: int = 1
    library_version: str = "Open MPI v5"
    network: str = "MPI"
    closed: bool = False

    @property
    def first_on_host(self) -> int:
        return self.rank

    @property
    def host(self) -> str:
        return f"host {self.rank}"

    def allgather_object(self, value: Any) -> list[Any]:
        return self.together.exchange(self.rank, value)

    def close(self) -> None:
        self.closed = True


def join(settings: Settings) -> list[Any]:
    """Return what each rank gets: a world, or an error."""
    together = Together(3)

    def run(rank: int) -> Any:
        ranks: Any = Ranks(rank, together)
        try:
            return over_tcp(ranks, LAUNCH, settings)
        except InitError as error:
            return error

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(run, range(3)))


def test_ranks_are_connected() -> None:
    worlds = join(Settings(timeout_s=LIMIT_S))
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda world: world.allgather_object(world.rank), worlds)) == [[0, 1, 2]] * 3
        assert {world.network for world in worlds} == {"TCP"}
        list(threads.map(lambda world: world.close(), worlds))


def test_if_one_rank_cannot_connect_mpi_carries_the_data_of_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = tcp.connect_mesh

    def refuse(rank: int, address: str, exchange: Any, timeout_s: float, hosts: Any, **options: Any) -> Any:
        if rank == 2:
            exchange(["127.0.0.1", 9, "token", ""])
            raise InitError("Rank 2 should reach rank 0. Received: a firewall")
        return connect(rank, address, exchange, timeout_s, hosts, **options)

    monkeypatch.setattr(tcp, "connect_mesh", refuse)
    monkeypatch.setattr(ethernet, "_CONNECT_S", 0.5)
    worlds = join(Settings())
    assert [type(world) for world in worlds] == [Ranks] * 3
    assert not any(world.closed for world in worlds)
    (record,) = caplog.records
    assert "MPI carries the data between hosts" in record.getMessage()
    assert "HVPIPE_BACKEND=mpi" in record.getMessage()
    for each in join(Settings(backend="tcp")):
        assert isinstance(each, InitError)
        assert "should reach rank 0" in str(each)


def test_ranks_without_a_common_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = ethernet._own_place
    monkeypatch.setattr(
        ethernet,
        "_own_place",
        lambda ranks, _: replace(own(ranks, _), loopback=(f"{ranks.rank}",), interfaces=()),
    )
    assert {world.network for world in join(Settings())} == {"MPI"}
    assert "rank 1 knows no address of rank 0" in caplog.text


@pytest.mark.parametrize("bad", [0, 2])
def test_if_one_rank_cannot_listen_mpi_carries_the_data_of_all(
    bad: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = tcp.connect_mesh

    def fail(rank: int, address: str, exchange: Any, timeout_s: float, hosts: Any, **options: Any) -> Any:
        shown = "192.0.2.1" if rank == bad else address  # RFC 5737
        return connect(rank, shown, exchange, timeout_s, hosts, **options)

    monkeypatch.setattr(tcp, "connect_mesh", fail)
    assert {world.network for world in join(Settings())} == {"MPI"}
    assert "should be able to listen at its address. Received: 192.0.2.1" in caplog.text


def test_an_elastic_job_refuses_tcp() -> None:
    for each in join(Settings(backend="tcp", elastic=True)):
        assert isinstance(each, InitError)
        assert "--elastic needs ranks whose data MPI carries" in str(each)
