"""A model's profile: each layer's cost in seconds and bytes, and which layers use its output."""

from __future__ import annotations

import heapq
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hvpipe.config_file import MOST, NAME, Table, fingerprint, is_name, read_document, write_document
from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Cluster, Device, Link

FORMAT, VERSION = "hvpipe-profile", 1

_SHOWN = 5
"""The most layers of a cycle that an error names."""

_OPTIONAL = ("weights_of", "time_s", "gradient_bytes", "tensors")
_NO_NUMBERS = ("name", "weights_of", "time_s", "tensors")


@dataclass(frozen=True)
class OutputTensor:
    """One of several tensors that a layer makes.

    Args:
        bytes: Bytes to send to each stage that uses it.
        users: The names of the layers that use it.
        gradient_bytes: Bytes that each of these stages sends back; None for as many as `bytes`.

    Raises:
        HvpipeError: If a number is negative or not finite.

    Example:
        ```python
        made = OutputTensor(4096, ("dense",)), OutputTensor(64, ("decoder",))
        lstm = LayerCost("lstm", 0.01, 0.02, tensors=made)
        ```
    """

    bytes: int
    users: tuple[str, ...]
    gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        for item in ("bytes", "gradient_bytes"):
            _check_number("a tensor", item, getattr(self, item))

    def scaled(self, by: float) -> OutputTensor:
        """Return the tensor for `by` times the samples."""
        return replace(
            self, bytes=math.ceil(self.bytes * by), gradient_bytes=_scaled(self.gradient_bytes, by)
        )


