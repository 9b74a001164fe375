"""From leaves to a plan: group, price, solve, and write down who does what."""

import dataclasses
import math
from collections.abc import Sequence

from dmuon_jax.layout import Layout, LeafLayout, leaf_layout
from dmuon_jax.matrices import Axes, Leaf, MeshShape, oriented
from dmuon_jax.planning.buffers import (
    Sharing,
    exchange_us,
    route,
    share_buffers,
    shared_bound_us,
)
from dmuon_jax.planning.cost import source_of
from dmuon_jax.planning.counts import branches
from dmuon_jax.planning.devices import Rates
from dmuon_jax.planning.groups import Bucket, Group, Member, Part
from dmuon_jax.planning.order import Clock, Load, choose_waves, in_waves
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.problem import (
    METHODS,
    CostModel,
    Limits,
    Method,
    Problem,
    Solution,
    Solver,
    Task,
)
from dmuon_jax.planning.report import ITEMSIZE
from dmuon_jax.planning.solver import solve
from dmuon_jax.planning.waves import assign_waves, owner_limit

EXCHANGE_DTYPE = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}
COMPUTE_DTYPE = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}
MIN_BRANCH_US = {"cpu": 0.0, "gpu": 500.0, "tpu": 500.0}
"""Work of one slot below which EMPTY slots are computed rather than branched around.

A conditional on a GPU waits for its predicate on the host."""

MAX_BRANCHES = 3

NEAR_US = {"cpu": 1000.0, "gpu": 25.0, "tpu": 25.0}
"""What a step may be longer than the bound before a program is solved for a better plan.

On a CPU a quick plan is worth more than a good one."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to plan.

    Attributes:
      owner_axes: axes over which owners are spread.
      cost: times of batches of matrices.
      platform: "cpu", "gpu" or "tpu"; decides the defaults below.
      exchange_dtype: dtype of the exchange; None for the platform's default.
      compute_dtype: dtype of the iteration; None for the platform's default.
      method: "direct", "gram", or None to choose by cost.
      bandwidths: bytes per microsecond along each mesh axis.
      max_wave_bytes: limit on the whole matrices that a device holds at a time, in bytes
        of float32; leaves are then worked through in waves. None: all at once.
      max_owner_bytes: limit on the slots of an owner, of all waves together, in bytes of
        the exchange dtype; None: none.
      overlap: rates of the device; None where collectives do not run beside other work,
        so that their order makes no difference.
    """

    owner_axes: Axes
    cost: CostModel
    platform: str = "cpu"
    exchange_dtype: str | None = None
    compute_dtype: str | None = None
    method: Method | None = None
    bandwidths: tuple[tuple[str, float], ...] = ()
    max_wave_bytes: int | None = None
    max_owner_bytes: int | None = None
    overlap: Rates | None = None


