"""Reads the layer graphs that PipeDream's profiler wrote."""

from __future__ import annotations

import re
from pathlib import Path

from hvpipe.config_file import MOST, MOST_BYTES, NAME, is_name
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import read_plain
from hvpipe.specs.layer_cost import LayerCost


def read_graph(source: Path, slots_per_weight: float) -> tuple[list[LayerCost], list[tuple[str, str]]]:
    """Return the layers and edges of a graph; see `hvpipe.plan.read_pipedream`."""
    try:
        lines = read_plain(source, MOST_BYTES).decode("utf-8-sig").splitlines()
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
    if not layers and not edges:
        raise HvpipeError(f"{source} is empty: it should have at least one layer")
    # Nodes are numbered in the order in which the model ran; the file lists them in no order.
    layers.sort(key=lambda layer: [int(t) if t.isdecimal() else t for t in re.split(r"(\d+)", layer.name)])
    return layers, edges


_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<kind>.+) -- forward_compute_time=(?P<forward_ms>[^,]+), "
    r"backward_compute_time=(?P<backward_ms>[^,]+), activation_size=(?P<activation>[^,]+), "
    r"parameter_size=(?P<parameter>[^,\s]+)(?: -- stage_id=\d+)?\s*"
)


def _pipedream_layer(node: re.Match[str], slots_per_weight: float, place: str) -> LayerCost:
    try:
        output_bytes = int(sum(float(size) for size in node["activation"].strip("[]").split(";")))
        weight_bytes = int(float(node["parameter"]))
        forward_s, backward_s = float(node["forward_ms"]) / 1e3, float(node["backward_ms"]) / 1e3
    except (ValueError, OverflowError) as error:
        raise HvpipeError(f"{place}: times and sizes should be finite numbers. Received: {error}") from error
    if not is_name(node["name"]):
        raise HvpipeError(f"{place}: the name should be {NAME}. Received: {node['name'][:40]!a}")
    if (largest := max(output_bytes, weight_bytes, forward_s, backward_s)) > MOST:
        raise HvpipeError(f"{place}: times and sizes should be at most {MOST:g}. Received: {largest:g}")
    if tiny := [time_s for time_s in (forward_s, backward_s) if 0 < time_s < 1 / MOST]:
        raise HvpipeError(f"{place}: times should be 0, or at least {1 / MOST:g} s. Received: {tiny[0]:g} s")
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
