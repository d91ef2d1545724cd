"""Print the pictures of the schedules for docs/model-parallel.md, and draw schedules.png beside this file.

python docs/model-parallel/schedules.py
"""

from __future__ import annotations

from pathlib import Path

from hvpipe.forecast.simulate import Simulation, StageTimes, simulate
from hvpipe.schedule.schedule import make_schedule
from hvpipe.trace.chart import draw_timelines
from hvpipe.trace.text_chart import draw

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved")


def step(name: str, ranks: int, microbatches: int) -> Simulation:
    """Simulate equal ranks: a forward takes one second, a backward two, a transfer no time."""
    chunks = 2 if name == "interleaved" else 1
    schedule = make_schedule(name, ranks, microbatches, chunks)
    cost = StageTimes(forward_s=1 / chunks, backward_s=2 / chunks, weight_s=1 / chunks)
    return simulate(schedule, [cost] * schedule.stages)


def text(name: str) -> str:
    """Draw four micro-batches on three ranks, five letters per second; interleaved on two ranks, eight."""
    ranks, letters = (2, 8) if name == "interleaved" else (3, 5)
    simulation = step(name, ranks, microbatches=4)
    return draw(simulation.trace, round(letters * simulation.makespan_s))


def main() -> None:
    """Print the text pictures and write the PNG."""
    traces = {}
    for name in SCHEDULES:
        print(f"{name}\n{text(name)}")
        simulation = step(name, ranks=4, microbatches=8)
        stash = " ".join(map(str, simulation.peak_stash))
        title = f"{name}: {simulation.makespan_s:g} s, bubble {simulation.bubble:.1%}, stash {stash}"
        traces[title] = simulation.trace
    draw_timelines(traces, Path(__file__).with_name("schedules.png"))


if __name__ == "__main__":
    main()
