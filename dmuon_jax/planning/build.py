"""From leaves to a plan: group, price, solve, and write down who does what."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from dmuon_jax.layout import Layout, LeafLayout, leaf_layout
from dmuon_jax.matrices import Axes, Leaf, MeshShape, oriented
from dmuon_jax.planning.cost import source_of
from dmuon_jax.planning.plan import Bucket, Group, Member, Plan
from dmuon_jax.planning.problem import (
    METHODS,
    CostModel,
    MemoryLimitError,
    Method,
    Problem,
    Solution,
    Task,
)
from dmuon_jax.planning.report import ITEMSIZE
from dmuon_jax.planning.solver import solve

EXCHANGE_DTYPE = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}
COMPUTE_DTYPE = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}
MIN_BRANCH_US = {"cpu": 0.0, "gpu": 500.0, "tpu": 500.0}
"""Work of one slot below which EMPTY slots are computed rather than branched around.

A conditional on a GPU waits for its predicate on the host."""

MAX_BRANCHES = 3


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
    problem = Problem(
        mesh=tuple(zip(mesh.names, mesh.sizes, strict=True)),
        tasks=tasks,
        cost=settings.cost,
        methods=allowed_methods(settings),
        bandwidths=settings.bandwidths,
        pad_below_us=MIN_BRANCH_US[settings.platform],
        max_branches=MAX_BRANCHES,
        max_owner_bytes=settings.max_owner_bytes,
    )
    solution = solve(problem)
    groups = tuple(
        Group(tuple(indices), dtype, counts, waves[indices[0]])
        for indices, dtype, counts in zip(members, dtypes, solution.counts, strict=True)
    )
    group_layouts = [layouts[indices[0]] for indices in members]
    buckets = make_buckets(groups, group_layouts, solution, settings)
    return Plan(
        mesh=mesh,
        owner_axes=settings.owner_axes,
        leaves=leaves,
        groups=groups,
        buckets=buckets,
        owner_load_us=owner_loads(mesh, groups, group_layouts, buckets, settings.cost),
        exchange_us=solution.exchange_us,
        lower_bound_us=solution.lower_bound_us,
        gap=solution.gap,
        status=solution.status,
        costs=source_of(settings.cost),
    )


def assign_waves(layouts: Sequence[LeafLayout], limit: int | None) -> list[int]:
    """The wave of each leaf: leaves of one layout together, each wave up to ``limit``.

    Raises:
      ValueError: if one leaf alone is above the limit.
    """
    if limit is None:
        return [0] * len(layouts)
    first: dict[Layout, int] = {}
    for index, item in enumerate(layouts):
        first.setdefault(item.layout, index)
    waves, wave, held = [0] * len(layouts), 0, 0
    for index in sorted(range(len(layouts)), key=lambda i: first[layouts[i].layout]):
        item = layouts[index]
        slots = -(-item.core // item.layout.num_owners)
        share = 4 * slots * math.prod(item.layout.parcel_shape)
        if share > limit:
            raise MemoryLimitError(
                f"max_wave_bytes must hold the share of each leaf, {share} bytes, got "
                f"{limit} at {item.leaf.path}"
            )
        if held and held + share > limit:
            wave, held = wave + 1, 0
        waves[index], held = wave, held + share
    return waves


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
    """One exchange group as the planner sees it.

    Of the buffer of a collective over n devices, each sends n - 1 parts to the others.
    """
    item = layouts[indices[0]]
    layout, itemsize = item.layout, ITEMSIZE[dtype]
    slot_bytes = []
    for way in ("in", "out"):
        side = layout.side(way)
        exchanged, gathered = side.elements_per_slot()
        for axes, elements in ((side.exchanged, exchanged), (side.gathered, gathered)):
            if elements:
                size = layout.mesh.size(axes)
                sent = elements // size * (size - 1)
                slot_bytes.append((axes, sent * itemsize))
    fan_in, fan_out = layout.parcel_shape
    return Task(
        name=f"{number:06d} {item.leaf.path}",
        num_parcels=sum(layouts[i].core for i in indices),
        free_axes=layout.free,
        matrices=tuple(oriented(shape) for shape in item.leaf.matrix_shapes),
        slot_bytes=tuple(slot_bytes),
        parcel_bytes=fan_in * fan_out * itemsize,
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
        dtype = item.layout.dtype
        for piece, shape in enumerate(item.leaf.matrix_shapes):
            key = (-groups[index].wave, oriented(shape), dtype, item.layout.varying)
            keys.setdefault(key, []).append(Member(index, piece))
    return tuple(
        Bucket(
            shape=shape,
            compute_dtype=travel_dtype(
                dtype, settings.compute_dtype, COMPUTE_DTYPE, settings
            ),
            method=methods[shape],
            members=tuple(members),
            **branches(
                [groups[m.group] for m in members],
                [layouts[m.group].layout for m in members],
                1 if shape in solution.padded else MAX_BRANCHES,
            ),
        )
        for (_, shape, dtype, _), members in sorted(keys.items(), reverse=True)
    )


def branches(
    groups: Sequence[Group], layouts: Sequence[Layout], limit: int
) -> dict[str, Any]:
    """The count patterns that the devices of a bucket compute, at most ``limit``.

    With more patterns than that, patterns are merged into their maxima: a device may
    compute some EMPTY slots.
    """
    mesh, varying = layouts[0].mesh, layouts[0].varying
    sizes = [range(mesh.size((name,))) for name in varying]
    patterns = []
    for place in itertools.product(*sizes):
        coordinates = dict(zip(varying, place, strict=True))
        patterns.append(
            tuple(
                group.counts[mesh.index(coordinates, layout.free)]
                for group, layout in zip(groups, layouts, strict=True)
            )
        )
    kept = sorted(set(patterns), reverse=True)
    cover = {pattern: pattern for pattern in kept}
    while len(kept) > limit:
        kept, cover = merge_closest(kept, cover, patterns)
    return {
        "branches": tuple(kept),
        "branch_of": tuple(kept.index(cover[pattern]) for pattern in patterns),
        "padded": any(cover[pattern] != pattern for pattern in patterns),
    }


def merge_closest(
    kept: list[tuple[int, ...]],
    cover: dict[tuple[int, ...], tuple[int, ...]],
    patterns: list[tuple[int, ...]],
) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], tuple[int, ...]]]:
    """Replaces the two patterns whose common maximum adds the least work."""

    def joined(a, b):
        return tuple(map(max, a, b))

    def added(pair):
        top = sum(joined(*pair))
        users = [sum(cover[p]) for p in patterns if cover[p] in pair]
        return top * len(users) - sum(users), pair

    first, second = min(itertools.combinations(kept, 2), key=added)
    top = joined(first, second)
    cover = {p: top if c in (first, second) else c for p, c in cover.items()}
    kept = sorted({c for c in cover.values()}, reverse=True)
    return kept, cover


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
