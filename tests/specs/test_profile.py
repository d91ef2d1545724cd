"""Profiles: topological order, scaling, JSON, errors for bad files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.specs.layer_cost import LayerCost, OutputTensor
from hvpipe.specs.profile import Profile

PROFILES = Path(__file__).parents[1] / "data" / "profiles"

CHAIN = (LayerCost("a", 1.0, 2.0, 10, 5, 100, 120), LayerCost("b", 3.0, 4.0), LayerCost("c", 5.0, 6.0))


LAYER = Profile.of(CHAIN[:1], []).to_json()["layers"][0]


def test_layers_are_in_topological_order_and_otherwise_as_listed() -> None:
    names = [layer.name for layer in Profile.of(CHAIN, [("c", "a"), ("c", "b")]).layers]
    assert names == ["c", "a", "b"]


def test_users_are_listed_once() -> None:
    profile = Profile.of(CHAIN, [("a", "c"), ("a", "b"), ("a", "c")])
    assert profile.users == ((1, 2), (), ())


def test_a_cycle_is_named() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "b")]
    with pytest.raises(HvpipeError, match=r"no cycle\. Received: (b -> c -> b|c -> b -> c)$"):
        Profile.of(CHAIN, edges)


def test_a_layer_that_uses_itself_is_a_cycle() -> None:
    with pytest.raises(HvpipeError, match="Received: a -> a"):
        Profile.of(CHAIN, [("a", "a")])


def test_scaling_keeps_weight_bytes() -> None:
    half = Profile(CHAIN, ((0, 1), (1, 2)), batch_size=8).at_batch(4)
    assert half.batch_size == 4
    assert half.layers[0] == LayerCost("a", 0.5, 1.0, 10, 5, 50, 60)


def test_scaling_keeps_the_fixed_part_of_a_time() -> None:
    layer = LayerCost("a", 1.0, 2.0, fixed_forward_s=0.5, fixed_backward_s=2.0)
    profile = Profile((layer,), (), batch_size=8)
    assert [profile.at_batch(size).layers[0].forward_s for size in (2, 16)] == [0.625, 1.5]
    assert [profile.at_batch(size).layers[0].backward_s for size in (2, 16)] == [2.0, 2.0]
    assert profile.at_batch(2).at_batch(16) == profile.at_batch(16)


def test_json_round_trip(tmp_path: Path) -> None:
    parts = {"fixed_forward_s": 1.0, "fixed_backward_s": 2.0, "update_s": 0.5, "weight_share": 0.25}
    layers = (*CHAIN[:2], LayerCost("c", 5.0, 6.0, **parts))
    profile = Profile.of(layers, [("a", "b"), ("a", "c")], batch_size=32, model="abc")
    profile.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile


def test_json_may_leave_out_the_optional_costs() -> None:
    document = Profile.of(CHAIN, []).to_json()
    for row in document["layers"]:
        for part in ("fixed_forward_s", "fixed_backward_s", "update_s", "weight_share"):
            del row[part]
    assert Profile.from_json(document) == Profile.of(CHAIN, [])


def test_tensors_for_different_users() -> None:
    """c uses both tensors of a, b the second, whose gradient has no bytes. That of b has half its bytes."""
    tensors = (OutputTensor(40, ("c",)), OutputTensor(60, ("b", "c"), 0))
    layers = [
        replace(CHAIN[0], tensors=tensors),
        replace(CHAIN[1], output_bytes=8, gradient_bytes=4),
        CHAIN[2],
    ]
    profile = Profile.of(layers, [("a", "b"), ("a", "c"), ("b", "c")], batch_size=2)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert profile.edge_bytes == {(0, 1): (60, 0), (0, 2): (100, 40), (1, 2): (8, 4)}
    twice = profile.at_batch(4)
    assert twice.edge_bytes == {(0, 1): (120, 0), (0, 2): (200, 80), (1, 2): (16, 8)}


def test_the_fingerprint_ignores_times() -> None:
    edges = [("a", "b"), ("b", "c")]
    faster = [LayerCost("a", 0.1, 0.2, 10), *CHAIN[1:]]
    heavier = [LayerCost("a", 1.0, 2.0, 11), *CHAIN[1:]]
    profile = Profile.of(CHAIN, edges)
    assert Profile.of(faster, edges).fingerprint == profile.fingerprint
    assert Profile.of(heavier, edges).fingerprint != profile.fingerprint
    assert Profile.of(CHAIN, edges[:1]).fingerprint != profile.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, r'"version": 1\. Received: format=\'hvpipe-profile\', version=9'),
        ({"layers": 3}, r"p\.json: layers should be a list of objects\. Received: layers=3"),
        ({"layers": [], "edges": []}, "at least one layer"),
        ({"layers": [{"name": "a"}]}, r"layers\[0\]\.forward_s is missing, and should be a number"),
        ({"edges": [{"from": "a", "to": "z"}]}, "there is no layer 'z'"),
        (
            {"layers": [LAYER | {"tensors": [{"bytes": 1, "users": ["b"]}]}], "edges": []},
            "tensors of layer 'a' should list the same users as the edges. Received: 'b'",
        ),
        ({"layers": [LAYER | {"tensors": [{"bytes": -1, "users": []}]}]}, r"tensors\[0\].*bytes=-1"),
        ({"layers": [LAYER | {"tensors": [{"bytes": 1, "to": []}]}]}, "only bytes, gradient_bytes, users"),
        ({"layers": [LAYER | {"gradient_bytes": 0.5}]}, "gradient_bytes should be a whole number"),
        ({"batch_size": 0}, "batch_size should be a whole number of at least 1"),
        ({"batch_size": 10**400}, r"batch_size should be a number .*Received: batch_size=10000"),
    ],
)
def test_bad_json_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(Profile.of(CHAIN, [("a", "b")]).to_json() | change))
    with pytest.raises(HvpipeError, match=message) as caught:
        Profile.read(path)
    assert str(path) in str(caught.value)


def test_unreadable_json_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{\n "format": oops\n}')
    with pytest.raises(HvpipeError, match=r"p\.json, line 2, column 12: should be JSON"):
        Profile.read(path)
    with pytest.raises(HvpipeError, match="No such file"):
        Profile.read(tmp_path / "none.json")
    path.write_text("[" * 200_000)
    with pytest.raises(HvpipeError, match=r"p\.json should be JSON\. Received: brackets nested too deeply"):
        Profile.read(path)


def test_names_differ() -> None:
    with pytest.raises(HvpipeError, match="'a' twice"):
        Profile.of([CHAIN[0], CHAIN[0]], [])
