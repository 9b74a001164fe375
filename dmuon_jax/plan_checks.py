"""Whether a given plan was made for the tree, mesh and options at hand."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dmuon_jax.dtypes import dtype_name
from dmuon_jax.options import OwnerOptions
from dmuon_jax.planning.compare import AUTO
from dmuon_jax.planning.estimate import held_by_wave
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.report import ITEMSIZE
from dmuon_jax.shardings import AnyMesh, Seen, mesh_shape
from dmuon_jax.split import Dimensions, matrix_axes, pieces_of


def check_fits(
    plan: Plan,
    arrays: Mapping[str, Any],
    dims: Mapping[str, Dimensions],
    seen: Mapping[str, Seen],
    mesh: AnyMesh | None,
) -> None:
    """Raises ``ValueError`` with everything in which ``plan`` and tree differ."""
    wrong = []
    if mesh_shape(mesh) != plan.mesh and plan.mesh.num_devices > 1:
        wrong.append(f"the plan's mesh is {plan.mesh}, the arrays' {mesh_shape(mesh)}")
    planned = {leaf.path: leaf for leaf in plan.leaves}
    for path in sorted(set(planned) - set(arrays)):
        wrong.append(f"the plan has a matrix that the tree lacks or gives Adam, at {path}")
    for path, x in arrays.items():
        if path not in planned:
            wrong.append(f"the tree has a matrix that the plan lacks, at {path}")
            continue
        leaf, shape = planned[path], tuple(np.shape(x))
        if leaf.shape != shape:
            wrong.append(
                f"the plan has shape {leaf.shape}, the tree {shape}, at {path}"
            )
            continue
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            wrong.append(f"the tree has {x.dtype}, no floating point, at {path}")
        axes = matrix_axes(dims[path], len(shape), path)
        if axes != (leaf.reduction_axes, leaf.output_axes):
            wrong.append(f"the plan has other matrix axes than {axes}, at {path}")
        if pieces_of(dims[path], shape, path) != leaf.pieces:
            wrong.append(f"the plan splits the matrices otherwise, at {path}")
        spec = seen[path].spec
        if seen[path].mesh is not None and spec is not None and spec != leaf.spec_out:
            wrong.append(
                f"the plan has spec {leaf.spec_out}, the tree {spec}, at {path}"
            )
    if wrong:
        raise ValueError(
            "plan must be made for this tree, mesh and dimension numbers:\n" + "\n".join(wrong)
        )


def check_agrees(plan: Plan, options: OwnerOptions) -> None:
    """Raises ``ValueError`` if an option contradicts a plan that was made without it."""
    named = {
        "compute_dtype": (
            dtype_name("compute_dtype", options.compute_dtype),
            {bucket.compute_dtype for bucket in plan.buckets},
        ),
        "exchange_dtype": (
            dtype_name("exchange_dtype", options.exchange_dtype),
            {group.exchange_dtype for group in plan.groups},
        ),
        "method": (options.method, {bucket.method for bucket in plan.buckets}),
        "owner_axes": (
            None
            if options.owner_axes in (None, AUTO)
            else plan.mesh.ordered(options.owner_axes),
            {plan.owner_axes},
        ),
    }
    wrong = [
        f"{name}={value!r} but the plan was made with {sorted(map(str, planned))}"
        for name, (value, planned) in named.items()
        if value is not None and planned - {value}
    ]
    wrong += [
        f"{name}={limit} but the plan's {what} takes {held} bytes"
        for name, limit, what, held in (
            ("max_wave_bytes", options.max_wave_bytes, "largest wave", wave_bytes(plan)),
            ("max_owner_bytes", options.max_owner_bytes, "owner", owner_bytes(plan)),
        )
        if limit is not None and held > limit
    ]
    if wrong:
        raise ValueError("options must agree with plan=: " + "; ".join(wrong))


def wave_bytes(plan: Plan) -> int:
    """What ``max_wave_bytes`` limits: the slots of a wave.

    Waves that bound no memory may all be under way at once, and count as one.
    """
    held = held_by_wave(plan)
    return max(held) if plan.bounded else sum(held)


def owner_bytes(plan: Plan) -> int:
    """What ``max_owner_bytes`` limits: all slots, EMPTY ones included, as they travel."""
    return sum(
        group.slots
        * math.prod(plan.group_layout(group).parcel_shape)
        * ITEMSIZE[group.exchange_dtype]
        for group in plan.groups
    )
