"""Forecasts of plans: cases worked out by hand, memory as planned, refused arguments."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.forecast.data_parallel import forecast_data_parallel
from hvpipe.forecast.lower_bound import lower_bound_s
from hvpipe.forecast.pipeline import forecast
from hvpipe.forecast.plan_costs import costs_of, dataflow_of
from hvpipe.forecast.simulate import simulate
from hvpipe.forecast.step import Step, StepModel
from hvpipe.plan.baselines import BASELINES, baseline
from hvpipe.plan.exact import exact
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.placement_cost import fits_memory
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.plan_schedule import schedule_of
from hvpipe.schedule.verify import verify
from hvpipe.search.choice import candidate, choose
from hvpipe.search.options import PipeliningChoice
from hvpipe.specs.cluster import Cluster, Device, Host, Link, Rack, equal_cluster
from hvpipe.specs.layer_cost import LayerCost, OutputTensor
from hvpipe.specs.profile import Profile
from model_graphs import chain, clusters, model, profiles

quickly = settings(max_examples=40)


@pytest.mark.parametrize(
    ("pipelining", "step_s"),
    [
        # F = 1 and B = 2 on both of two stages: (m + p - 1) (F + B).
        (Pipelining("1f1b", 4), 15),
        (Pipelining("gpipe", 4), 15),
        # With recomputation, B = 3 includes the forward.
        (Pipelining("1f1b", 4, recompute=True), 20),
        # Half of B computes weight gradients: m (F + I + W) + (p - 1) max(F, I).
        (Pipelining("zb-h1", 4), 13),
    ],
)
def test_two_equal_stages(pipelining: Pipelining, step_s: float) -> None:
    profile, cluster = chain(3, 3), equal_cluster(2)
    one = forecast(partition(profile, cluster, 2, pipelining), profile, cluster)
    assert one.step_s == pytest.approx(step_s)
    busy_s = 16 if pipelining.recompute else 12
    assert one.busy_s == pytest.approx((busy_s, busy_s))
    assert one.bubble == pytest.approx(1 - busy_s / step_s)
    assert one.trace.metadata["devices"] == ["h0", "h1"]


def test_starting_an_action_takes_time() -> None:
    """Each F, B, I and W takes half a second longer than its layers, on slow devices too."""
    profile = chain(3, 3)
    for name, step_s in (("1f1b", 5 * (3 + 1)), ("zb-h1", 4 * (3 + 1.5) + 1.5)):
        cluster = replace(equal_cluster(2), action_s=0.5)
        plan = partition(profile, cluster, 2, Pipelining(name, 4))
        assert forecast(plan, profile, cluster).step_s == pytest.approx(step_s)
        costs = costs_of(plan, profile, cluster)
        assert simulate(schedule_of(plan), costs).makespan_s == pytest.approx(step_s)
    slow = replace(equal_cluster(2, speeds=(0.5,)), action_s=0.5)
    plan = partition(profile, slow, 2, Pipelining("1f1b", 4))
    assert forecast(plan, profile, slow).step_s == pytest.approx(5 * (6 + 1))


def test_tiny_layers_get_no_interleaving() -> None:
    """With free actions, chunks shorten the bubble. With dear ones, they only add actions."""
    profile, free = chain(3, 3, 3, 3), equal_cluster(2)

    def actions(cluster: Cluster) -> int:
        found = candidate("pipeline", profile, cluster, PipeliningChoice(microbatches=4)).forecast
        assert found is not None
        return len(schedule_of(found.plan).actions[0])

    assert actions(free) > 8
    assert actions(replace(free, action_s=3.0)) == 8


def test_gradients_of_another_size_and_tensors_of_some_users() -> None:
    """Two stages, one micro-batch: F = 1 and B = 2 on each; the link takes 1 s for each byte.

    3 bytes travel for two users, 1 for one of them, and back only 1, the gradient of the first tensor.
    """
    tensors = (OutputTensor(3, ("b", "c"), 1), OutputTensor(1, ("c",), 0))
    a = LayerCost("a", 1, 2, output_bytes=9, tensors=tensors)
    layers = [a, LayerCost("b", 0, 0), LayerCost("c", 1, 2)]
    profile = Profile.of(layers, [("a", "b"), ("a", "c")])
    cluster = equal_cluster(2, Link(0, 1.0))
    how = Pipelining("1f1b", 1)
    plan = Plan.of(profile, cluster, [(("h0",), range(1)), (("h1",), range(1, 3))], how, "")
    assert [stage.cost.total_s for stage in plan.stages] == pytest.approx([8, 8])
    assert plan.stages[1].cost.receive_bytes == 4
    one = forecast(plan, profile, cluster)
    assert one.step_s == pytest.approx(1 + 4 + 3 + 1 + 2)
    assert one.memory_bytes[1] == 4
    assert plan.one_batch_s == pytest.approx(1 + 4 + 3 + 1 + 2)


def test_a_gradient_that_does_not_travel_is_no_part_of_the_lower_bound() -> None:
    """Regression: it counted with the bytes of its tensor, and the bound exceeded the step."""
    profile = chain(3, 3, output_bytes=100)
    profile = replace(profile, layers=tuple(replace(one, gradient_bytes=0) for one in profile.layers))
    cluster = equal_cluster(2, Link(0, 1.0))
    plan = Plan.of(profile, cluster, [(("h0",), [0]), (("h1",), [1])], Pipelining("1f1b", 1), "")
    bound_s = lower_bound_s(schedule_of(plan), costs_of(plan, profile, cluster), dataflow_of(plan, profile))
    assert bound_s == pytest.approx(forecast(plan, profile, cluster).step_s) == 106


@pytest.mark.parametrize(
    ("pipelining", "sizes_bytes"),
    [
        # Stages hold 4, 3, 2, 1 micro-batches. 10 bytes from a wait at d for 3 more, and 4 from d at a.
        (Pipelining("1f1b", 8), (4 * 100 + 3 * 4, 3 * (10 + 100), 2 * (10 + 100), 10 + 10 + 100 + 3 * 10)),
        (Pipelining("1f1b", 8, recompute=True), (100 + 12, 30 + 100, 20 + 100, 10 + 10 + 100 + 30)),
        # All hold all: nothing waits beside that.
        (Pipelining("gpipe", 8), (800, 880, 880, 960)),
    ],
)
def test_tensors_that_skip_stages_wait(pipelining: Pipelining, sizes_bytes: tuple[int, ...]) -> None:
    """Regression: only those of the user's micro-batches in flight counted, and no gradients."""
    profile = chain(*[3] * 4, output_bytes=10, saved_bytes=100)
    layers = (replace(profile.layers[0], gradient_bytes=4), *profile.layers[1:])
    profile = replace(profile, layers=layers, edges=(*profile.edges, (0, 3)))
    cluster = equal_cluster(4)
    plan = Plan.of(profile, cluster, [((f"h{i}",), [i]) for i in range(4)], pipelining, "")
    assert forecast(plan, profile, cluster).memory_bytes == sizes_bytes
    assert tuple(plan.memory_bytes.values()) == sizes_bytes
    for less, fits in ((0, True), (1, False)):
        cluster = equal_cluster(4, memory_bytes=max(sizes_bytes) - less)
        assert fits_memory(profile, cluster, plan.placement(profile), pipelining) == fits


