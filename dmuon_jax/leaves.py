"""From arrays and their shardings to the leaves of a plan, and the settings of one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmuon_jax.costs import Measured
from dmuon_jax.dtypes import dtype_name
from dmuon_jax.matrices import Leaf, Spec
from dmuon_jax.options import OwnerOptions
from dmuon_jax.planning.build import COMPUTE_DTYPE, Settings
from dmuon_jax.planning.cost import RooflineCost
from dmuon_jax.planning.devices import (
    axis_bandwidths,
    device_of_kind,
    overlap_rates,
)
from dmuon_jax.shardings import (
    AnyMesh,
    Seen,
    device_kind,
    given_shardings,
    known,
    lookup,
    mesh_shape,
    same_mesh,
    see,
    spec_of,
    tell_apart,
    zero_spec,
)
from dmuon_jax.split import Dimensions, matrix_axes, pieces_of


def see_one(x: Any, path: str, given) -> Seen:
    """The sharding given for ``path``, else what the array shows."""
    sharding = lookup(given, path)
    if sharding is None:
        return see(x, path)
    see(x, path)  # refuses what no given sharding can make right
    mesh = sharding.mesh if sharding.mesh.size > 1 else None
    return Seen(mesh, spec_of(sharding.spec, np.ndim(x), path))


def make_leaves(
    arrays: Mapping[str, Any],
    dims: Mapping[str, Dimensions],
    seen: Mapping[str, Seen],
    mesh: AnyMesh | None,
    momentum_shardings: Any,
) -> list[Leaf]:
    """Describes each array as a ``Leaf``.

    Raises:
      ValueError: every leaf that cannot be a matrix, all at once.
      TypeError: every leaf that is not floating point, all at once.
    """
    given = given_shardings(momentum_shardings)
    leaves, errors = [], []
    for path, x in arrays.items():
        momentum = lookup(given, path)
        try:
            leaves.append(make_leaf(path, x, dims[path], seen[path], mesh, momentum))
        except (TypeError, ValueError) as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("\n".join(str(error) for error in errors))
    return leaves


def make_leaf(
    path: str,
    x: Any,
    dim: Dimensions,
    seen: Seen,
    mesh: AnyMesh | None,
    momentum: jax.sharding.NamedSharding | None,
) -> Leaf:
    """Describes one array."""
    ndim = np.ndim(x)
    reduction, output = matrix_axes(dim, ndim, path)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"a leaf updated by Muon must be floating point, got {x.dtype} at {path}"
        )
    if 0 in np.shape(x):
        raise ValueError(
            f"a leaf updated by Muon must have no empty dimension, got {x.shape} at {path}"
        )
    # An array on one device beside others on a mesh is replicated when it joins them.
    spec_out = ((),) * ndim
    if seen.mesh is not None:
        spec_out = known(seen, path)
    batch = [axis for axis in range(ndim) if axis not in reduction + output]
    wanted = None if momentum is None else momentum_spec(momentum, mesh, ndim, path)
    shape = mesh_shape(mesh)
    if shape.num_devices == 1 or (wanted is None and any(spec_out)):
        spec_in = spec_out
    elif wanted is None:
        spec_in = zero_spec(x.shape, batch, shape)
    else:
        spec_in = wanted
    return Leaf(
        path=path,
        shape=tuple(x.shape),
        dtype=np.dtype(x.dtype).name,
        reduction_axes=reduction,
        output_axes=output,
        spec_in=spec_in,
        spec_out=spec_out,
        pieces=pieces_of(dim, tuple(x.shape), path),
    )


def momentum_spec(
    momentum: jax.sharding.NamedSharding, mesh: AnyMesh | None, ndim: int, path: str
) -> Spec:
    """The spec that a caller gives a momentum.

    Raises:
      ValueError: if it is for another mesh than the parameter's, or has too many entries.
    """
    sizes = (mesh_shape(momentum.mesh).num_devices, mesh_shape(mesh).num_devices)
    if max(sizes) > 1 and not same_mesh(mesh, momentum.mesh):
        own, other = tell_apart(mesh, momentum.mesh)
        raise ValueError(
            f"momentum_shardings must be on the mesh of the parameters, {own}, got {other} "
            f"at {path}"
        )
    return spec_of(momentum.spec, ndim, path)


def make_settings(options: OwnerOptions, mesh: AnyMesh | None) -> Settings:
    """Planning settings for the devices of ``mesh``: by a roofline, or by given costs.

    With ``owner_axes="auto"`` they name all axes.
    """
    shape = mesh_shape(mesh)
    owner_axes = options.owner_axes
    if owner_axes is None or isinstance(owner_axes, str):
        owner_axes = shape.names
    unknown = sorted(set(owner_axes) - set(shape.names))
    if unknown and mesh is not None:
        raise ValueError(
            f"owner_axes must be axes of the mesh {shape.names}, got {unknown}"
        )
    platform, kind = device_kind(mesh)
    device = device_of_kind(platform, kind)
    if platform not in COMPUTE_DTYPE:
        platform = "cpu"  # whose defaults are the careful ones
    compute_dtype = dtype_name("compute_dtype", options.compute_dtype)
    cost = options.costs
    if cost is None or isinstance(cost, str | Measured):
        cost = RooflineCost(device, compute_dtype or COMPUTE_DTYPE[platform])
    return Settings(
        owner_axes=shape.ordered(owner_axes),
        cost=cost,
        platform=platform,
        exchange_dtype=dtype_name("exchange_dtype", options.exchange_dtype),
        compute_dtype=compute_dtype,
        method=options.method,
        bandwidths=axis_bandwidths(
            device, tuple(zip(shape.names, shape.sizes, strict=True))
        ),
        max_wave_bytes=options.max_wave_bytes,
        max_owner_bytes=options.max_owner_bytes,
        overlap=overlap_rates(platform, device, shape.num_devices),
    )
