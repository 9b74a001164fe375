"""``place_state``: a state on the mesh of its parameters, spelled as jit spells results."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dmuon_jax.matrices import Spec
from dmuon_jax.shardings import AnyMesh, partition_spec, spec_of
from dmuon_jax.tree_checks import check_leaves, is_key


def place_state(state: Any, mesh: jax.sharding.Mesh, params: Any = None) -> Any:
    """Puts every array of ``state`` that is not on ``mesh`` there, replicated.

    A counter left on one device makes the second call of a jitted step compile again. So
    does a spec that is spelled otherwise than jit spells its results: on Explicit axes
    with an entry for each dimension; on Auto axes without trailing None, except where it
    equals that of jit's first argument, whose spelling is kept. Specs of the state are
    respelled accordingly; those of the parameters are the caller's.

    Works in several processes without communication; each must hold the same values.

    Args:
      state: an optimizer state (any tree).
      mesh: the mesh of the parameters.
      params: the parameters, if they are the first argument of the step.

    Returns:
      The same tree; no array that lies on the mesh already is moved.

    Raises:
      TypeError: ``mesh`` is no mesh of devices, or a leaf of ``state`` is no array.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")
    if isinstance(state, optax.GradientTransformation):
        raise TypeError("state must be what init returned, got the transformation itself")
    check_leaves("state", state)
    kept = kept_specs(params)

    def place(x):
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        old = x.sharding
        if isinstance(old, NamedSharding) and old.mesh == mesh:
            spec = spell(spec_of(old.spec, x.ndim, "state"), mesh, kept)
            return jax.device_put(
                x, NamedSharding(mesh, spec, memory_kind=old.memory_kind)
            )
        sharding = NamedSharding(mesh, spell(((),) * x.ndim, mesh, kept))
        if is_key(x):
            words, kind = place(jax.random.key_data(x)), jax.random.key_impl(x)
            return jax.device_put(jax.random.wrap_key_data(words, impl=kind), sharding)
        value = np.asarray(x)
        # A copy for each device: those of a CPU would else share one buffer.
        copies = [
            jax.device_put(value.copy(), device)
            for device in sharding.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, copies)

    return jax.tree.map(place, state)


def kept_specs(params: Any) -> dict[Spec, PartitionSpec]:
    """The spec of the first of ``params``, as its owner spells it."""
    kept = {}
    for x in jax.tree.leaves(params)[:1]:
        kind = jax.Array | jax.ShapeDtypeStruct
        if isinstance(x, kind) and isinstance(x.sharding, NamedSharding):
            kept[spec_of(x.sharding.spec, x.ndim, "params")] = x.sharding.spec
    return kept


def spell(
    spec: Spec, mesh: AnyMesh, kept: Mapping[Spec, PartitionSpec]
) -> PartitionSpec:
    """``spec`` as jit spells that of a result, see ``place_state``."""
    if AxisType.Explicit in mesh.axis_types:
        return partition_spec(spec)
    return kept.get(spec, partition_spec(spec, trim=True))