def test_tensors_that_skip_stages_wait_for_each_chunk_of_an_interleaved_schedule() -> None:
    """Stage 0 holds up to 4 micro-batches and stage 3 holds 1: beside that one, 3 tensors wait there.

    Regression: both counted the mean of their device's stages, 3 and 2.
    """
    tensors = OutputTensor(0, ("b",)), OutputTensor(100, ("d",), 0)
    layers = [LayerCost("a", 1, 2, output_bytes=100, tensors=tensors), *(LayerCost(n, 1, 2) for n in "bcd")]
    profile = Profile.of(layers, [("a", "b"), ("a", "d"), ("b", "c"), ("c", "d")])
    plan = Plan.of(
        profile,
        equal_cluster(2),
        [((f"h{i % 2}",), [i]) for i in range(4)],
        Pipelining("interleaved", 8, chunks=2),
        "",
    )
    assert forecast(plan, profile, equal_cluster(2)).memory_bytes == (0, 400)


def test_one_stage_alone_can_recompute() -> None:
    """gpipe with F = 1, B = 2 and 3 micro-batches; each layer saves 10 bytes, b also receives 1."""
    layers = [LayerCost(name, 1, 2, output_bytes=1, saved_bytes=10) for name in "ab"]
    profile = Profile.of(layers, [("a", "b")])
    found = {}
    for again in (False, (0,), (1,), (0, 1), True):
        plan = partition(profile, equal_cluster(2), 2, Pipelining("gpipe", 3, again))
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        one = forecast(plan, profile, equal_cluster(2))
        assert tuple(plan.memory_bytes.values()) == one.memory_bytes
        found[str(again)] = (one.busy_s, one.memory_bytes)
    assert found["False"] == ((9, 9), (30, 33))
    assert found["(0,)"] == ((12, 9), (10, 33))
    assert found["(1,)"] == ((9, 12), (30, 13))
    assert found["(0, 1)"] == found["True"] == ((12, 12), (10, 13))


