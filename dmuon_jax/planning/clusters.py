"""Public models on clusters that need not exist: their leaves, and how to plan them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from dmuon_jax.matrices import Axes, Leaf, MeshShape, Spec
from dmuon_jax.planning.build import COMPUTE_DTYPE, Settings
from dmuon_jax.planning.compare import AUTO
from dmuon_jax.planning.cost import RooflineCost
from dmuon_jax.planning.devices import (
    Device,
    axis_bandwidths,
    overlap_rates,
)
from dmuon_jax.planning.problem import CostModel, Method
from dmuon_jax.planning.workloads import Matrices, Workload


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the parameters of a model lie on a mesh.

    Attributes:
      mesh: the mesh; its last axes lie within a node.
      fsdp_axes: axes that shard a dimension of every matrix.
      expert_axes: axes that shard the leading dimension of stacks of experts, and a
        dimension of the matrices outside such stacks.
      momentum_axes: further axes that shard the momentum only, as ZeRO does.
      scan: whether the layers are one stack, as under ``jax.lax.scan``.
    """

    mesh: MeshShape
    fsdp_axes: Axes = ()
    expert_axes: Axes = ()
    momentum_axes: Axes = ()
    scan: bool = False

    def __post_init__(self):
        named = (*self.fsdp_axes, *self.expert_axes, *self.momentum_axes)
        if unknown := sorted(set(named) - set(self.mesh.names)):
            raise ValueError(
                f"sharding axes must be axes of the mesh {self.mesh.names}, got {unknown}"
            )
        if len(set(named)) != len(named):
            raise ValueError(f"sharding axes must have one use each, got {named}")


def shard(
    spec: Sequence[Axes],
    shape: Sequence[int],
    axes: Axes,
    dims: Sequence[int],
    mesh: MeshShape,
) -> Spec:
    """``spec`` with ``axes`` on the first of ``dims`` that they divide.

    Where none divides by all of them, each axis goes where it divides, or nowhere.
    """
    found = list(spec)
    for dim in dims:
        if shape[dim] % mesh.size((*found[dim], *axes)) == 0:
            found[dim] = (*found[dim], *axes)
            return tuple(found)
    if len(axes) > 1:
        for axis in axes:
            found = list(shard(found, shape, (axis,), dims, mesh))
    return tuple(found)


def make_leaf(
    path: str, leading: tuple[int, ...], item: Matrices, where: Placement
) -> Leaf:
    """One leaf: ``leading`` dimensions, then a matrix."""
    shape = (*leading, *item.shape)
    rows, columns = len(leading), len(leading) + 1
    spec: Spec = ((),) * len(shape)
    axes = where.mesh.ordered(where.fsdp_axes + where.expert_axes)
    if item.stack:
        spec = shard(spec, shape, where.expert_axes, [rows - 1], where.mesh)
        axes = where.fsdp_axes
    spec = shard(spec, shape, axes, [rows, columns], where.mesh)
    dims = [*range(len(leading)), rows, columns]
    momentum = shard(spec, shape, where.momentum_axes, dims, where.mesh)
    return Leaf(path, shape, "float32", (rows,), (columns,), momentum, spec)


def model_leaves(workload: Workload, where: Placement) -> tuple[Leaf, ...]:
    """The leaves of a model, one per layer and weight, or per weight with ``scan``."""
    leaves = []
    for item in workload.matrices:
        layers = item.count // math.prod(item.stack)
        if where.scan:
            leading = (layers, *item.stack)
            leaves.append(make_leaf(f"['{item.name}']", leading, item, where))
        else:
            leaves += [
                make_leaf(f"['{i}']['{item.name}']", item.stack, item, where)
                for i in range(layers)
            ]
    return tuple(leaves)


def cluster_settings(
    device: Device,
    mesh: MeshShape,
    *,
    owner_axes: Axes | Literal["auto"] | None = None,
    method: Method | None = None,
    cost: CostModel | None = None,
    max_wave_bytes: int | None = None,
    max_owner_bytes: int | None = None,
) -> Settings:
    """Planning settings for ``device``, by its roofline unless ``cost`` is given.

    With ``owner_axes="auto"``, which is for ``compare.cheapest_plan``, they name all axes.

    Raises:
      ValueError: ``owner_axes`` are not axes of the mesh.
    """
    owner_axes = mesh.names if owner_axes in (None, AUTO) else owner_axes
    if unknown := sorted(set(owner_axes) - set(mesh.names)):
        raise ValueError(
            f"owner_axes must be axes of the mesh {mesh.names}, got {unknown}"
        )
    platform = "cpu" if device.name == "cpu" else "gpu"
    platform = "tpu" if device.name.startswith("tpu") else platform
    return Settings(
        owner_axes=mesh.ordered(owner_axes),
        cost=RooflineCost(device, COMPUTE_DTYPE[platform]) if cost is None else cost,
        platform=platform,
        method=method,
        bandwidths=axis_bandwidths(
            device, tuple(zip(mesh.names, mesh.sizes, strict=True))
        ),
        max_wave_bytes=max_wave_bytes,
        max_owner_bytes=max_owner_bytes,
        overlap=overlap_rates(platform, device, mesh.num_devices),
    )
