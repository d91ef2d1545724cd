"""Sums over runs of consecutive layers, and the tensors between such runs, for thousands of forecasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hvpipe.plan.buckets import cut_buckets, fitting_bytes
from hvpipe.specs.cluster import Link
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

_REMEMBERED = 1000


@dataclass(frozen=True)
class Crossing:
    """The tensors from one stage to another.

    Args:
        bytes: Bytes of all tensors together.
        messages: Number of tensors that have bytes.
        back_bytes: Bytes of all their gradients.
        back_messages: Number of gradients that have bytes.
    """

    bytes: int
    messages: int
    back_bytes: int
    back_messages: int

    def time_s(self, link: Link, back: bool) -> float:
        """Return the seconds of the tensors on a link, or `back` those of their gradients."""
        if back:
            return link.time_s(self.back_bytes, self.back_messages)
        return link.time_s(self.bytes, self.messages)


@dataclass
class LayerSums:
    """Sums over the layers [start, end) of a profile, each in constant time.

    Args:
        profile: The profile.
    """

    profile: Profile
    _bucket_bytes: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False)
    _crossings: dict[tuple[int, ...], Mapping[tuple[int, int], Crossing]] = field(
        default_factory=dict, repr=False
    )

    _of_types: dict[str, LayerSums] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.forward_s = self._sums(lambda layer: layer.forward_s)
        self.backward_s = self._sums(lambda layer: layer.backward_s)
        self.weights_s = self._sums(lambda layer: layer.weights_part_s)
        self.update_s = self._sums(lambda layer: layer.update_s)
        self.state_bytes = self._sums(lambda layer: layer.state_bytes)
        self.saved_bytes = self._sums(lambda layer: layer.saved_bytes)
        layers = self.profile.layers
        self._again = [(place, before, layers[place]) for place, before in self.profile.used_before.items()]
        self._edges = [
            (number, tensor.maker, user, tensor.bytes, tensor.gradient_bytes)
            for number, tensor in enumerate(self.profile.tensors)
            for user in tensor.users
        ]

    def on(self, device_type: str) -> LayerSums:
        """Return the sums of the profile on devices of a type."""
        profile = self.profile.on(device_type)
        if profile is self.profile:
            return self
        if device_type not in self._of_types:
            self._of_types[device_type] = LayerSums(profile)
        return self._of_types[device_type]

    def _sums(self, of: Callable[[LayerCost], float]) -> list[float]:
        return [0, *accumulate(map(of, self.profile.layers))]

    def crossings(self, ends: Sequence[int]) -> Mapping[tuple[int, int], Crossing]:
        """Return what travels between stages, by (maker's stage, user's stage).

        A tensor with several users in one stage travels there once. A tensor without bytes is no message.

        Args:
            ends: The end of each stage: stage s has the layers from ends[s - 1] to ends[s] - 1.
        """
        key = tuple(ends)
        if key in self._crossings:
            return self._crossings[key]
        stage_of: list[int] = []
        for stage, (start, end) in enumerate(pairwise((0, *ends))):
            stage_of += [stage] * (end - start)
        sizes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        before = (-1, -1)  # users are sorted, so those in the same stage follow each other
        for number, maker, user, size_bytes, back_bytes in self._edges:
            home, away = stage_of[maker], stage_of[user]
            if home != away and (number, away) != before:
                before = (number, away)
                sizes.setdefault((home, away), []).append((size_bytes, back_bytes))
        found = {}
        for pair, tensors in sizes.items():
            there, back = zip(*tensors, strict=True)
            found[pair] = Crossing(sum(there), sum(map(bool, there)), sum(back), sum(map(bool, back)))
        if len(self._crossings) >= _REMEMBERED:
            self._crossings.clear()
        self._crossings[key] = found
        return found

    def kept_bytes(
        self, ends: Sequence[int], crossings: Mapping[tuple[int, int], Crossing]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return for each stage its state, what it receives, and what its layers save for a micro-batch."""
        spans = list(pairwise([0, *ends]))
        received = [0] * len(ends)
        for (_, user), crossing in crossings.items():
            received[user] += crossing.bytes
        state = [int(self.state_bytes[end] - self.state_bytes[start]) for start, end in spans]
        for stage, (start, end) in enumerate(spans):
            state[stage] -= sum(layer.state_bytes for layer in self._counted_twice(start, end))
        saved = [int(self.saved_bytes[end] - self.saved_bytes[start]) for start, end in spans]
        return state, received, saved

    def _counted_twice(self, start: int, end: int) -> list[LayerCost]:
        """Return the layers of a run whose weights an earlier layer of the run uses too."""
        return [layer for place, before, layer in self._again if start <= before and place < end]

    def whole_update_s(self, start: int, end: int) -> float:
        """Return the seconds to update the weights of a run of layers, on a device of speed 1."""
        again_s = sum(layer.update_s for layer in self._counted_twice(start, end))
        return self.update_s[end] - self.update_s[start] - again_s

    def bucket_bytes(self, start: int, end: int) -> list[int]:
        """Return the bytes of each gradient bucket of the layers, in the order of the backward."""
        found = self._bucket_bytes.get((start, end))
        if found is None:
            layers = self.profile.once(range(start, end))
            sizes = [layer.weight_bytes for layer in layers if layer.weight_bytes]
            buckets = cut_buckets(sizes, fitting_bytes(sum(sizes)))
            found = self._bucket_bytes[start, end] = [sum(sizes[i] for i in bucket) for bucket in buckets]
        return found