def test_each_part_of_a_backward_recomputes_the_forward() -> None:
    """F = 1, I = 1, W = 1: with recomputation I = 2, and W = 2 too where it has an I before and weights.

    Regression: only I was forecast to take longer, so zb-h1 seemed to win.
    """
    frozen = LayerCost("c", 1, 1, weight_share=0)
    profile = Profile.of([LayerCost(name, 1, 2) for name in "ab"] + [frozen], [("a", "b"), ("b", "c")])
    cluster = equal_cluster(3)
    plan = partition(profile, cluster, 3, Pipelining("zb-h1", 4, recompute=True))
    one = forecast(plan, profile, cluster)
    assert one.busy_s == (4 * 4, 4 * 5, 4 * 3)
    simulated = simulate(schedule_of(plan), costs_of(plan, profile, cluster), dataflow_of(plan, profile))
    assert simulated.makespan_s == pytest.approx(one.step_s)


def test_balancing_counts_the_recomputed_forward() -> None:
    """Ten layers, F = 1, B = 2. The first stage recomputes: its four layers take 16 s, the other six 18 s."""
    how = Pipelining("gpipe", 2, (0,))
    for plan_of in (partition, exact):
        plan = plan_of(chain(*[3] * 10), equal_cluster(2), 2, how)
        assert [len(stage.layers) for stage in plan.stages] == [4, 6]
        assert [stage.cost.compute_s for stage in plan.stages] == pytest.approx([16, 18])


def test_recompute_of_missing_stages_is_refused() -> None:
    profile, cluster = chain(3, 3, 3), equal_cluster(3)
    how = Pipelining("gpipe", 4, (2, 0))
    assert how.recompute == (0, 2)
    with pytest.raises(PlanError, match=r"stages from 0 to 1. Received: recompute=\(0, 2\)"):
        partition(profile, cluster, 2, how)
    # Without a given number of stages, hvpipe tries each one that includes stages 0 and 2.
    assert len(partition(profile, cluster, None, how).stages) == 3
    document = partition(profile, cluster, 3, how).to_json()
    document["stages"] = document["stages"][:2]
    with pytest.raises(PlanError, match=r"stages from 0 to 1. Received: recompute=\(0, 2\)"):
        Plan.from_json(document)
    for wrong in (1.5, "0", (-1,), (True,), 3):
        with pytest.raises(HvpipeError, match="recompute should be True, False or the numbers of stages"):
            Pipelining(recompute=wrong)  # type: ignore[arg-type]


