"""Applies a plan to arrays by path: brings them to its shardings, and runs its owners."""

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import jax

from dmuon_jax.find_plan import Found
from dmuon_jax.matrices import Axes, MeshShape
from dmuon_jax.owners import MatrixFn, map_owners
from dmuon_jax.shardings import constrain, partition_spec

Way = Literal["in", "out"]


def on_specs(
    arrays: Mapping[str, jax.Array], found: Found, way: Way
) -> dict[str, jax.Array]:
    """``arrays`` in the momentum's ("in") or the parameters' ("out") shardings."""
    placed = {}
    for item in found.plan.layouts:
        spec = item.leaf.spec_in if way == "in" else item.leaf.spec_out
        x = arrays[item.leaf.path]
        placed[item.leaf.path] = constrain(x, found.mesh, partition_spec(spec))
    return placed


def cross(
    arrays: Mapping[str, jax.Array], found: Found, way: Way
) -> dict[str, jax.Array]:
    """As ``on_specs``, for ``arrays`` that come in the shardings of the other way.

    Where axes have sizes like 2 and 3, XLA's partitioner (jaxlib 0.12) aborts on some moves
    of axes from one dimension to another; there they are gathered first.
    """
    if not mixed_sizes(found.plan.mesh):
        return on_specs(arrays, found, way)
    gathered = {}
    for item in found.plan.layouts:
        x, leaf = arrays[item.leaf.path], item.leaf
        both = tuple(map(common_prefix, leaf.spec_in, leaf.spec_out))
        gathered[leaf.path] = constrain(x, found.mesh, partition_spec(both))
    return on_specs(gathered, found, way)


def mixed_sizes(mesh: MeshShape) -> bool:
    """Whether two axes have sizes of which neither divides the other."""
    sizes = sorted({size for size in mesh.sizes if size > 1})
    return any(b % a for a, b in itertools.pairwise(sizes))


def common_prefix(first: Axes, second: Axes) -> Axes:
    """The axes that two entries of a spec begin with alike."""
    pairs = itertools.takewhile(lambda p: p[0] == p[1], zip(first, second, strict=False))
    return tuple(a for a, _ in pairs)


def apply_plan(
    fn: MatrixFn, arrays: Mapping[str, jax.Array], found: Found, operands: Any = None
) -> dict[str, jax.Array]:
    """``fn`` of every matrix on its owner.

    Args:
      fn: see ``owners.map_owners``.
      arrays: by path, as ``on_specs(..., "in")`` gives them.
      found: the plan and its mesh.
      operands: see ``owners.map_owners``.

    Returns:
      Arrays by path in the parameters' shardings, float32 or wider.
    """
    layouts = found.plan.layouts
    inputs = [arrays[item.leaf.path].astype(item.layout.dtype) for item in layouts]
    results = map_owners(fn, inputs, found.plan, found.mesh, operands)
    return {
        item.leaf.path: result for item, result in zip(layouts, results, strict=True)
    }