@dataclass(frozen=True)
class SentTensor:
    """A tensor that other layers use, with indices into `Profile.layers`.

    Args:
        maker: The layer that makes it.
        users: The layers that use it, in order.
        bytes: Its bytes.
        gradient_bytes: The bytes of its gradient.
    """

    maker: int
    users: tuple[int, ...]
    bytes: int
    gradient_bytes: int

    @property
    def messages(self) -> int:
        """The number of messages to a stage and back. A tensor or gradient without bytes is not sent."""
        return (self.bytes > 0) + (self.gradient_bytes > 0)

    @property
    def both_bytes(self) -> int:
        """The bytes to a stage and back."""
        return self.bytes + self.gradient_bytes

    def there_and_back_s(self, link: Link) -> float:
        """Return the seconds of the tensor one way and its gradient the other way."""
        return link.time_s(self.both_bytes, self.messages)


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer on a device of speed 1, for one batch of the profile.

    Args:
        name: Unique name in the profile.
        forward_s: Seconds of the forward.
        backward_s: Seconds of the whole backward.
        weight_bytes: Bytes of the trainable weights.
        slot_bytes: Other bytes that always stay in memory: the optimizer's slots (per weight none for SGD,
            one for momentum, two for Adam) and variables that are not trained.
        output_bytes: Bytes to send to each stage that uses the output.
        saved_bytes: Bytes kept from the forward to the backward. Includes the output, not the input: the
            input counts with the layer that makes it.
        fixed_forward_s: The part of `forward_s` that does not depend on the batch size: starting the layer,
            reading weights.
        fixed_backward_s: The part of `backward_s` that does not depend on the batch size: starting the layer,
            reading weights, adding to their gradients.
        update_s: Seconds that the optimizer takes for the weights, once per step.
        weight_share: The share of the backward, 0 to 1, that computes weight gradients. Some schedules put
            this part off. None if unknown.
        weights_of: The name of the layer whose weights this layer uses; None if it has its own.
        time_s: Seconds of forward and backward on devices of other types, by the type, for the same batch.
        gradient_bytes: Bytes that each of these stages sends back, 0 for integers; None for as many as
            `output_bytes`.
        tensors: The output's tensors, if its users need different ones; they travel instead of
            `output_bytes`.

    Raises:
        HvpipeError: If a value is negative, not finite, or a part exceeds its whole.

    Example:
        ```python
        dense = LayerCost("dense", forward_s=0.001, backward_s=0.002, weight_bytes=4096, output_bytes=1024)
        ```
    """

    name: str
    forward_s: float
    backward_s: float
    weight_bytes: int = 0
    slot_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0
    update_s: float = 0.0
    weight_share: float | None = None
    weights_of: str | None = None
    time_s: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    gradient_bytes: int | None = None
    tensors: tuple[OutputTensor, ...] = ()

    def __post_init__(self) -> None:
        if self.weight_share is not None and not 0 <= self.weight_share <= 1:
            raise HvpipeError(
                f"weight_share of layer {self.name!r} should be from 0 to 1, or None. "
                f"Received: weight_share={self.weight_share}"
            )
        for name, pair in self.time_s.items():
            if not is_name(name) or not all(math.isfinite(time_s) and time_s >= 0 for time_s in pair):
                raise HvpipeError(
                    f"time_s of layer {self.name!r} should be by type, which is {NAME}, and at least 0. "
                    f"Received: {name!r}: {pair}"
                )
        for item in fields(self):
            if item.name not in _NO_NUMBERS:
                _check_number(f"layer {self.name!r}", item.name, getattr(self, item.name))
        for part, whole in (("fixed_forward_s", "forward_s"), ("fixed_backward_s", "backward_s")):
            if getattr(self, part) > getattr(self, whole):
                raise HvpipeError(
                    f"{part} of layer {self.name!r} should be at most its {whole}. "
                    f"Received: {part}={getattr(self, part)}, {whole}={getattr(self, whole)}"
                )

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def weights_part_s(self) -> float:
        """Seconds of the backward spent on weight gradients; half of it if unknown."""
        return self.backward_s * (0.5 if self.weight_share is None else self.weight_share)

    def scaled_s(self, device_type: str, by: float) -> tuple[float, float]:
        """Return `time_s` of a type for `by` times the samples: all but the fixed parts changes."""
        forward_s, backward_s = self.time_s[device_type]
        fixed_forward_s = min(forward_s, self.fixed_forward_s)
        fixed_backward_s = min(backward_s, self.fixed_backward_s)
        return (
            fixed_forward_s + (forward_s - fixed_forward_s) * by,
            fixed_backward_s + (backward_s - fixed_backward_s) * by,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, their gradients and the optimizer's slots."""
        return 2 * self.weight_bytes + self.slot_bytes


