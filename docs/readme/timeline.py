"""Draws docs/readme/timeline.svg from real traces: training steps without overlap above steps with it.

python docs/readme/timeline.py                draw timeline.svg from timeline.json
sudo python docs/readme/timeline.py record    first train both modes, and write timeline.json

The model is eight Dense layers of 1,024 units, 34 MB of gradients. Two ranks train it in two network
namespaces of one machine, joined by a link of 1 Gb/s. timeline.json keeps three steps of rank 0 in each mode.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from hvpipe.trace.events import Event, Trace

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MODES = ("none", "step")
STEPS = 3  # kept of each trace
TRAINED_STEPS = 16
LAYERS, UNITS, BATCH = 8, 1024, 384
BUCKET_BYTES = 4_500_000  # the gradients of one layer


# Recording ------------------------------------------------------------------------------------------


def train(overlap: str, trace: str) -> None:
    """Train the model in one mode on this rank, and write the trace of all ranks."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import keras
    import numpy as np

    import hvpipe
    import hvpipe.keras as hk

    hvpipe.init(trace=trace)
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(UNITS, "relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((UNITS,)), *hidden, keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = hk.data_parallel(model, overlap=overlap, bucket_bytes=BUCKET_BYTES)
    rng = np.random.default_rng(hvpipe.rank())
    batch = rng.standard_normal((BATCH, UNITS), np.float32), rng.integers(0, 10, BATCH)
    data = tf.data.Dataset.from_tensors(batch).repeat(TRAINED_STEPS)
    model.fit(data, epochs=1, shuffle=False, verbose=0)
    hvpipe.shutdown()


def record() -> None:
    """Train both modes on a virtual cluster, and keep some typical steps of each."""
    sys.path.insert(0, str(ROOT))
    from bench.cluster.spec import equal_hosts
    from bench.cluster.virtual_cluster import VirtualCluster

    kept = {}
    with tempfile.TemporaryDirectory() as directory, VirtualCluster(equal_hosts(2, "1gbit")) as cluster:
        for mode in MODES:
            path = Path(directory) / f"{mode}.json"
            done = cluster.run(2, [sys.executable, __file__, "train", mode, str(path)], timeout_s=300)
            if done.returncode != 0:
                sys.exit(f"{done.stdout}\n{done.stderr}")
            kept[mode] = Trace(typical_steps(Trace.read(path), STEPS)).to_chrome_json()
    (FOLDER / "timeline.json").write_text(json.dumps(kept, indent=0) + "\n")


def typical_steps(trace: Trace, count: int) -> tuple[Event, ...]:
    """Return the events of rank 0 in `count` consecutive steps that took the median time."""
    steps = trace.of("step", rank=0)[3:-1]  # without tracing, warming up and the last update
    rows = [steps[i : i + count] for i in range(len(steps) - count + 1)]
    times = [row[-1].end_s - row[0].start_s for row in rows]
    middle = statistics.median_low(times)
    row = rows[times.index(middle)]
    begin, end = row[0].start_s, row[-1].end_s
    return tuple(
        event
        for event in trace.events
        if event.rank == 0
        and event.end_s > begin + 1e-6
        and event.start_s < end - 1e-6
        and event.category in ("step", "forward", "backward", "reduce", "update")
    )


# Drawing --------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 960, 92, 12
ROW, GAP = 30, 6
SHOWN_STEPS = 2  # of the linear mode; the other panel shows as much time
TITLES = {
    "none": 'overlap="none": compute, then send gradients, then update (red)',
    "step": 'overlap="step": gradients travel during this backward and the next forward; same weights',
}
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .title { font-size: 15px; font-weight: 600; }
  .in { fill: #ffffff; text-anchor: middle; }
  .number { font-size: 11px; }
  .axis { fill: #59636e; text-anchor: middle; }
  .note { fill: #59636e; }
  .forward { fill: #2f6fd0; } .backward { fill: #7d4cc2; } .update { fill: #c2410c; }
  .reduce { fill: #0f7b6c; } .idle { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }
  .line { stroke: #8c959f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .axis, .note { fill: #9198a1; } .in { fill: #ffffff; }
  }
"""


class Panel:
    """One mode's rows: computing and network of rank 0 over the same time as the other panel."""

    def __init__(self, mode: str, trace: Trace, top: float, scale: float, shown_s: float) -> None:
        self.mode, self.trace, self.top, self.scale, self.shown_s = mode, trace, top, scale, shown_s
        self.begin_s = trace.of("step")[0].start_s

    def x(self, time_s: float) -> float:
        """Return the horizontal place of a time, kept inside the panel."""
        return LEFT + self.scale * min(max(time_s - self.begin_s, 0.0), self.shown_s)

    def box(self, kind: str, start_s: float, end_s: float, row: int, label: str = "") -> str:
        """Return a rectangle, with its label if that fits."""
        left, right, y = self.x(start_s), self.x(end_s), self.top + 32 + row * (ROW + GAP)
        if right - left < 0.5:
            return ""
        space = 1 if kind == "reduce" else 0
        shape = (
            f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{right - left - space:.1f}" height="{ROW}"/>'
        )
        size = "axis" if kind == "idle" else "in number" if len(label) < 3 else "in"
        if not label or right - left < 7 * len(label):
            return shape
        return f'{shape}<text class="{size}" x="{(left + right) / 2:.1f}" y="{y + 20}">{label}</text>'

    def compute_row(self) -> list[str]:
        """Forward, backward and, in the linear mode, the update; dashes where nothing is computed."""
        spans = [e for e in self.trace.events if e.category in ("forward", "backward")]
        if self.mode == "none":
            spans += self.trace.of("update")
        spans.sort(key=lambda event: event.start_s)
        boxes = [self.box(e.category, e.start_s, e.end_s, 0, e.category) for e in spans]
        for before, after in pairwise(spans):
            if after.start_s - before.end_s > 0.05:
                boxes.append(self.box("idle", before.end_s, after.start_s, 0, "waits for gradients"))
        return boxes

    def network_row(self) -> list[str]:
        """Buckets in order of arrival, numbered by layer. Each begins where the one before it ended."""
        names = sorted({e.name for e in self.trace.of("reduce")}, key=lambda name: int(name.split()[0]))
        layer = {name: str(number) for number, name in enumerate(names, 1)}
        boxes, free_s = [], 0.0
        for event in sorted(self.trace.of("reduce"), key=lambda event: event.end_s):
            start_s = max(event.start_s, free_s)
            boxes.append(self.box("reduce", start_s, event.end_s, 1, layer[event.name]))
            free_s = event.end_s
        return boxes

    def draw(self) -> list[str]:
        """Draw the title, both rows and the ends of steps."""
        steps = self.trace.of("step")
        ends = [step.end_s - self.begin_s for step in steps]
        pieces = [f'<text class="title" x="0" y="{self.top + 14}">{TITLES[self.mode]}</text>']
        for row, label in enumerate(("computing", "network")):
            pieces.append(f'<text x="0" y="{self.top + 52 + row * (ROW + GAP)}">{label}</text>')
        pieces += self.compute_row() + self.network_row()
        bottom = self.top + 32 + 2 * ROW + GAP
        for number, end_s in enumerate(ends, 1):
            if end_s > self.shown_s + 1e-9:
                break
            x = LEFT + self.scale * end_s
            text = f"{number} step{'s' if number > 1 else ''} in {end_s:.2f} s"
            pieces.append(
                f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top + 26}" y2="{bottom + 6}"/>'
            )
            anchor = "end" if x > WIDTH - 80 else "middle"
            place = f'style="text-anchor: {anchor}" x="{x:.1f}" y="{bottom + 22}"'
            pieces.append(f'<text class="axis" {place}>{text}</text>')
        return pieces


def svg() -> str:
    """Draw timeline.json."""
    traces = {
        mode: Trace.from_chrome_json(document)
        for mode, document in json.loads((FOLDER / "timeline.json").read_text()).items()
    }
    steps = traces["none"].of("step")
    shown_s = steps[SHOWN_STEPS - 1].end_s - steps[0].start_s
    scale = (WIDTH - LEFT - RIGHT) / shown_s
    pieces = []
    for number, mode in enumerate(MODES):
        pieces += Panel(mode, traces[mode], 8 + 142 * number, scale, shown_s).draw()
    model = f"{LAYERS} Dense layers of {UNITS:,} units, 34 MB of gradients"
    notes = (
        "Green: gradients on the network, numbered by layer; the next forward waits for layers 1 and 2 only.",
        f"Recorded on rank 0 of 2: {model}, a link of 1 Gb/s.",
    )
    pieces += [
        f'<text class="note" x="0" y="{302 + 18 * line}">{note}</text>' for line, note in enumerate(notes)
    ]
    body = "\n".join(piece for piece in pieces if piece)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 328" width="{WIDTH}" height="328">'
    return f"{head}\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def main() -> None:
    """Record if asked to, then draw."""
    match sys.argv[1:]:
        case ["train", overlap, trace]:
            train(overlap, trace)
            return
        case ["record"]:
            record()
        case []:
            pass
        case other:
            sys.exit(f"wanted: nothing, or record. Received: {' '.join(other)}")
    (FOLDER / "timeline.svg").write_text(svg())


if __name__ == "__main__":
    main()