def make_plan(leaves: Sequence[Leaf], mesh: MeshShape, settings: Settings) -> Plan:
    """Solves the plan for ``leaves`` on ``mesh``.

    Raises:
      ValueError: if a leaf's spec does not fit its shape or the mesh.
    """
    leaves = tuple(leaves)
    layouts = [leaf_layout(leaf, mesh, settings.owner_axes) for leaf in leaves]
    waves = assign_waves(layouts, settings.max_wave_bytes)
    keys: dict[tuple[int, Layout], list[int]] = {}
    for index, item in enumerate(layouts):
        keys.setdefault((waves[index], item.layout), []).append(index)
    members = list(keys.values())
    dtypes = [
        travel_dtype(layout.dtype, settings.exchange_dtype, EXCHANGE_DTYPE, settings)
        for _, layout in keys
    ]
    tasks = tuple(
        task(layouts, indices, dtype, number)
        for number, (indices, dtype) in enumerate(zip(members, dtypes, strict=True))
    )
    problem = problem_of(tasks, mesh, settings)
    # Waves of limited size leave no choice but who takes what an even spread leaves over.
    solver: Solver = "milp" if settings.max_wave_bytes is None else "greedy"
    solution = solve(problem, solver=solver, limits=Limits(gap_us=NEAR_US[settings.platform]))
    group_layouts = [layouts[indices[0]] for indices in members]
    sharing = share_buffers(
        problem,
        solution,
        [(wave, route(layout, d)) for (wave, layout), d in zip(keys, dtypes, strict=True)],
    )
    groups = tuple(
        Group(tuple(indices), dtype, tuple(row.tolist()), (Part(int(max(row)), wave),), buffer)
        for (wave, _), indices, dtype, row, buffer in zip(
            keys, members, dtypes, sharing.counts, sharing.buffers, strict=True
        )
    )
    bounded = max(waves, default=0) > 0
    if settings.overlap is not None and not bounded:
        loads = tuple(
            load(problem, group, [layouts[i] for i in group.leaves]) for group in groups
        )
        clock = Clock(loads, settings.cost, solution.methods, settings.overlap)
        groups = in_waves(groups, choose_waves(clock))
    buckets = make_buckets(groups, group_layouts, solution, settings)
    loads_us = owner_loads(mesh, groups, group_layouts, buckets, settings.cost)
    moving_us = exchange_us(problem, groups)
    total_us = max(loads_us, default=0.0) + moving_us
    bound_us, status = judged(problem, solution, sharing, total_us)
    return Plan(
        mesh=mesh,
        owner_axes=settings.owner_axes,
        leaves=leaves,
        groups=groups,
        buckets=buckets,
        owner_load_us=loads_us,
        exchange_us=moving_us,
        lower_bound_us=bound_us,
        gap=(total_us - bound_us) / total_us if total_us > bound_us else 0.0,
        status=status,
        costs=source_of(settings.cost),
        bounded=bounded,
    )


def problem_of(tasks: tuple[Task, ...], mesh: MeshShape, settings: Settings) -> Problem:
    """What the planner is asked."""
    return Problem(
        mesh=tuple(zip(mesh.names, mesh.sizes, strict=True)),
        tasks=tasks,
        cost=settings.cost,
        methods=allowed_methods(settings),
        bandwidths=settings.bandwidths,
        pad_below_us=MIN_BRANCH_US[settings.platform],
        max_branches=MAX_BRANCHES,
        max_owner_bytes=owner_limit(
            tasks, mesh, settings.max_wave_bytes, settings.max_owner_bytes
        ),
    )


def judged(
    problem: Problem, solution: Solution, sharing: Sharing, total_us: float
) -> tuple[float, str]:
    """A bound on makespan plus exchange, and how a plan that takes ``total_us`` was found."""
    bound_us, status = solution.lower_bound_us, solution.status
    if len(set(sharing.buffers)) == len(sharing.buffers):
        return bound_us, status
    saved_us = max(solution.objective_us - total_us, 0.0)
    return min(bound_us, shared_bound_us(problem, sharing.model)), (
        f"With a buffer for each group, {status[0].lower()}{status[1:-1]}; sharing "
        f"buffers saves {saved_us / 1e3:.3f} ms."
    )


def travel_dtype(
    dtype: str, named: str | None, defaults: dict[str, str], settings: Settings
) -> str:
    """The dtype used for blocks of ``dtype``: as named, or the platform's default."""
    if dtype.startswith("complex"):
        return dtype
    if named is not None:
        return named
    return dtype if dtype == "float64" else defaults[settings.platform]


def allowed_methods(settings: Settings) -> tuple[Method, ...]:
    """bfloat16 Gram iterations lose too much to be a default."""
    if settings.method is not None:
        return (settings.method,)
    dtype = settings.compute_dtype or COMPUTE_DTYPE[settings.platform]
    return ("direct",) if dtype == "bfloat16" else METHODS