@dataclass(frozen=True)
class Profile:
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
                f"weights_of of layer {layer.name!r} should name a layer that has as many bytes of its own "
                f"weights. Received: weights_of={layer.weights_of!r}, weight_bytes={layer.weight_bytes}"
            )

    def _check_tensors(self, place: int) -> None:
        """Refuse tensors of a layer whose users are not those of the edges."""
        named = {name for tensor in self.layers[place].tensors for name in tensor.users}
        if wrong := named ^ {self.layers[user].name for user in self.users[place]}:
            raise HvpipeError(
                f"The tensors of layer {self.layers[place].name!r} should have the users that the edges say. "
                f"Received: {min(wrong)!r} in one of the two only"
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
                        f"Received: {pair[0]!r} -> {pair[1]!r}; there is no layer {name!r}"
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
                f"{self.model or 'this model'}. Received: name={name!r}"
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
    def _on(self) -> dict[str, Profile]:
        return {"": self}

    def _with_times_of(self, device_type: str) -> Profile:
        if not any(device_type in layer.time_s for layer in self.layers):
            return self
        layers = []
        for layer in self.layers:
            forward_s, backward_s = layer.time_s.get(device_type, (layer.forward_s, layer.backward_s))
            fixed_forward_s = min(forward_s, layer.fixed_forward_s)
            fixed_backward_s = min(backward_s, layer.fixed_backward_s)
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

    def speed(self, device: Device) -> float:
        """Return how fast a device runs the whole model; a device of speed 1 without a type has 1."""
        there_s = self.on(device.type).compute_s
        return device.speed * (self.compute_s / there_s if there_s and there_s != self.compute_s else 1.0)

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
        return sum(layer.compute_s for layer in self.layers)

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
        by = batch_size / self.batch_size
        scaled = (
            replace(
                layer,
                forward_s=layer.fixed_forward_s + (layer.forward_s - layer.fixed_forward_s) * by,
                backward_s=layer.fixed_backward_s + (layer.backward_s - layer.fixed_backward_s) * by,
                output_bytes=math.ceil(layer.output_bytes * by),
                saved_bytes=math.ceil(layer.saved_bytes * by),
                time_s={name: layer.scaled_s(name, by) for name in layer.time_s},
                gradient_bytes=_scaled(layer.gradient_bytes, by),
                tensors=tuple(tensor.scaled(by) for tensor in layer.tensors),
            )
            for layer in self.layers
        )
        return replace(self, layers=tuple(scaled), batch_size=batch_size)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "batch_size": self.batch_size,
            "layers": [_layer_json(layer) for layer in self.layers],
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
        table.allow(("format", "version", "model", "batch_size", "layers", "edges"))
        table.check_format(FORMAT, VERSION)
        if not table.tables("layers"):
            raise HvpipeError(f"{table.place} should have at least one layer. Received: layers=[]")
        edges = [_edge(row) for row in table.tables("edges")]
        with table.named_in_errors():
            return Profile.of(
                [_layer(row) for row in table.tables("layers")],
                edges,
                batch_size=table.integer("batch_size", minimum=1),
                model=table.text("model"),
            )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file."""
        write_document(path, self.to_json())

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Profile:
        """Read a JSON file, or a PipeDream graph if the name ends in .txt (see `read_pipedream`).

        Args:
            path: The file.

        Returns:
            The profile.

        Raises:
            HvpipeError: If the file cannot be read or is not a profile; the message names file and field.
        """
        return read_pipedream(path) if Path(path).suffix == ".txt" else Profile.from_json(read_document(path))


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
        HvpipeError: If the file cannot be read, or a line is neither a layer nor an edge.

    Example:
        ```python
        profile = read_pipedream("tests/data/profiles/gnmt.txt", batch_size=64)
        ```
    """
    source = Path(path)
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HvpipeError(f"{source} should be a PipeDream graph. Received: {error}") from error
    layers: list[LayerCost] = []
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if edge := re.fullmatch(r"\t(\S+) -- (\S+)\s*", line):
            edges.append((edge[1], edge[2]))
        elif node := _NODE.fullmatch(line):
            layers.append(_pipedream_layer(node, slots_per_weight, f"{source}, line {number}"))
        elif line.strip():
            raise HvpipeError(
                f"{source}, line {number}: should be 'NAME -- LAYER -- forward_compute_time=..., "
                "backward_compute_time=..., activation_size=..., parameter_size=...' or '<tab>NAME -- NAME'. "
                f"Received: {line[:60]!r}"
            )
    # Nodes are numbered in the order in which the model ran; the file lists them in no order.
    layers.sort(key=lambda layer: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", layer.name)])
    try:
        return Profile.of(layers, edges, batch_size=batch_size, model=source.stem)
    except HvpipeError as error:
        raise HvpipeError(f"{source}: {error}") from error


_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<kind>.+) -- forward_compute_time=(?P<forward_ms>[^,]+), "
    r"backward_compute_time=(?P<backward_ms>[^,]+), activation_size=(?P<activation>[^,]+), "
    r"parameter_size=(?P<parameter>[^,]+)\s*"
)