def test_each_device_updates_its_weights_when_it_is_done() -> None:
    """F = B = 3, 2 micro-batches: h1 is done at 15 s, h0 at 18 s.

    The updates take 8 s on h1, which runs at half speed, and 1 s on h0.
    """
    layers = [LayerCost("a", 3, 3, update_s=1), LayerCost("b", 1.5, 1.5, update_s=4)]
    profile, cluster = Profile.of(layers, [("a", "b")]), equal_cluster(2, speeds=(1.0, 0.5))
    one = forecast(partition(profile, cluster, 2, Pipelining("1f1b", 2)), profile, cluster)
    assert one.plan.ranks == ("h0", "h1")
    found = [(event.rank, event.start_s, event.end_s) for event in one.trace.of("update")]
    assert found == [(0, pytest.approx(18), pytest.approx(19)), (1, pytest.approx(15), pytest.approx(23))]
    assert one.step_s == pytest.approx(23)
    assert one.busy_s == pytest.approx((13, 20))
    alone = forecast(baseline("random", profile, cluster, 2, Pipelining("1f1b", 2), seed=1), profile, cluster)
    without = replace(profile, layers=tuple(replace(layer, update_s=0.0) for layer in layers))
    updates_s = [
        sum(profile.layers[profile.place(name)].update_s for name in stage.layers)
        / cluster.device(stage.device).speed
        for stage in alone.plan.stages
    ]
    longest_s = max(updates_s)
    assert alone.step_s == pytest.approx(forecast(alone.plan, without, cluster).step_s + longest_s)


def test_the_weights_part_is_what_the_profile_says() -> None:
    """F = 1, B = 2 with W = 0.5 of it: m (F + I + W) + (p - 1) (F + I - W)."""
    layers = [LayerCost(name, 1, 2, weight_share=0.25) for name in "ab"]
    profile, cluster = Profile.of(layers, [("a", "b")]), equal_cluster(2)
    plan = partition(profile, cluster, 2, Pipelining("zb-h1", 4))
    assert forecast(plan, profile, cluster).step_s == pytest.approx(4 * 3 + (1 + 1.5 - 0.5))


def test_interleaved_places_chunks_round_the_devices() -> None:
    profile, cluster = chain(3, 3, 3, 3), equal_cluster(2)
    plan = partition(profile, cluster, 4, Pipelining("interleaved", 4, chunks=2))
    assert [stage.device for stage in plan.stages] == ["h0", "h1", "h0", "h1"]
    assert plan.bottleneck_s == pytest.approx(6)
    # m (F + B) + (p - 1) (F + B) / chunks.
    assert forecast(plan, profile, cluster).step_s == pytest.approx(4 * 6 + 3)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_faster_device_takes_the_larger_chunks() -> None:
    profile, cluster = chain(6, 3, 6, 3), equal_cluster(2, speeds=(0.5, 1.0))
    plan = partition(profile, cluster, 4, Pipelining("interleaved", 4, chunks=2))
    assert [stage.device for stage in plan.stages] == ["h1", "h0", "h1", "h0"]


def test_a_skip_connection_is_sent_directly_and_a_host_sends_one_message_at_a_time() -> None:
    """A tensor of 4 bytes takes 3 s, one of 2 bytes 2 s. A host sends and receives one message at a time.

    a  | F 0-1, to b 1-4, to c 4-7                                            B 19-20
    b  |        F 4-5, to c 7-9 (c's link is taken)        B 13-14, to a 16-19
    c  |                        F 9-10 B 10-11, to b 11-13, to a 13-16
    """
    layers = [LayerCost("a", 1, 1, output_bytes=4), LayerCost("b", 1, 1, output_bytes=2)]
    profile = Profile.of([*layers, LayerCost("c", 1, 1)], [("a", "b"), ("a", "c"), ("b", "c")])
    cluster = equal_cluster(3, Link(1.0, 2.0))
    placement = [(("h0",), [0]), (("h1",), [1]), (("h2",), [2])]
    plan = Plan.of(profile, cluster, placement, Pipelining("gpipe", 1), "by hand")
    assert dataflow_of(plan, profile).edges == ((0, 1), (0, 2), (1, 2))
    one = forecast(plan, profile, cluster)
    assert [(e.name, e.start_s, e.end_s) for e in one.trace.of("transfer")] == [
        ("0F0 to rank 1", 1, 4),
        ("0F0 to rank 2", 4, 7),
        ("1F0 to rank 2", 7, 9),
        ("2B0 to rank 1", 11, 13),
        ("2B0 to rank 0", 13, 16),
        ("1B0 to rank 0", 16, 19),
    ]
    assert one.step_s == 20


