"""``state_shardings``: where each array of an optimizer's state lives."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from optax.contrib import MuonState

from dmuon_jax.matrices import Leaf, Spec
from dmuon_jax.memory import on_host
from dmuon_jax.place_state import kept_specs, spell
from dmuon_jax.planning.plan import Plan
from dmuon_jax.shardings import AnyMesh, find_mesh, known, mesh_shape, see
from dmuon_jax.tree_checks import check_leaves

KeyPath = tuple[Any, ...]


def state_shardings(tx: optax.GradientTransformation, params: Any, plan: Plan) -> Any:
    """The shardings of the state that ``tx.init(params)`` gives.

    The momentum of Muon has the plan's; an array that sits where a parameter does, and has
    its shape, has the parameter's (Adam's moments, accumulated gradients); others are
    replicated. Nothing is allocated, so parameters may be abstract.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from dmuon_jax import dmuon, plan_owners, state_shardings
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("fsdp",))
      >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
      >>> params = {"kernel": jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=rows)}
      >>> plan = plan_owners(params)
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), dmuon(3e-3, plan=plan))
      >>> shardings = state_shardings(tx, params, plan)
      >>> state = jax.jit(tx.init, out_shardings=shardings).lower(params)

    As ``out_shardings`` of a step they keep the state as it is: on Auto axes the partitioner
    may else choose others for buffers of the transforms around ``dmuon``.

    For Orbax, join them with shapes: ``jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=s), jax.eval_shape(tx.init, params), shardings)``.

    Args:
      tx: ``dmuon`` or what it is wrapped in. On Auto axes it must know the shardings in a
        trace: by ``plan=``, ``param_shardings=`` or an earlier ``init``.
      params: arrays or ``ShapeDtypeStruct``s with shardings.
      plan: the plan of its ``dmuon``.

    Returns:
      A tree of ``NamedSharding`` like the state, spelled as ``place_state`` does.

    Raises:
      ValueError: if the plan is for another mesh than that of the parameters, or has no
        leaf for some momentum.
      TypeError: if ``params`` hold something else than arrays, or ``plan`` is none.
    """
    check_leaves("params", params)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, got {type(plan).__name__}")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    seen = {path: see(x, jax.tree_util.keystr(path)) for path, x in leaves}
    mesh = find_mesh({jax.tree_util.keystr(path): s for path, s in seen.items()})
    if mesh is None and plan.mesh.num_devices == 1:
        mesh = mesh_of_one(params)
    elif mesh is None or mesh_shape(mesh) != plan.mesh:
        raise ValueError(
            f"params must lie on the plan's mesh {plan.mesh}, got {mesh_shape(mesh)}"
        )
    kept = kept_specs(params)
    shapes = {path: tuple(x.shape) for path, x in leaves}
    specs: dict[KeyPath, Spec] = {
        p: known(s, jax.tree_util.keystr(p))
        for p, s in seen.items()
        if s.mesh is not None
    }
    planned = {leaf.path: leaf for leaf in plan.leaves}

    def sharding(spec: Spec, host: bool = False) -> NamedSharding:
        kind = "pinned_host" if host else None
        return NamedSharding(mesh, spell(spec, mesh, kept), memory_kind=kind)

    def place(path: KeyPath, node: Any) -> Any:
        if isinstance(node, MuonState):
            mu = jax.tree_util.tree_map_with_path(
                lambda p, x: sharding(momentum_spec(planned, p), on_host(x)), node.mu
            )
            coefficients = sharding(((),) * np.ndim(node.ns_coeffs))
            # MuonState declares arrays; this one holds their shardings.
            return MuonState(
                count=sharding(()),  # pyright: ignore[reportArgumentType]
                mu=mu,
                ns_coeffs=coefficients,  # pyright: ignore[reportArgumentType]
            )
        spec: Spec = ((),) * node.ndim
        for start in range(len(path) + 1):
            if shapes.get(path[start:]) == tuple(node.shape):
                spec = specs.get(path[start:], spec)
                break
        return sharding(spec)

    state = abstract_state(tx, params)
    return jax.tree_util.tree_map_with_path(
        place, state, is_leaf=lambda x: isinstance(x, MuonState)
    )


def mesh_of_one(params: Any) -> AnyMesh:
    """A mesh of the one device that holds ``params``."""
    for x in jax.tree.leaves(params):
        if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
            if isinstance(x.sharding, NamedSharding):
                return x.sharding.mesh
            if x.sharding is not None:
                return jax.sharding.Mesh(list(x.sharding.device_set), ("one",))
    return jax.sharding.Mesh(jax.local_devices()[:1], ("one",))


def abstract_state(tx: optax.GradientTransformation, params: Any) -> Any:
    """The types of the state's arrays: shapes, dtypes and memory spaces."""
    jaxpr, shapes = jax.make_jaxpr(tx.init, return_shape=True)(params)
    return jax.tree.structure(shapes).unflatten(jaxpr.out_avals)


def momentum_spec(planned: Mapping[str, Leaf], path: KeyPath) -> Spec:
    """The spec of the momentum at ``path``."""
    name = jax.tree_util.keystr(path)
    if name not in planned:
        raise ValueError(
            f"plan must be made for this tree: it has no leaf for the momentum at {name}"
        )
    return planned[name].spec_in
