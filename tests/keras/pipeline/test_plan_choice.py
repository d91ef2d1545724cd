"""What becomes of the arguments of a pipeline on a number of ranks that they were not made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvpipe.errors import PlanError
from hvpipe.keras.pipeline import plan_choice
from hvpipe.keras.pipeline.plan_choice import PipelineOptions, fitted
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.session import Session
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.world.world import World
from model_graphs import chain


class Places:
    """As much of a session as finds the ranks of devices: ranks on these hosts, in this order."""

    def __init__(self, *hosts: str) -> None:
        local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        places = [(host, at, hosts.count(host)) for host, at in zip(hosts, local, strict=True)]
        self.world = SimpleNamespace(
            rank=0, size=len(hosts), host=hosts[0], local_rank=0, local_size=places[0][2]
        )
        self.engine = SimpleNamespace(allgather_object=lambda mine, what: places)


@dataclass
class Ranks:
    """As much of a world as is asked for."""

    size: int
    rank: int = 0


def plan(ranks: int, how: Pipelining) -> Any:
    return partition(chain(*[1.0] * 8), equal_cluster(ranks), ranks * how.chunks, how)


@pytest.mark.parametrize(
    ("given", "size", "stages", "replicas"),
    [
        ({}, 3, "auto", None),
        ({"stages": 2}, 4, 2, None),
        ({"stages": 2}, 3, 2, (2, 1)),
        ({"stages": 4}, 3, 3, (1, 1, 1)),
        ({"replicas": (2, 1, 1)}, 4, "auto", (2, 1, 1)),
        ({"replicas": (2, 1, 1)}, 3, 3, (1, 1, 1)),
        ({"stages": plan(4, Pipelining("gpipe", 4))}, 3, 3, (1, 1, 1)),
        ({"stages": 4, "cluster": "c.toml"}, 3, "auto", None),
    ],
)
def test_stages_and_replicas(given: dict[str, Any], size: int, stages: Any, replicas: Any) -> None:
    found = fitted(PipelineOptions(**given), cast(World, Ranks(size)))
    assert (found.stages, found.replicas) == (stages, replicas)
    assert found.cluster == given.get("cluster")


def test_a_plan_keeps_its_schedule() -> None:
    how = Pipelining("interleaved", 6, (1,), 2)
    found = fitted(PipelineOptions(plan(3, how)), cast(World, Ranks(2)))
    assert (found.schedule, found.microbatches, found.chunks, found.stages) == ("interleaved", 6, 2, 2)
    assert found.recompute is True  # stages have other numbers now


def test_a_plan_made_anew_for_a_cluster_may_recompute_in_other_stages() -> None:
    """Regression: the stages that the old plan recomputed were asked of the new one, which may have fewer."""
    how = Pipelining("1f1b", 6, (0, 1, 2))
    found = fitted(PipelineOptions(plan(3, how), cluster="c.toml"), cast(World, Ranks(2)))
    assert (found.stages, found.microbatches) == ("auto", 6)
    assert (found.choice.schedule, found.choice.recompute) == ("auto", "auto")


def places(session: Places, devices: Sequence[str]) -> list[int]:
    return plan_choice._ranks_by_name(cast(Session, session), devices)


def test_a_plan_with_idle_devices_runs_on_as_many_ranks() -> None:
    """Regression: no number of ranks had the devices, because local ranks are counted from 0."""
    assert places(Places("vm"), ["vm:1"]) == [0]
    assert places(Places("a", "a", "b"), ["b:7", "a:3", "a:1"]) == [2, 1, 0]
    assert places(Places("a", "a"), ["a:1", "a:0"]) == [1, 0]
    for hosts, devices in ((("a", "a"), ["a:1"]), (("a", "b"), ["a:1", "a:3"]), (("a",), ["b:1"])):
        with pytest.raises(PlanError, match="plan"):
            places(Places(*hosts), devices)


def test_a_cluster_without_some_devices() -> None:
    bus, slow = Link(1e-6, 1e10), Link(1e-3, 1e6)
    hosts = Host("h0", (Device("g0"), Device("g1")), inner=bus), Host("h1", (Device("g2"),))
    whole = Cluster(hosts, (("g1", "g2", bus), ("g0", "g1", slow)))
    left = whole.only({"g0", "g1"})
    assert [device.name for device in left.devices] == ["g0", "g1"]
    assert left.link("g0", "g1") == slow
    assert [host.name for host in whole.only({"g2"}).hosts] == ["h1"]