def task(
    layouts: list[LeafLayout], indices: list[int], dtype: str, number: int
) -> Task:
    """One exchange group as the planner sees it."""
    item = layouts[indices[0]]
    fan_in, fan_out = item.layout.parcel_shape
    return Task(
        name=f"{number:06d} {item.leaf.path}",
        num_parcels=sum(layouts[i].core for i in indices),
        free_axes=item.layout.free,
        matrices=tuple(oriented(shape) for shape in item.leaf.matrix_shapes),
        slot_bytes=slot_bytes(item.layout, "in", dtype)
        + slot_bytes(item.layout, "out", dtype),
        parcel_bytes=fan_in * fan_out * ITEMSIZE[dtype],
    )


def slot_bytes(layout: Layout, way: str, dtype: str) -> tuple[tuple[Axes, int], ...]:
    """Axes of each collective of one way, and what a device sends of one slot.

    Of the buffer of a collective over n devices, each sends n - 1 parts to the others.
    """
    side, found = layout.side(way), []
    for axes, elements in zip(
        (side.exchanged, side.gathered), side.elements_per_slot(), strict=True
    ):
        if elements:
            size = layout.mesh.size(axes)
            found.append((axes, elements // size * (size - 1) * ITEMSIZE[dtype]))
    return tuple(found)


def load(problem: Problem, group: Group, items: Sequence[LeafLayout]) -> Load:
    """One exchange group as the order sees it."""
    layout = items[0].layout
    in_us, out_us = (
        problem.link_us(slot_bytes(layout, way, group.exchange_dtype))
        for way in ("in", "out")
    )
    here = [
        sum(
            math.prod(x.leaf.shape) / layout.mesh.size(sum(spec_of(x.leaf), ()))
            for x in items
        )
        for spec_of in (lambda leaf: leaf.spec_in, lambda leaf: leaf.spec_out)
    ]
    arriving, leaving = (num / max(group.slots, 1) for num in here)
    return Load(
        slots=group.slots,
        buffer=group.buffer,
        in_us=in_us,
        out_us=out_us,
        elements=(arriving, leaving),
        matrices=tuple(oriented(shape) for shape in items[0].leaf.matrix_shapes),
    )


def make_buckets(
    groups: Sequence[Group],
    layouts: Sequence[LeafLayout],
    solution: Solution,
    settings: Settings,
) -> tuple[Bucket, ...]:
    """Collects the pieces of all groups by wave, shape, dtype and varying axes."""
    methods = dict(solution.methods)
    keys: dict[tuple, list[Member]] = {}
    for index, item in enumerate(layouts):
        dtype, varying = item.layout.dtype, item.layout.varying
        for number, part in enumerate(groups[index].parts):
            for piece, shape in enumerate(item.leaf.matrix_shapes):
                key = (-part.wave, oriented(shape), dtype, varying)
                keys.setdefault(key, []).append(Member(index, piece, number))
    return tuple(
        Bucket(
            shape=shape,
            compute_dtype=travel_dtype(
                dtype, settings.compute_dtype, COMPUTE_DTYPE, settings
            ),
            method=methods[shape],
            members=tuple(members),
            **branches(
                [groups[m.group].part_counts(m.part) for m in members],
                [layouts[m.group].layout for m in members],
                1 if shape in solution.padded else MAX_BRANCHES,
            ),
        )
        for (_, shape, dtype, _), members in sorted(keys.items(), reverse=True)
    )


def owner_loads(
    mesh: MeshShape,
    groups: Sequence[Group],
    layouts: Sequence[LeafLayout],
    buckets: Sequence[Bucket],
    cost: CostModel,
) -> tuple[float, ...]:
    """Modelled NS time of each device: what its branches compute, in microseconds."""
    loads = []
    for device in range(mesh.num_devices):
        place, load = mesh.coordinates(device), 0.0
        for bucket in buckets:
            varying = layouts[bucket.members[0].group].layout.varying
            branch = bucket.branch_of[mesh.index(place, varying)]
            batch = sum(bucket.branches[branch])
            load += cost.time_us(bucket.shape, batch, bucket.method) if batch else 0.0
        loads.append(load)
    return tuple(loads)
