"""A plan as a picture: one bar per owner, its work stacked and coloured by shape.

Reads plans, never builds them.
"""

import typing
from collections import defaultdict

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dmuon_jax.planning.cost import iteration_flops

if typing.TYPE_CHECKING:
    from dmuon_jax.planning.groups import Bucket
    from dmuon_jax.planning.plan import Plan


def owner_flops(plan: "Plan", bucket: "Bucket") -> np.ndarray:
    """FLOPs that each device spends on ``bucket``, row-major over the mesh."""
    varying = plan.group_layout(plan.groups[bucket.members[0].group]).varying
    each = iteration_flops(bucket.shape, bucket.method)
    flops = np.zeros(plan.mesh.num_devices)
    for device in range(plan.mesh.num_devices):
        index = plan.mesh.index(plan.mesh.coordinates(device), varying)
        flops[device] = each * sum(bucket.branches[bucket.branch_of[index]])
    return flops


def owner_stacks(plan: "Plan") -> dict[tuple[int, int], np.ndarray]:
    """Milliseconds of each device by shape of matrix, largest shape first.

    A device's load is the plan's; it is divided among shapes by FLOPs, since a plan does
    not hold the time of each bucket.
    """
    work: dict[tuple[int, int], np.ndarray] = defaultdict(
        lambda: np.zeros(plan.mesh.num_devices)
    )
    for bucket in plan.buckets:
        work[bucket.shape] = work[bucket.shape] + owner_flops(plan, bucket)
    total = np.maximum(sum(work.values(), np.zeros(plan.mesh.num_devices)), 1.0)
    loads = np.asarray(plan.owner_load_us) / 1e3
    shapes = sorted(work, key=lambda shape: (-shape[0] * shape[1], shape))
    return {shape: loads * work[shape] / total for shape in shapes}


def plan_figure(plan: "Plan") -> Figure:
    """Draws the load of each owner, coloured by shape, under a line at the mean.

    Args:
      plan: the plan.

    Returns:
      A matplotlib figure; ``figure.savefig("plan.png")`` writes it.
    """
    owners = plan.mesh.num_devices
    figure = Figure(
        figsize=(min(14.0, max(6.0, owners / 8)), 4.2), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bottom = np.zeros(owners)
    stacks = owner_stacks(plan)
    colors = colormaps["viridis"](np.linspace(0.05, 0.95, max(len(stacks), 1)))
    width = 0.85 if owners <= 64 else 1.0
    for (shape, heights), color in zip(stacks.items(), colors, strict=False):
        label = f"{shape[0]} x {shape[1]}"
        axes.bar(range(owners), heights, width, bottom, color=color, label=label)
        bottom += heights
    if stacks:
        mean = sum(plan.owner_load_us) / owners / 1e3
        axes.axhline(mean, color="black", linewidth=0.8, linestyle="--", label="mean")
        figure.legend(loc="outside right upper", title="matrices", fontsize="small")
    axes.set_xlabel("owner")
    axes.set_ylabel("Newton-Schulz, ms (model)")
    axes.set_xlim(-0.6, owners - 0.4)
    axes.set_title(
        f"{plan.num_matrices} matrices on {owners} owners: makespan "
        f"{plan.makespan_us / 1e3:.2f} ms, gap {plan.gap:.1%}",
        loc="left",
        fontsize="medium",
    )
    return figure
