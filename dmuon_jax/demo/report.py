"""What the demo shows: progress, the table, the plot and the record."""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
from matplotlib.figure import Figure

from dmuon_jax import Plan
from dmuon_jax.demo.train import Problem, Run
from dmuon_jax.proof import audit

LAST_LOSSES = 10  # The table's training loss is the mean of this many steps.
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; sizes are per device.

    Attributes:
      label: The optimizer.
      steps: Steps done.
      train_loss: Mean over the last steps, nats per byte.
      held_out_loss: After the last step, nats per byte.
      update_ms: Median time of the compiled update.
      collectives: Collectives that one compiled update runs.
      collective_bytes: Bytes of their buffers.
      momentum_bytes: Bytes of the optimizer's moments.
      tokens_per_s: While training, this session; None without a step.
    """

    label: str
    steps: int
    train_loss: float
    held_out_loss: float
    update_ms: float
    collectives: int
    collective_bytes: int
    momentum_bytes: int
    tokens_per_s: float | None


class ProgressBar:
    """One line per run: rewritten on a terminal, a line per tenth otherwise."""

    def __init__(self, label: str, steps: int):
        self.label = label
        self.steps = steps

    def show(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Shows the state after a step."""
        width = 30
        filled = width * done // self.steps
        bar = "#" * filled + "." * (width - filled)
        line = (
            f"{self.label:<19}[{bar}] {done:>{len(str(self.steps))}}/{self.steps}"
            f"  loss {loss:6.4f}  {tokens_per_s:7.0f} tokens/s"
        )
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if done == self.steps else "", flush=True)
        elif done == self.steps or 10 * done // self.steps > (
            10 * (done - 1) // self.steps
        ):
            print(line, flush=True)


def time_updates(problem: Problem, runs: list[Run], repeats: int) -> list[float]:
    """Median milliseconds of each run's compiled update.

    The runs take turns, so that whatever else the machine does meets all of them.
    """
    _, grads = problem.gradient(problem.params, problem.batch(0))
    jax.block_until_ready(grads)
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, its_times in zip(runs, times, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run.update(grads, run.state, run.params))
            if repeat:  # The first round warms up.
                its_times.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(its_times) for its_times in times]


def momentum_bytes(state: Any) -> int:
    """Bytes that device 0 holds of an optimizer state, without its scalars."""
    device = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        if leaf.size > 1
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def make_rows(problem: Problem, runs: list[Run], repeats: int) -> list[Row]:
    """Measures the updates and collects one row per run."""
    rows = []
    for run, update_ms in zip(runs, time_updates(problem, runs, repeats), strict=True):
        found = audit(run.update)
        rows.append(
            Row(
                label=run.contender.label,
                steps=len(run.losses),
                train_loss=statistics.fmean(run.losses[-LAST_LOSSES:]),
                held_out_loss=run.held_out[-1][1],
                update_ms=update_ms,
                collectives=sum(item.times for item in found.collectives),
                collective_bytes=found.collective_bytes,
                momentum_bytes=momentum_bytes(run.state),
                tokens_per_s=run.tokens_per_s,
            )
        )
    return rows


def format_table(rows: list[Row]) -> str:
    """The table as text, one line per optimizer."""
    heads = (
        ("optimizer", ""),
        ("steps", ""),
        ("train", "loss"),
        ("held-out", "loss"),
        ("update", "ms"),
        ("collectives", "per update"),
        ("moved", "MiB/device"),
        ("momentum", "MiB/device"),
        ("tokens/s", "training"),
    )
    body = [
        (
            row.label,
            str(row.steps),
            f"{row.train_loss:.4f}",
            f"{row.held_out_loss:.4f}",
            f"{row.update_ms:.0f}",
            str(row.collectives),
            f"{row.collective_bytes / MIB:.2f}",
            f"{row.momentum_bytes / MIB:.2f}",
            "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
        )
        for row in rows
    ]
    lines = [tuple(head[0] for head in heads), tuple(head[1] for head in heads), *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(2, "-" * len(text[0]))
    return "\n".join(text)


def difference(first: Run, second: Run) -> float:
    """Largest absolute difference of two runs' training losses."""
    pairs = zip(first.losses, second.losses, strict=True)
    return max(abs(a - b) for a, b in pairs)


def plot(path: pathlib.Path, runs: list[Run], plan: Plan) -> None:
    """Writes a PNG: loss curves on the left, the plan's owner loads on the right."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, run in enumerate(runs):
        # Two of the curves coincide: the later one is dashed, so both are seen.
        style = dict(color=f"C{index}", linestyle="--" if index == 2 else "-")
        steps, losses = zip(*run.held_out, strict=True)
        left.plot(range(1, len(run.losses) + 1), run.losses, alpha=0.35, **style)
        left.plot(steps, losses, marker="o", label=run.contender.label, **style)
    left.set(
        title="Loss: held-out (marked) and training (faint)",
        xlabel="step",
        ylabel="nats per byte",
    )
    left.legend()
    left.grid(alpha=0.3)
    loads_us = plan.owner_load_us
    right.bar(range(len(loads_us)), [us / 1e3 for us in loads_us], color="C2")
    right.axhline(statistics.fmean(loads_us) / 1e3, color="k", linestyle=":", label="mean")
    right.set(
        title=f"Plan: {plan.num_matrices} matrices on {len(loads_us)} owners",
        xlabel="device",
        ylabel="Newton-Schulz, modelled ms per update",
    )
    right.legend()
    figure.savefig(path, dpi=120)


def write_record(path: pathlib.Path, rows: list[Row], runs: list[Run]) -> None:
    """Writes the table's rows and the curves behind the plot as JSON."""
    record = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "losses": {run.contender.label: run.losses for run in runs},
        "held_out": {run.contender.label: run.held_out for run in runs},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
