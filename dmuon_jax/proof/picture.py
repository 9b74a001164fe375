"""A timeline as a picture: one lane of compute, one of communication."""

from __future__ import annotations

import os
from collections import defaultdict

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dmuon_jax.proof.timeline import Timeline

COLORS = {
    "matmul": "#2b6cb0",
    "memory-bound": "#90cdf4",
    "hidden transfer": "#68a063",
    "exposed transfer": "#c53030",
    "waiting": "#fed7d7",
    "further iterations": "#d9d9d9",
}
LANES = {"compute": 1.0, "communication": 0.0}
HEIGHT = 0.7


def spans(timeline: Timeline) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Start and length in ms of the bars of each lane and color."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def add(lane: str, color: str, start_us: float, length_us: float) -> None:
        if length_us > 0:
            bars[lane, color].append((start_us / 1e3, length_us / 1e3))

    for event in timeline.events:
        if event.lane == "compute":
            color = "matmul" if event.flops else "memory-bound"
            add("compute", color, event.start_us, event.duration_us)
        else:
            exposed_us = min(event.exposed_us, event.duration_us)
            hidden_us = event.duration_us - exposed_us
            edge_us = event.start_us + hidden_us
            add("communication", "hidden transfer", event.start_us, hidden_us)
            add("communication", "exposed transfer", edge_us, exposed_us)
            waits_us = event.end_us - event.exposed_us
            add("compute", "waiting", waits_us, event.exposed_us)
    for repeat in timeline.repeats:
        for lane in LANES:
            length_us = repeat.end_us - repeat.start_us
            add(lane, "further iterations", repeat.start_us, length_us)
    return bars


def draw(timeline: Timeline, path: str | os.PathLike[str], title: str = "") -> None:
    """Write a picture of `timeline`.

    Args:
      timeline: what `simulate_streams` returns.
      path: file to write; its ending chooses the format (png, pdf, svg).
      title: stands above, before the totals.
    """
    figure = Figure(figsize=(12, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = spans(timeline)
    for (lane, color), ranges in bars.items():
        axes.broken_barh(ranges, (LANES[lane], HEIGHT), facecolors=COLORS[color])
    axes.set_yticks([y + HEIGHT / 2 for y in LANES.values()], list(LANES))
    axes.set_xlabel(f"ms (model of {timeline.device})")
    axes.set_xlim(0, max(timeline.step_us, 1e-3) / 1e3)
    totals = (
        f"step {timeline.step_us / 1e3:.2f} ms, "
        f"exposed communication {timeline.exposed_us / 1e3:.2f} ms"
    )
    axes.set_title(f"{title}: {totals}" if title else totals, loc="left")
    used = [name for name in COLORS if any(color == name for _, color in bars)]
    figure.legend(
        handles=[Patch(color=COLORS[name], label=name) for name in used],
        loc="outside lower center",
        ncols=len(COLORS),
        fontsize="small",
    )
    figure.savefig(path, dpi=150)
