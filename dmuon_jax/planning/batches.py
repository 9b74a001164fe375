"""How many matrices of a shape an owner has at a time: what is worth measuring."""

import math
from collections.abc import Iterable, Sequence

from dmuon_jax.layout import Layout, leaf_layout
from dmuon_jax.matrices import Axes, Leaf, MeshShape, oriented
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.problem import Shape


def even_batches(
    leaves: Sequence[Leaf], mesh: MeshShape, candidates: Iterable[Axes]
) -> dict[Shape, int]:
    """Matrices of each oriented shape on the busiest owner of an even spread.

    Args:
      leaves: what is planned.
      mesh: its mesh.
      candidates: the ``owner_axes`` that may be chosen; the largest number counts.
    """
    found: dict[Shape, int] = {}
    for owner_axes in candidates:
        parcels: dict[Layout, int] = {}
        pieces: dict[Layout, list[Shape]] = {}
        for leaf in leaves:
            item = leaf_layout(leaf, mesh, owner_axes)
            parcels[item.layout] = parcels.get(item.layout, 0) + item.core
            pieces[item.layout] = [oriented(shape) for shape in leaf.matrix_shapes]
        even: dict[Shape, int] = {}
        for layout, number in parcels.items():
            for shape in pieces[layout]:
                slots = -(-number // layout.num_owners)
                even[shape] = even.get(shape, 0) + slots
        for shape, number in even.items():
            found[shape] = max(number, found.get(shape, 0))
    return dict(sorted(found.items()))


def plan_batches(plan: Plan) -> dict[Shape, int]:
    """The most matrices of each shape that an owner of ``plan`` computes at a time."""
    found: dict[Shape, int] = {}
    for bucket in plan.buckets:
        most = max(sum(counts) for counts in bucket.branches)
        found[bucket.shape] = max(most, found.get(bucket.shape, 1))
    return dict(sorted(found.items()))


def measured_batches(number: int) -> tuple[int, ...]:
    """At most four batches between which times are interpolated.

    One and two; the next power of two that holds ``number``; and one half way, on a
    logarithmic scale, where that is far from two.
    """
    top = max(2, 2 ** math.ceil(math.log2(number)))
    middle = 2 ** round(math.log2(2 * top) / 2)
    return tuple(sorted({1, 2, top} | ({middle} if top > 8 else set())))
