"""Where shardings come from, and how arrays are brought to one.

Order: given by the caller; the arrays' own ``NamedSharding``; their types on Explicit axes.
In a trace over Auto axes an array shows its mesh but not its spec; that is reported as
unknown, never guessed.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dmuon_jax.matrices import Axes, MeshShape, Spec
from dmuon_jax.paths import covers, leaf_name, name_some

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True)
class Seen:
    """What an array tells of its sharding.

    Attributes:
      mesh: its mesh; None where it lives on one device.
      spec: mesh axes of each dimension; None where a trace hides it.
    """

    mesh: AnyMesh | None
    spec: Spec | None


def known(seen: Seen, path: str) -> Spec:
    """The spec that was seen.

    Raises:
      ValueError: if a trace hid it.
    """
    if seen.spec is None:
        raise ValueError(f"the sharding of each array must be known, got none at {path}")
    return seen.spec


def see(x: Any, path: str) -> Seen:
    """Reads the sharding of an array, a tracer or a ``ShapeDtypeStruct``.

    Raises:
      ValueError: if the array is spread over devices without a ``NamedSharding``.
      NotImplementedError: inside a ``shard_map``, where an array is one device's own.
    """
    nothing = Seen(None, ((),) * np.ndim(x))
    if isinstance(x, Tracer):
        return see_type(x, path)
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or x.sharding is None:
        return nothing
    if isinstance(x.sharding, NamedSharding):
        spec = spec_of(x.sharding.spec, len(x.shape), path)
        return Seen(x.sharding.mesh if x.sharding.mesh.size > 1 else None, spec)
    if len(x.sharding.device_set) == 1:
        return nothing
    raise ValueError(
        "an array on several devices must have a NamedSharding, got "
        f"{x.sharding} at {path}"
    )


def see_type(x: Tracer, path: str) -> Seen:
    """Reads a tracer's type."""
    kind = jax.typeof(x)
    mesh = kind.sharding.mesh
    if mesh.empty or mesh.size == 1:
        return Seen(None, ((),) * x.ndim)
    axes = [
        (name, axis)
        for name, size, axis in zip(
            mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
        )
        if size > 1
    ]
    manual = [name for name, axis in axes if axis == AxisType.Manual]
    if manual:
        raise NotImplementedError(
            "the update must be called outside shard_map, on whole arrays, got an array "
            f"of one device along {manual} at {path}"
        )
    hidden = any(axis != AxisType.Explicit for _, axis in axes)
    spec = None if hidden else spec_of(kind.sharding.spec, x.ndim, path)
    return Seen(mesh, spec)


def spec_of(spec: PartitionSpec, ndim: int, path: str) -> Spec:
    """A ``PartitionSpec`` as mesh axes of each of ``ndim`` dimensions.

    Raises:
      ValueError: if it has more entries than dimensions, or an unconstrained one.
    """
    entries = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"a spec must name its axes, got {spec} at {path}")
        entries.append(entry_axes(entry))
    if len(entries) > ndim:
        raise ValueError(
            f"a spec must have at most {ndim} entries, got {spec} at {path}"
        )
    return tuple(entries) + ((),) * (ndim - len(entries))


def find_mesh(seen: Mapping[str, Seen]) -> AnyMesh | None:
    """The one mesh of all arrays; None if every array lives on one device.

    Raises:
      ValueError: if two arrays lie on different meshes, or on one whose devices are in
        another order.
    """
    meshes = [(path, item.mesh) for path, item in seen.items() if item.mesh is not None]
    if not meshes:
        return None
    concrete = [item for item in meshes if isinstance(item[1], jax.sharding.Mesh)]
    where, first = (concrete or meshes)[0]
    for path, mesh in meshes:
        if not same_mesh(first, mesh):
            one, other = tell_apart(first, mesh)
            raise ValueError(
                f"all leaves must lie on one mesh, got {one} at {where} and {other} at {path}"
            )
    return meshes[0][1]


def same_mesh(one: AnyMesh | None, other: AnyMesh | None) -> bool:
    """Whether two meshes have the same axes, and the same devices where both have any."""
    if one is other:
        return True
    if mesh_shape(one) != mesh_shape(other):
        return False
    kind = jax.sharding.Mesh
    if not (isinstance(one, kind) and isinstance(other, kind)):
        return True
    return one.devices.tolist() == other.devices.tolist()


