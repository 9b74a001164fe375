"""Applies a plan to arrays by path: brings them to its shardings, and runs its owners."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from dmuon_jax.find_plan import Found
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