def _pipedream_layer(node: re.Match[str], slots_per_weight: float, place: str) -> LayerCost:
    try:
        output_bytes = int(sum(float(size) for size in node["activation"].strip("[]").split(";")))
        weight_bytes = int(float(node["parameter"]))
        forward_s, backward_s = float(node["forward_ms"]) / 1e3, float(node["backward_ms"]) / 1e3
        if not is_name(node["name"]) or max(output_bytes, weight_bytes, forward_s, backward_s) > MOST:
            raise ValueError(f"the name should be {NAME}, and numbers at most {MOST:g}")
    except (ValueError, OverflowError) as error:
        raise HvpipeError(f"{place}: times and sizes should be finite numbers. Received: {error}") from error
    if node["kind"].startswith("Input"):
        return LayerCost(node["name"], 0.0, 0.0)
    try:
        return LayerCost(
            name=node["name"],
            forward_s=forward_s,
            backward_s=backward_s,
            weight_bytes=weight_bytes,
            slot_bytes=int(slots_per_weight * weight_bytes),
            output_bytes=output_bytes,
            saved_bytes=output_bytes,
        )
    except HvpipeError as error:
        raise HvpipeError(f"{place}: {error}") from error


def _check_number(of: str, item: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise HvpipeError(f"{item} of {of} should be finite and at least 0. Received: {item}={value}")


def _edge(row: Table) -> tuple[str, str]:
    row.allow(("from", "to"))
    return row.text("from"), row.text("to")


def _layer_json(layer: LayerCost) -> dict[str, Any]:
    fields_of = asdict(layer)
    fields_of["time_s"] = {name: list(pair) for name, pair in layer.time_s.items()}
    fields_of["tensors"] = [
        {name: value for name, value in asdict(tensor).items() if value is not None}
        for tensor in layer.tensors
    ]
    return {
        name: value
        for name, value in fields_of.items()
        if name not in _OPTIONAL or value not in (None, {}, [])
    }


def _time_s(row: Table) -> dict[str, tuple[float, float]]:
    found = {}
    for name in row.as_dict():
        pair = row.numbers(name)
        if len(pair) != 2:
            raise HvpipeError(
                f"{row.place}.{name} should be seconds of forward and backward. Received: {pair}"
            )
        found[name] = (pair[0], pair[1])
    return found


def _tensor(row: Table) -> OutputTensor:
    row.allow(("bytes", "users", "gradient_bytes"))
    gradient_bytes = row.integer("gradient_bytes") if row.has("gradient_bytes") else None
    return OutputTensor(row.integer("bytes"), tuple(row.texts("users")), gradient_bytes)


def _scaled(size_bytes: int | None, by: float) -> int | None:
    return None if size_bytes is None else math.ceil(size_bytes * by)


def _layer(row: Table) -> LayerCost:
    sizes = ("weight_bytes", "slot_bytes", "output_bytes", "saved_bytes")
    parts = ("fixed_forward_s", "fixed_backward_s", "update_s", "weight_share")
    row.allow(("name", "forward_s", "backward_s", *sizes, *parts, *_OPTIONAL))
    given: dict[str, Any] = {time: row.number(time) for time in ("forward_s", "backward_s")}
    given |= {size: row.integer(size) for size in sizes}
    given |= {part: row.number(part) for part in parts if row.has(part)}
    if row.has("weights_of"):
        given["weights_of"] = row.text("weights_of")
    if row.has("time_s"):
        given["time_s"] = _time_s(row.table("time_s"))
    if row.has("gradient_bytes"):
        given["gradient_bytes"] = row.integer("gradient_bytes")
    if row.has("tensors"):
        given["tensors"] = tuple(map(_tensor, row.tables("tensors")))
    return LayerCost(row.name("name"), **given)


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
    walk = [min(stuck)]
    while maker_of[walk[-1]] not in walk:
        walk.append(maker_of[walk[-1]])
    circle = walk[walk.index(maker_of[walk[-1]]) :]
    names = [layers[i].name[:40] for i in (circle[0], *reversed(circle))]
    if len(names) > _SHOWN:
        names = [*names[: _SHOWN - 1], f"{len(names) - _SHOWN} more", names[-1]]
    return " -> ".join(names)