def test_inside_a_host_each_pair_of_devices_has_its_own_link() -> None:
    """As above, but on one host: b's output does not wait for a's second transfer."""
    layers = [LayerCost("a", 1, 1, output_bytes=4), LayerCost("b", 1, 1, output_bytes=2)]
    profile = Profile.of([*layers, LayerCost("c", 1, 1)], [("a", "b"), ("a", "c"), ("b", "c")])
    devices = tuple(Device(name) for name in "xyz")
    cluster = Cluster((Host("h", devices, inner=Link(1.0, 2.0)),))
    placement = [(("x",), [0]), (("y",), [1]), (("z",), [2])]
    plan = Plan.of(profile, cluster, placement, Pipelining("gpipe", 1), "by hand")
    # F 0-1, 4-5, 7-8; B 8-9, 11-12, 15-16.
    assert forecast(plan, profile, cluster).step_s == 16


def test_replicas_reduce_after_their_last_backward() -> None:
    """The stage on two ranks takes 6 s per micro-batch, the other 3 s: 18 s in all.

    Its 10 bytes of gradients are final with the last backward. The reduce takes 2 (2 - 1) / 2 x 10 / 5 = 2 s.
    """
    profile, cluster = chain(6, 3, weight_bytes=10), equal_cluster(3, Link(0, 5.0))
    placement = [(("h0", "h1"), [0]), (("h2",), [1])]
    plan = Plan.of(profile, cluster, placement, Pipelining("1f1b", 4), "hybrid")
    assert plan.ranks == ("h0", "h1", "h2")
    assert [stage.cost.compute_s for stage in plan.stages] == pytest.approx([3, 3])
    one = forecast(plan, profile, cluster)
    assert [(e.start_s, e.end_s) for e in one.trace.of("reduce")] == [pytest.approx((18, 20))]
    assert one.step_s == pytest.approx(20)
    assert Plan.from_json(plan.to_json()) == plan


def test_all_gradients_of_a_stage_are_final_together() -> None:
    """One micro-batch takes F = 2 s and B = 4 s on each replica. Both layers' buckets, 1 s each, follow.

    The backward of a stage is one graph. Regression: the forecast overlapped the last layer's reduce with it.
    """
    profile, cluster = chain(3, 3, weight_bytes=1 << 20), equal_cluster(2, Link(0, float(1 << 20)))
    plan = Plan.of(profile, cluster, [(("h0", "h1"), [0, 1])], Pipelining("1f1b", 2), "hybrid")
    one = forecast(plan, profile, cluster)
    assert [(e.start_s, e.end_s) for e in one.trace.of("reduce")] == [
        pytest.approx((6, 7)),
        pytest.approx((7, 8)),
    ]


def test_reduces_of_two_stages_take_turns_on_one_link() -> None:
    """Each of two stages has a replica on either host and 25 bytes of gradients: 5 s at 5 bytes/s.

    Each replica has one micro-batch. B ends at 4 s on stage 1 and at 6 s on stage 0.
    """
    hosts = tuple(Host(h, (Device(f"{h}0"), Device(f"{h}1")), Link(0, 5.0)) for h in "xy")
    profile, cluster = chain(3, 3, weight_bytes=25), Cluster(hosts)
    placement = [(("x0", "y0"), [0]), (("x1", "y1"), [1])]
    plan = Plan.of(profile, cluster, placement, Pipelining("1f1b", 2), "hybrid")
    one = forecast(plan, profile, cluster)
    assert [(e.args["stage"], e.start_s, e.end_s) for e in one.trace.of("reduce")] == [
        (1, pytest.approx(4), pytest.approx(9)),
        (0, pytest.approx(9), pytest.approx(14)),
    ]
    assert one.step_s == pytest.approx(14)