def tell_apart(one: AnyMesh | None, other: AnyMesh | None) -> tuple[str, str]:
    """Two meshes in words: axes, and devices where nothing else is different."""
    shapes = mesh_shape(one), mesh_shape(other)
    if shapes[0] != shapes[1]:
        return str(shapes[0]), str(shapes[1])

    def words(mesh: AnyMesh | None) -> str:
        assert isinstance(mesh, jax.sharding.Mesh)
        devices = name_some([str(device.id) for device in mesh.devices.flat], 8)
        return f"{mesh_shape(mesh)} of devices {devices}"

    return words(one), words(other)


def mesh_shape(mesh: AnyMesh | None) -> MeshShape:
    """Names and sizes of the axes; no axes for one device."""
    if mesh is None:
        return MeshShape((), ())
    return MeshShape(
        tuple(mesh.axis_names), tuple(mesh.shape[n] for n in mesh.axis_names)
    )


def device_kind(mesh: AnyMesh | None) -> tuple[str, str]:
    """Platform ("cpu", "gpu" or "tpu") and kind of the mesh's devices.

    Where the mesh does not tell, those of the default device.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        device = mesh.devices.flat[0]
        platform, kind = device.platform, device.device_kind
    elif mesh is not None and mesh.abstract_device is not None:
        platform = mesh.abstract_device.platform or jax.default_backend()
        kind = mesh.abstract_device.device_kind
    else:
        device = jax.local_devices()[0]
        platform, kind = device.platform, device.device_kind
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform), kind


def given_shardings(tree: Any) -> dict[str, NamedSharding]:
    """The leaves of a tree of ``NamedSharding`` by path.

    Raises:
      TypeError: if a leaf is something else.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = leaf_name(path)
        if not isinstance(leaf, NamedSharding):
            raise TypeError(
                f"shardings must be a tree of NamedSharding, got {type(leaf).__name__} "
                f"at {name or 'its root'}"
            )
        found[name] = leaf
    return found


def lookup(given: Mapping[str, NamedSharding], path: str) -> NamedSharding | None:
    """The sharding given for ``path`` or for the subtree that it is in."""
    if path in given:
        return given[path]
    found = [prefix for prefix in given if covers(prefix, path)]
    return given[max(found, key=len)] if found else None


def zero_spec(shape: Sequence[int], batch_axes: Sequence[int], mesh: MeshShape) -> Spec:
    """A spec that spreads a replicated array over the whole mesh, as far as it divides.

    A batch dimension first (its parcels are then whole), then the longest dimension; if
    none divides by all devices, axis by axis.
    """
    names = tuple(name for name in mesh.names if mesh.size((name,)) > 1)
    dims = sorted(range(len(shape)), key=lambda d: (d not in batch_axes, -shape[d]))
    for dim in dims:
        if shape[dim] % mesh.num_devices == 0:
            return tuple(names if d == dim else () for d in range(len(shape)))
    cut: list[Axes] = [() for _ in shape]
    for name in names:
        for dim in dims:
            if shape[dim] % mesh.size((*cut[dim], name)) == 0:
                cut[dim] = (*cut[dim], name)
                break
    return tuple(cut)


def constrain(x: jax.Array, mesh: AnyMesh | None, spec: PartitionSpec) -> jax.Array:
    """``x`` with the sharding ``spec``: resharded on Explicit axes, constrained on Auto."""
    if mesh is None:
        return x
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    if explicit:
        x = jax.sharding.reshard(x, NamedSharding(mesh, restrict(spec, explicit)))
    if len(explicit) < len(mesh.axis_names):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return x


def finish_sum(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x``, sharded as ``like`` if its type says that it is still to be summed."""
    if not jax.typeof(x).sharding.spec.unreduced:
        return x
    sharding = jax.typeof(like).sharding
    axes = {axis for entry in sharding.spec for axis in entry_axes(entry)}
    return jax.sharding.reshard(
        x, NamedSharding(sharding.mesh, restrict(sharding.spec, axes))
    )


def restrict(spec: PartitionSpec, names: set[str]) -> PartitionSpec:
    """``spec`` with only the axes in ``names``."""
    return partition_spec(
        tuple(
            tuple(axis for axis in entry_axes(entry) if axis in names) for entry in spec
        )
    )


def entry_axes(entry: None | str | Axes) -> Axes:
    """The mesh axes that one entry of a ``PartitionSpec`` names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def partition_spec(spec: Spec, trim: bool = False) -> PartitionSpec:
    """A spec of ours as JAX writes it: ``P('x', None)``, not ``P(('x',), ())``."""
    entries = [
        None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec
    ]
    while trim and entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def num_bytes(x: Any) -> int:
    """Bytes of an array that each device holds."""
    shard = x.sharding.shard_shape(x.shape)
    return math.prod(shard) * x.dtype.itemsize
