"""The costs of one layer, and the tensors that it makes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from hvpipe.config_file import NAME, Table, is_name, short
from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Link

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
                    f"Received: {short(name)}: {pair}"
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

    def scaled(self, by: float) -> LayerCost:
        """Return the costs for `by` times the samples: all but weights and the fixed parts changes."""
        return replace(
            self,
            forward_s=self.fixed_forward_s + (self.forward_s - self.fixed_forward_s) * by,
            backward_s=self.fixed_backward_s + (self.backward_s - self.fixed_backward_s) * by,
            output_bytes=math.ceil(self.output_bytes * by),
            saved_bytes=math.ceil(self.saved_bytes * by),
            time_s={name: self.scaled_s(name, by) for name in self.time_s},
            gradient_bytes=_scaled(self.gradient_bytes, by),
            tensors=tuple(tensor.scaled(by) for tensor in self.tensors),
        )

    def scaled_s(self, device_type: str, by: float) -> tuple[float, float]:
        """Return `time_s` of a type for `by` times the samples: all but the fixed parts changes."""
        forward_s, backward_s = self.time_s[device_type]
        fixed_forward_s, fixed_backward_s = fixed_s(self, device_type)
        return (
            fixed_forward_s + (forward_s - fixed_forward_s) * by,
            fixed_backward_s + (backward_s - fixed_backward_s) * by,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, their gradients and the optimizer's slots."""
        return 2 * self.weight_bytes + self.slot_bytes


def fixed_s(layer: LayerCost, device_type: str) -> tuple[float, float]:
    """Return the fixed parts of `time_s` of a type: as large a share of it as of the usual time."""
    usual = (layer.forward_s, layer.fixed_forward_s), (layer.backward_s, layer.fixed_backward_s)
    shares = [part_s / time_s if time_s > 0 else 0.0 for time_s, part_s in usual]
    forward_s, backward_s = layer.time_s[device_type]
    return shares[0] * forward_s, shares[1] * backward_s


def _scaled(size_bytes: int | None, by: float) -> int | None:
    return None if size_bytes is None else math.ceil(size_bytes * by)


def layer_json(layer: LayerCost) -> dict[str, Any]:
    """Return the row of a layer in a profile."""
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


def layer_of(row: Table) -> LayerCost:
    """Return the layer of a row of a profile."""
    sizes = ("weight_bytes", "slot_bytes", "output_bytes", "saved_bytes")
    parts = ("fixed_forward_s", "fixed_backward_s", "weight_share")  # differences, which may be tiny
    row.allow(("name", "forward_s", "backward_s", "update_s", *sizes, *parts, *_OPTIONAL))
    given: dict[str, Any] = {time: row.seconds(time) for time in ("forward_s", "backward_s")}
    if row.has("update_s"):
        given["update_s"] = row.seconds("update_s")
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


def _time_s(row: Table) -> dict[str, tuple[float, float]]:
    found = {}
    for name in row.as_dict():
        if not is_name(name):
            raise HvpipeError(f"{row.place} should be by type, which is {NAME}. Received: {short(name)}")
        pair = row.all_seconds(name)
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


def _check_number(of: str, item: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise HvpipeError(f"{item} of {of} should be finite and at least 0. Received: {item}={value}")