def test_a_fast_host_serves_two_slow_ones_at_once() -> None:
    """A tensor of 10 bytes takes 0.01 s to leave the fast host and 1 s to enter a slow one."""
    layers = [LayerCost("a", 1, 1, output_bytes=10), LayerCost("b", 1, 1), LayerCost("c", 1, 1)]
    profile = Profile.of(layers, [("a", "b"), ("a", "c")])
    hosts = tuple(
        Host(name, (Device(name),), Link(0, bandwidth))
        for name, bandwidth in (("fast", 1000.0), ("slow", 10.0), ("also slow", 10.0))
    )
    cluster = Cluster(hosts)
    placement = [(("fast",), [0]), (("slow",), [1]), (("also slow",), [2])]
    plan = Plan.of(profile, cluster, placement, Pipelining("gpipe", 1), "by hand")
    one = forecast(plan, profile, cluster)
    assert [(e.name, e.start_s, e.end_s) for e in one.trace.of("transfer")] == [
        ("0F0 to rank 1", 1, 2),
        ("0F0 to rank 2", 1.01, 2.01),
        ("1B0 to rank 0", 4, 5),
        ("2B0 to rank 0", pytest.approx(4.01), pytest.approx(5.01)),
    ]
    assert one.step_s == pytest.approx(6.01)


def test_replicas_of_unequal_speed_get_unequal_shares() -> None:
    profile, cluster = chain(3), equal_cluster(2, speeds=(1.0, 0.5))
    plan = Plan.of(profile, cluster, [(("h0", "h1"), [0])], Pipelining("1f1b", 6), "hybrid")
    assert plan.stages[0].shares == (1.0, 0.5)
    one = forecast(plan, profile, cluster)
    assert one.busy_s == pytest.approx((4 * 3, 2 * 6))
    assert one.step_s == pytest.approx(12)


def test_without_pipelining_the_whole_batch_runs_layer_by_layer() -> None:
    profile, cluster = chain(3, 3, 3, output_bytes=2), equal_cluster(2, Link(1.0, 2.0))
    plan = baseline("round_robin", profile, cluster, 2, Pipelining("1f1b", 4))
    one = forecast(plan, profile, cluster)
    # 4 x 9 s of computing, and 4 transfers of 8 bytes.
    assert one.step_s == pytest.approx(36 + 4 * 5)
    assert one.busy_s == pytest.approx((24, 12))
    assert one.trace.events == ()
    with pytest.raises(PlanError, match=r"Only a pipeline has a schedule. Received: method='round_robin'"):
        schedule_of(plan)


def test_without_pipelining_recompute_takes_time_too() -> None:
    profile, cluster = chain(3, 3, 3), equal_cluster(2)
    plan = baseline("round_robin", profile, cluster, 2, Pipelining("1f1b", 4, recompute=True))
    one = forecast(plan, profile, cluster)
    # 4 x 9 s of computing, and 4 x 3 recomputed forwards of 1 s.
    assert one.step_s == pytest.approx(36 + 12)
    assert one.busy_s == pytest.approx((32, 16))


def test_a_forecast_for_another_cluster_is_refused() -> None:
    profile, cluster = chain(3, 3), equal_cluster(2)
    plan = partition(profile, cluster, 2)
    with pytest.raises(PlanError, match="speeds, memory, hosts or links differ"):
        forecast(plan, profile, equal_cluster(2, speeds=(2.0,)))
    with pytest.raises(PlanError, match="of the model that was planned"):
        forecast(plan, chain(3, 3, 3), cluster)


def test_memory_follows_the_batch_size_of_the_forecast() -> None:
    """Regression: received bytes came from the plan but saved bytes from the profile."""
    profile, cluster = chain(3, 3, output_bytes=3, saved_bytes=5, weight_bytes=10), equal_cluster(2)
    plan = partition(profile, cluster, 2, Pipelining("gpipe", 4))
    assert forecast(plan, profile, cluster).memory_bytes == (20 + 4 * 5, 20 + 4 * (5 + 3))
    assert forecast(plan, profile.at_batch(2), cluster).memory_bytes == (20 + 4 * 10, 20 + 4 * (10 + 6))


