"""A model's profile: each layer's cost in seconds and bytes, and which layers use its output."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvpipe.config_file import MOST, Document, Table, fingerprint, short
from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Cluster, Device
from hvpipe.specs.layer_cost import LayerCost, SentTensor, fixed_s, layer_json, layer_of
from hvpipe.specs.pipedream import read_graph

FORMAT, VERSION = "hvpipe-profile", 1

_SHOWN = 5
"""The most layers of a cycle that an error names."""


@dataclass(frozen=True)
class Profile(Document):
    """A model's layers in topological order, and which layers use the output of each.

    Args:
        layers: The costs of each layer, in topological order.
        edges: Pairs (maker, user) of indices into `layers`; the user takes the maker's output.
        batch_size: Samples in the batch that the costs are for.
        model: A name for people.

    Raises:
        HvpipeError: If there is no layer, names repeat, or an edge does not lead to a later layer.

    Example:
        ```python
        profile = Profile.read("profile.json").at_batch(8)
        ```
    """

    layers: tuple[LayerCost, ...]
    edges: tuple[tuple[int, int], ...]
    batch_size: int = 1
    model: str = ""
    _place: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise HvpipeError("A profile should have at least one layer. Received: layers=()")
        if self.batch_size < 1:
            raise HvpipeError(f"batch_size should be at least 1. Received: batch_size={self.batch_size}")
        object.__setattr__(self, "_place", {layer.name: i for i, layer in enumerate(self.layers)})
        if len(self._place) < len(self.layers):
            twice = next(layer.name for i, layer in enumerate(self.layers) if self._place[layer.name] != i)
            raise HvpipeError(f"Names of layers should differ. Received: {twice!r} twice")
        for layer in self.layers:
            if layer.weights_of is not None:
                self._check_owner(layer)
        for maker, user in self.edges:
            if not 0 <= maker < user < len(self.layers):
                raise HvpipeError(
                    "An edge should go from a layer to a later one (Profile.of sorts them). "
                    f"Received: edge=({maker}, {user}) of {len(self.layers)} layers"
                )
        for place in [place for place, layer in enumerate(self.layers) if layer.tensors]:
            self._check_tensors(place)

    def _check_owner(self, layer: LayerCost) -> None:
        """Refuse `weights_of` that names no layer with own weights of the same size."""
        place = self._place.get(str(layer.weights_of))
        owner = None if place is None else self.layers[place]
        if owner is None or owner.weights_of is not None or owner.weight_bytes != layer.weight_bytes:
            raise HvpipeError(
                f"weights_of of layer {layer.name!r} should name a layer whose own weights have the same "
                f"size. Received: weights_of={short(layer.weights_of)}, weight_bytes={layer.weight_bytes}"
            )

    def _check_tensors(self, place: int) -> None:
        """Refuse tensors of a layer whose users are not those of the edges."""
        named = {name for tensor in self.layers[place].tensors for name in tensor.users}
        if wrong := named ^ {self.layers[user].name for user in self.users[place]}:
            raise HvpipeError(
                f"The tensors of layer {self.layers[place].name!r} should list the same users as the edges. "
                f"Received: {short(min(wrong))}, which only one of the two has"
            )

    @cached_property
    def used_before(self) -> Mapping[int, int]:
        """For layers whose weights an earlier layer uses too: the last such layer, by indices."""
        last: dict[str, int] = {}
        found = {}
        shared = {layer.weights_of for layer in self.layers} - {None}
        for place, layer in enumerate(self.layers):
            owner = layer.weights_of or layer.name
            if owner in shared:
                if owner in last:
                    found[place] = last[owner]
                last[owner] = place
        return found

    def once(self, places: Sequence[int]) -> list[LayerCost]:
        """Return the layers of a stage; weights that several use count once, with slots and update."""
        if not self.used_before:
            return [self.layers[place] for place in places]
        counted: set[str] = set()
        found = []
        for layer in (self.layers[place] for place in places):
            owner = layer.weights_of or layer.name
            if owner in counted:
                layer = replace(layer, weight_bytes=0, slot_bytes=0, update_s=0.0)
            counted.add(owner)
            found.append(replace(layer, weights_of=None))
        return found

    @staticmethod
    def of(
        layers: Iterable[LayerCost],
        edges: Iterable[tuple[str, str]],
        *,
        batch_size: int = 1,
        model: str = "",
    ) -> Profile:
        """Make a profile of layers in any order and edges by name.

        Sorts the layers topologically; of those that could come next, the first listed goes first.

        Args:
            layers: The costs of each layer.
            edges: Pairs (maker, user) of layer names.
            batch_size: Samples in the batch that the costs are for.
            model: A name for people.

        Returns:
            The profile.

        Raises:
            HvpipeError: If an edge names an unknown layer, or the layers form a cycle; the message names it.
        """
        given = list(layers)
        number = {layer.name: i for i, layer in enumerate(given)}
        pairs = []
        for pair in edges:
            for name in pair:
                if name not in number:
                    raise HvpipeError(
                        "An edge should join two layers of the profile. "
                        f"Received: {short(pair[0])} -> {short(pair[1])}; there is no layer {short(name)}"
                    )
            pairs.append((number[pair[0]], number[pair[1]]))
        order = _topological_order(given, sorted(set(pairs)))
        place = {layer: i for i, layer in enumerate(order)}
        return Profile(
            layers=tuple(given[i] for i in order),
            edges=tuple(sorted({(place[maker], place[user]) for maker, user in pairs})),
            batch_size=batch_size,
            model=model,
        )

    def place(self, name: str) -> int:
        """Return the index of a layer in `layers`; raise HvpipeError if no layer has this name."""
        if name not in self._place:
            raise HvpipeError(
                f"A layer should be one of the {len(self.layers)} in the profile of "
                f"{self.model or 'this model'}. Received: name={short(name)}"
            )
        return self._place[name]

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the indices of the layers that use its output, in order."""
        found: list[list[int]] = [[] for _ in self.layers]
        for maker, user in sorted(set(self.edges)):
            found[maker].append(user)
        return tuple(tuple(users) for users in found)

    @cached_property
    def tensors(self) -> tuple[SentTensor, ...]:
        """The tensors that other layers use, by their makers."""
        found = []
        for maker, (layer, users) in enumerate(zip(self.layers, self.users, strict=True)):
            for one in layer.tensors:
                places = tuple(sorted({self._place[name] for name in one.users}))
                size_bytes = one.bytes if one.gradient_bytes is None else one.gradient_bytes
                found.append(SentTensor(maker, places, one.bytes, size_bytes))
            if users and not layer.tensors:
                size_bytes = layer.output_bytes if layer.gradient_bytes is None else layer.gradient_bytes
                found.append(SentTensor(maker, users, layer.output_bytes, size_bytes))
        return tuple(one for one in found if one.users)

    @cached_property
    def edge_bytes(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """For each pair of maker and user: the bytes of all tensors between them, and of their gradients."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for one in self.tensors:
            for user in one.users:
                there, back = found.get((one.maker, user), (0, 0))
                found[one.maker, user] = there + one.bytes, back + one.gradient_bytes
        return found

    @cached_property
    def makers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the indices of the layers that make its inputs, in order."""
        found: list[list[int]] = [[] for _ in self.layers]
        for maker, users in enumerate(self.users):
            for user in users:
                found[user].append(maker)
        return tuple(tuple(makers) for makers in found)

    def on(self, device_type: str) -> Profile:
        """Return the profile with the times on devices of a type, where layers have `time_s` for it."""
        if device_type not in self._on:
            self._on[device_type] = self._with_times_of(device_type)
        return self._on[device_type]

    @cached_property
    def _types(self) -> set[str]:
        return {name for layer in self.layers for name in layer.time_s}

    @cached_property
    def _on(self) -> dict[str, Profile]:
        return {"": self}

    def _with_times_of(self, device_type: str) -> Profile:
        if not any(device_type in layer.time_s for layer in self.layers):
            return self
        layers = []
        for layer in self.layers:
            if device_type not in layer.time_s:
                layers.append(layer)
                continue
            forward_s, backward_s = layer.time_s[device_type]
            fixed_forward_s, fixed_backward_s = fixed_s(layer, device_type)
            layers.append(
                replace(
                    layer,
                    forward_s=forward_s,
                    backward_s=backward_s,
                    fixed_forward_s=fixed_forward_s,
                    fixed_backward_s=fixed_backward_s,
                )
            )
        return replace(self, layers=tuple(layers))

    def speed(self, device: Device, places: Sequence[int] | None = None) -> float:
        """Return how fast a device runs consecutive layers; a device of speed 1 without a type has 1.

        If the layers take no time there, it is a million times as fast. If they take none without a type,
        speeds are relative to the slowest type.

        Args:
            device: The device.
            places: The indices of the layers; None for the whole model.
        """
        start, end = (0, len(self.layers)) if places is None else (places[0], places[-1] + 1)

        def seconds(device_type: str) -> float:
            until_s = self.on(device_type)._compute_until_s
            return until_s[end] - until_s[start]

        usual_s = seconds("") or max(map(seconds, self._types), default=0.0)
        there_s = seconds(device.type)
        if there_s == usual_s:
            return device.speed
        return device.speed * (usual_s / max(there_s, usual_s * 1e-6))

    def levelled(self, cluster: Cluster) -> Cluster:
        """Return the cluster with devices of no type, as fast as they run the whole model."""
        if not any(device.type for device in cluster.devices):
            return cluster
        hosts = (
            replace(
                host,
                devices=tuple(replace(one, type="", speed=self.speed(one)) for one in host.devices),
            )
            for host in cluster.hosts
        )
        return replace(cluster, hosts=tuple(hosts))

    @cached_property
    def compute_s(self) -> float:
        """Seconds of all layers' forwards and backwards."""
        return self._compute_until_s[-1]

    @cached_property
    def _compute_until_s(self) -> list[float]:
        """Seconds of the forwards and backwards of the first 0, 1, 2, ... layers."""
        return [0.0, *accumulate(layer.compute_s for layer in self.layers)]

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that identify the model: layer names, weights and edges, but no times, which vary."""
        layers = [(layer.name, layer.weight_bytes) for layer in self.layers]
        return fingerprint([layers, sorted(set(self.edges))])

    def at_batch(self, batch_size: int) -> Profile:
        """Scale the profile to another batch size: everything but the fixed parts changes in proportion.

        Small batches may use a device less well in other ways too, so measure near the size of a micro-batch.

        Args:
            batch_size: Samples in the new batch.

        Returns:
            A profile of the same layers.
        """
        if batch_size not in self._scaled:
            by = batch_size / self.batch_size
            layers = tuple(layer.scaled(by) for layer in self.layers)
            self._scaled.clear()  # hundreds of forecasts may follow for the same size
            self._scaled[batch_size] = replace(self, layers=layers, batch_size=batch_size)
        return self._scaled[batch_size]

    @cached_property
    def _scaled(self) -> dict[int, Profile]:
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "batch_size": self.batch_size,
            "layers": [layer_json(layer) for layer in self.layers],
            "edges": [
                {"from": self.layers[maker].name, "to": self.layers[user].name} for maker, user in self.edges
            ],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any] | Table, place: str = "The profile") -> Profile:
        """Return the profile that a JSON object of `to_json` describes; layers may come in any order.

        Args:
            document: The JSON object.
            place: The document's name in errors.

        Returns:
            The profile.

        Raises:
            HvpipeError: If a field is missing, unknown or out of range; the message names it.
        """
        table = document if isinstance(document, Table) else Table(document, place)
        table.check_format(FORMAT, VERSION)
        table.allow(("format", "version", "model", "batch_size", "layers", "edges"))
        if not table.tables("layers"):
            raise HvpipeError(f"{table.place} should have at least one layer. Received: layers=[]")
        edges = [_edge(row) for row in table.tables("edges")]
        with table.named_in_errors():
            return Profile.of(
                [layer_of(row) for row in table.tables("layers")],
                edges,
                batch_size=table.integer("batch_size", minimum=1),
                model=table.name_or_empty("model"),
            )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a JSON file, or a PipeDream graph if the name ends in .txt (see `read_pipedream`).

        Args:
            path: The file.

        Returns:
            The profile.

        Raises:
            HvpipeError: If the file cannot be read or is not a profile; the message names file and field.
        """
        return read_pipedream(path) if Path(path).suffix == ".txt" else super().read(path)


def read_pipedream(
    path: str | os.PathLike[str], *, batch_size: int = 1, slots_per_weight: float = 1.0
) -> Profile:
    """Read a layer graph of PipeDream's profiler (Narayanan et al., SOSP 2019).

    The file has times in milliseconds and sizes in bytes:

        node4 -- Conv2d(...) -- forward_compute_time=1.2, backward_compute_time=2.4, activation_size=8.0, ...
        <tab>node4 -- node5

    Input nodes cost nothing: their time is data loading, and any stage can load. A layer is assumed to save
    its output for the backward.

    Args:
        path: The file.
        batch_size: Samples in the profiled batch; the file doesn't say.
        slots_per_weight: Optimizer slots per weight (0 for SGD, 1 for momentum, 2 for Adam); the file doesn't
            say.

    Returns:
        The profile, named after the file.

    Raises:
        HvpipeError: If the file cannot be read, a line is neither a layer nor an edge, or `slots_per_weight`
            is out of range.

    Example:
        ```python
        profile = read_pipedream("tests/data/profiles/gnmt.txt", batch_size=64)
        ```
    """
    if not 0 <= slots_per_weight <= MOST:
        raise HvpipeError(
            f"slots_per_weight should be a number from 0. Received: slots_per_weight={slots_per_weight}"
        )
    source = Path(path)
    layers, edges = read_graph(source, slots_per_weight)
    try:
        return Profile.of(layers, edges, batch_size=batch_size, model=source.stem)
    except HvpipeError as error:
        raise HvpipeError(f"{source}: {error}") from error


def _edge(row: Table) -> tuple[str, str]:
    row.allow(("from", "to"))
    return row.text("from"), row.text("to")


def _topological_order(layers: Sequence[LayerCost], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Sort by Kahn's algorithm; of the layers that are ready, the one listed first goes first."""
    users: list[list[int]] = [[] for _ in layers]
    missing = [0] * len(layers)
    for maker, user in edges:
        users[maker].append(user)
        missing[user] += 1
    ready = [i for i, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        layer = heapq.heappop(ready)
        order.append(layer)
        for user in users[layer]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, user)
    if len(order) < len(layers):
        raise HvpipeError(
            f"The graph of layers should have no cycle. Received: {_cycle(layers, edges, order)}"
        )
    return order


def _cycle(layers: Sequence[LayerCost], edges: Sequence[tuple[int, int]], sorted_: Sequence[int]) -> str:
    """Name a cycle: walk back from any unsorted layer, as each has an unsorted maker."""
    stuck = set(range(len(layers))) - set(sorted_)
    maker_of = {user: maker for maker, user in reversed(edges) if maker in stuck and user in stuck}
    walked: dict[int, int] = {}  # the position in the walk of each layer
    layer = min(stuck)
    while layer not in walked:
        walked[layer] = len(walked)
        layer = maker_of[layer]
    circle = list(walked)[walked[layer] :]
    names = [layers[i].name[:40] for i in (circle[0], *reversed(circle))]
    if len(names) > _SHOWN:
        names = [*names[: _SHOWN - 1], f"{len(names) - _SHOWN} more", names[-1]]
    return " -> ".join(names)