@quickly
@given(profiles(), clusters(), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 9), st.booleans())
def test_memory_is_as_planned(
    profile: Profile, cluster: Cluster, schedule: str, microbatches: int, recompute: bool
) -> None:
    plan = baseline("even", profile, cluster, 3 if len(cluster.devices) > 2 else 2)
    how = Pipelining(schedule, microbatches, recompute)
    plan = Plan.of(profile, cluster, plan.placement(profile), how, "even")
    one = forecast(plan, profile, cluster)
    assert dict(zip(plan.ranks, one.memory_bytes, strict=True)) == plan.memory_bytes
    assert one.shortages(cluster) == plan.shortages(cluster)


@quickly
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(4, 24),
)
def test_micro_batches_in_flight_match_the_stash_of_the_schedule(
    name: str, replicas: list[int], microbatches: int
) -> None:
    how = Pipelining(name, microbatches)
    profile = chain(*[1.0] * len(replicas))
    cluster = equal_cluster(sum(replicas))
    names = iter(device.name for device in cluster.devices)
    placement = [(tuple(next(names) for _ in range(n)), [stage]) for stage, n in enumerate(replicas)]
    schedule = schedule_of(Plan.of(profile, cluster, placement, how, "hybrid"))
    stash = verify(schedule).peak_stash
    for stage in range(len(replicas)):
        # The first rank of a stage has the most micro-batches.
        assert how.in_flight(stage, replicas) == stash[schedule.ranks_of(stage)[0]]


@quickly
@given(st.integers(1, 4), st.integers(2, 3), st.integers(0, 8))
def test_micro_batches_in_flight_bound_the_stash_of_interleaved(ranks: int, chunks: int, more: int) -> None:
    how = Pipelining("interleaved", ranks + more, chunks=chunks)
    profile, cluster = chain(*[1.0] * ranks * chunks), equal_cluster(ranks)
    plan = partition(profile, cluster, ranks * chunks, how)
    schedule = schedule_of(plan)
    for rank, stash in enumerate(verify(schedule).peak_stash):
        flying = [how.in_flight(stage, (1,) * ranks * chunks) for stage in schedule.stages_of(rank)]
        assert stash <= sum(flying) < stash + chunks


@pytest.mark.parametrize("name", ["gnmt", "resnet50"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_forecasts_of_real_models_respect_the_lower_bound(name: str, schedule: str) -> None:
    cluster = equal_cluster(4, Link(1e-4, 12.5e9), speeds=(1.0, 0.5))
    how = Pipelining(schedule, 16, chunks=2 if schedule == "interleaved" else 1)
    plan = partition(model(name), cluster, 4 * how.chunks, how)
    one = forecast(plan, model(name), cluster)
    bound_s = lower_bound_s(
        schedule_of(plan), costs_of(plan, model(name), cluster), dataflow_of(plan, model(name))
    )
    assert bound_s <= one.step_s * (1 + 1e-9)
    # Every device computes all micro-batches on its stages.
    for device, busy_s in zip(plan.ranks, one.busy_s, strict=True):
        compute_s = sum(stage.cost.compute_s for stage in plan.stages if stage.device == device)
        assert busy_s == pytest.approx(16 * compute_s)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_baseline_has_a_forecast(name: str) -> None:
    cluster = equal_cluster(4, Link(1e-4, 1.25e9))
    for how in (Pipelining("1f1b", 8), Pipelining("interleaved", 8, chunks=2)):
        plan = baseline(name, model("gnmt"), cluster, 4 * how.chunks, how)
        assert plan.pipelining == replace(how, schedule="1f1b", chunks=1)
        assert forecast(plan, model("gnmt"), cluster).step_s > 0


def test_hosts_of_a_rack_share_its_link() -> None:
    """Each message takes 1 s. Two leave rack a at once, so one waits: 8 s become 9 s.

    a0, F0 0-1, sent 1-2, b0: F0 2-3, B0 3-5, sent 5-6, a0: B0 6-8
    a1, F1 0-1, sent 2-3, b1: F1 3-4, B1 4-6, sent 6-7, a1: B1 7-9
    """
    hosts = [Host(name, (Device(name),), Link(0, 5.0), rack=name[0]) for name in ("a0", "a1", "b0", "b1")]
    racked = Cluster(tuple(hosts), racks=(Rack("a", Link(0, 5.0)), Rack("b", Link(0, 5.0))))
    flat = Cluster(tuple(replace(host, rack="") for host in hosts))
    placement = [(("a0", "a1"), range(1)), (("b0", "b1"), range(1, 2))]
    for cluster, step_s in ((flat, 8), (racked, 9)):
        plan = Plan.of(chain(3, 3, output_bytes=5), cluster, placement, Pipelining("gpipe", 2), "")
        assert forecast(plan, chain(3, 3, output_bytes=5), cluster).step_s == pytest.approx(step_s)


def test_layer_times_by_type_of_device() -> None:
    """A CPU runs a in 2 s instead of 3 s, b in 12 s. So a goes there: 4 x 3 s behind a's 2/3 s, and 4/3 s."""
    a, b = chain(3, 3).layers
    by_type = (replace(a, time_s={"cpu": (2 / 3, 4 / 3)}), replace(b, time_s={"cpu": (4.0, 8.0)}))
    profile = replace(chain(3, 3), layers=by_type)
    cluster = Cluster((Host("gpu", (Device("gpu"),)), Host("cpu", (Device("cpu", type="cpu"),))))
    best = choose(profile, cluster, PipeliningChoice("1f1b", 4), stages=2)
    assert [stage.devices for stage in best.plan.stages] == [("cpu",), ("gpu",)]
    assert best.step_s == pytest.approx(4 * 3 + 2)
    assert [stage.cost.compute_s for stage in best.plan.stages] == pytest.approx([2, 3])
    assert Profile.from_json(profile.to_json()) == profile
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert profile.at_batch(2).layers[0].time_s == {"cpu": pytest.approx((4 / 3, 8 / 3))}
    # For the whole model the GPU takes 6 s and the CPU 14 s, so they get 7 and 3 of 10 samples.
    with pytest.raises(PlanError, match="names should have at least one device"):
        forecast_data_parallel(profile, cluster, Pipelining(microbatches=10), names=[])
    whole = forecast_data_parallel(profile, cluster, Pipelining(microbatches=10))
    assert whole.plan.stages[0].shares == (7, 3)
    assert whole.busy_s == pytest.approx((7 * 6, 3 * 14))
    assert [stage.devices for stage in exact(profile, cluster, 2).stages] == [("cpu",), ("gpu",)]


def test_weights_that_layers_share_count_once_in_a_stage() -> None:
    """a and c use the same 10 bytes, once in a stage, or in each of two. b has 10 bytes of its own."""
    layers = chain(3, 3, 3, weight_bytes=10).layers
    tied = replace(chain(3, 3, 3), layers=(*layers[:2], replace(layers[2], weights_of="a")))
    tied = replace(tied, layers=tuple(replace(layer, update_s=1.0) for layer in tied.layers))
    cluster, how = equal_cluster(2, Link(0, 10.0)), Pipelining("1f1b", 2)

    def step(*ends: int) -> Step:
        spans = zip((0, *ends), ends, strict=False)
        placement = [((f"h{i}",), range(*span)) for i, span in enumerate(spans)]
        costs = Plan.of(tied, cluster, placement, how, "").stages
        found = StepModel(tied, cluster).step(placement, how)
        assert found.memory_bytes == tuple(stage.cost.state_bytes for stage in costs)
        return found

    assert step(3).memory_bytes == (2 * 20,)
    assert step(3).step_s == 2 * 9 + 2
    assert step(2, 3).memory_bytes == (2 * 20, 2 * 10)
    whole = forecast_data_parallel(tied, cluster, how)
    assert whole.memory_bytes == (2 * 20, 2 * 20)
    assert Profile.from_json(tied.to_json()) == tied
    with pytest.raises(HvpipeError, match=r"own weights have the same size. Received: weights_of='x'"):
        replace(tied, layers=(*layers[:2], replace(layers[2], weights_of="x")))
