"""Finds the plan of a tree: given, or made from the shardings that can be seen."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dmuon_jax.matrices import Axes, Leaf, MeshShape, normalize_axes
from dmuon_jax.planning.build import Settings, make_plan
from dmuon_jax.planning.interim_cost import default_cost
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.problem import Method
from dmuon_jax.routing import DimensionNumbers, leaf_dimensions
from dmuon_jax.shardings import (
    AnyMesh,
    Seen,
    find_mesh,
    given_shardings,
    lookup,
    mesh_shape,
    platform_of,
    see,
    spec_of,
    zero_spec,
)

HOW_TO_TELL = (
    "pass param_shardings= (a tree of NamedSharding) or plan= (from plan_owners), or call "
    "init on the real arrays before tracing"
)


@dataclasses.dataclass(frozen=True)
class OwnerOptions:
    """What ``dmuon`` takes beyond ``optax.contrib.muon``; see there."""

    plan: Plan | None = None
    param_shardings: Any = None
    momentum_shardings: Any = None
    compute_dtype: Any = None
    exchange_dtype: Any = None
    method: Method | None = None
    implementation: str | None = None
    owner_axes: Axes | None = None

    def __post_init__(self):
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise TypeError(f"plan must be a Plan, got {type(self.plan).__name__}")
        if self.method not in (None, "direct", "gram"):
            raise ValueError(
                f"method must be None, 'direct' or 'gram', got {self.method!r}"
            )
        if self.implementation not in (None, "xla", "pallas"):
            raise ValueError(
                "implementation must be None, 'xla' or 'pallas', got "
                f"{self.implementation!r}"
            )
        dtype_name("compute_dtype", self.compute_dtype)
        dtype_name("exchange_dtype", self.exchange_dtype)


def dtype_name(name: str, dtype: Any) -> str | None:
    """The name of a real floating dtype, or None for None.

    Raises:
      ValueError: if it is not one.
    """
    if dtype is None:
        return None
    found = jax.dtypes.canonicalize_dtype(dtype).name
    allowed = ("float16", "bfloat16", "float32", "float64")
    if found not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {found!r}")
    return found


@dataclasses.dataclass(frozen=True)
class Found:
    """A plan and the mesh that carries the arrays (None for one device)."""

    plan: Plan
    mesh: AnyMesh | None


class PlanFinder:
    """Finds plans for the trees that one transform meets, and remembers them.

    The memory holds what an eager ``init`` saw, for a later trace in which specs are hidden.
    """

    def __init__(self, options: OwnerOptions, rule: Any):
        self.options = options
        self.rule = rule
        self.memory: dict[tuple, Found] = {}
        self.plans: dict[tuple, Plan] = {}

    def __call__(self, tree: Any) -> Found:
        """The plan for ``tree``, whose leaves are all matrices.

        Raises:
          ValueError: unknown shardings, or a plan made for something else.
        """
        paths, arrays = flatten(tree)
        dims = leaf_dimensions(self.rule, tree)
        given = given_shardings(self.options.param_shardings)
        seen = {p: see_one(x, p, given) for p, x in zip(paths, arrays, strict=True)}
        mesh = find_mesh(seen)
        if self.options.plan is not None:
            return self.given_plan(self.options.plan, paths, arrays, dims, seen, mesh)
        key = (tuple(paths), tuple(np.shape(x) for x in arrays), mesh_shape(mesh))
        hidden = [path for path, item in seen.items() if item.spec is None]
        if hidden:
            if key in self.memory:
                return Found(self.memory[key].plan, mesh)
            raise ValueError(
                f"the sharding of a traced parameter must be told on a mesh with Auto axes "
                f"{mesh_shape(mesh)}: {HOW_TO_TELL}; unknown at {name_some(hidden)}"
            )
        leaves = make_leaves(
            paths, arrays, dims, seen, mesh, self.options.momentum_shardings
        )
        settings = make_settings(self.options, mesh)
        full = (tuple(leaves), mesh_shape(mesh), settings)
        if full not in self.plans:
            self.plans[full] = make_plan(leaves, mesh_shape(mesh), settings)
        self.memory[key] = Found(self.plans[full], mesh)
        return self.memory[key]

    def given_plan(
        self,
        plan: Plan,
        paths: Sequence[str],
        arrays: Sequence[Any],
        dims: Sequence[DimensionNumbers],
        seen: dict[str, Seen],
        mesh: AnyMesh | None,
    ) -> Found:
        """``plan``, after checking that it was made for this tree and mesh."""
        key = plan.mesh
        if mesh is None and plan.mesh.num_devices > 1:
            context = jax.sharding.get_abstract_mesh()
            if not context.empty and mesh_shape(context) == plan.mesh:
                mesh = context
            elif (key,) in self.memory:
                mesh = self.memory[key,].mesh
        check_fits(plan, paths, arrays, dims, seen, mesh)
        check_agrees(plan, self.options)
        found = Found(plan, mesh)
        if mesh is not None:
            self.memory[key,] = found
        return found


def flatten(tree: Any) -> tuple[list[str], list[Any]]:
    """Paths and leaves of a tree."""
    items = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in items], [x for _, x in items]


def see_one(x: Any, path: str, given) -> Seen:
    """The sharding given for ``path``, else what the array shows."""
    sharding = lookup(given, path)
    if sharding is None:
        return see(x, path)
    see(x, path)  # refuses what no given sharding can make right
    mesh = sharding.mesh if sharding.mesh.size > 1 else None
    return Seen(mesh, spec_of(sharding.spec, np.ndim(x), path))


def make_leaves(
    paths: Sequence[str],
    arrays: Sequence[Any],
    dims: Sequence[DimensionNumbers],
    seen: dict[str, Seen],
    mesh: AnyMesh | None,
    momentum_shardings: Any,
) -> list[Leaf]:
    """Describes each array as a ``Leaf``.

    Raises:
      ValueError: every leaf that cannot be a matrix, all at once.
      TypeError: every leaf that is not floating point, all at once.
    """
    given = given_shardings(momentum_shardings)
    shape = mesh_shape(mesh)
    leaves, errors = [], []
    for path, x, dim in zip(paths, arrays, dims, strict=True):
        try:
            leaves.append(make_leaf(path, x, dim, seen[path], shape, lookup(given, path)))
        except (TypeError, ValueError) as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("\n".join(str(error) for error in errors))
    return leaves


def make_leaf(
    path: str,
    x: Any,
    dim: DimensionNumbers,
    seen: Seen,
    mesh: MeshShape,
    momentum: jax.sharding.NamedSharding | None,
) -> Leaf:
    """Describes one array."""
    if dim is None:
        raise ValueError(f"a leaf updated by Muon must have dimension numbers, at {path}")
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        raise TypeError(
            f"a leaf updated by Muon must be floating point, got {x.dtype} at {path}"
        )
    ndim = np.ndim(x)
    reduction, output = normalize_axes(ndim, *dim, path=path)
    # An array on one device beside others on a mesh is replicated when it joins them.
    spec_out = seen.spec if seen.mesh is not None else ((),) * ndim
    batch = [axis for axis in range(ndim) if axis not in reduction + output]
    if momentum is not None:
        spec_in = spec_of(momentum.spec, ndim, path)
    elif any(spec_out) or mesh.num_devices == 1:
        spec_in = spec_out
    else:
        spec_in = zero_spec(x.shape, batch, mesh)
    return Leaf(
        path=path,
        shape=tuple(x.shape),
        dtype=np.dtype(x.dtype).name,
        reduction_axes=reduction,
        output_axes=output,
        spec_in=spec_in,
        spec_out=spec_out,
    )


def make_settings(options: OwnerOptions, mesh: AnyMesh | None) -> Settings:
    """Planning settings for the devices of ``mesh``."""
    shape = mesh_shape(mesh)
    owner_axes = shape.names if options.owner_axes is None else options.owner_axes
    unknown = sorted(set(owner_axes) - set(shape.names))
    if unknown and mesh is not None:
        raise ValueError(
            f"owner_axes must be axes of the mesh {shape.names}, got {unknown}"
        )
    platform = platform_of(mesh)
    return Settings(
        owner_axes=shape.ordered(owner_axes),
        cost=default_cost(platform),
        platform=platform,
        exchange_dtype=dtype_name("exchange_dtype", options.exchange_dtype),
        compute_dtype=dtype_name("compute_dtype", options.compute_dtype),
        method=options.method,
    )


def check_fits(
    plan: Plan,
    paths: Sequence[str],
    arrays: Sequence[Any],
    dims: Sequence[DimensionNumbers],
    seen: dict[str, Seen],
    mesh: AnyMesh | None,
) -> None:
    """Raises ``ValueError`` with everything in which ``plan`` and tree differ."""
    wrong = []
    if mesh_shape(mesh) != plan.mesh and plan.mesh.num_devices > 1:
        wrong.append(f"the plan's mesh is {plan.mesh}, the arrays' {mesh_shape(mesh)}")
    planned = {leaf.path: leaf for leaf in plan.leaves}
    for path in sorted(set(planned) - set(paths)):
        wrong.append(f"the plan has a leaf that the tree lacks, at {path}")
    for path, x, dim in zip(paths, arrays, dims, strict=True):
        if path not in planned:
            wrong.append(f"the tree has a leaf that the plan lacks, at {path}")
            continue
        leaf, shape = planned[path], tuple(np.shape(x))
        if leaf.shape != shape:
            wrong.append(f"the plan has shape {leaf.shape}, the tree {shape}, at {path}")
            continue
        axes = normalize_axes(len(shape), *dim, path=path)
        if axes != (leaf.reduction_axes, leaf.output_axes):
            wrong.append(f"the plan has other matrix axes than {axes}, at {path}")
        spec = seen[path].spec
        if seen[path].mesh is not None and spec is not None and spec != leaf.spec_out:
            wrong.append(f"the plan has spec {leaf.spec_out}, the tree {spec}, at {path}")
    if wrong:
        raise ValueError("plan must be made for this tree and mesh:\n" + "\n".join(wrong))


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
            None if options.owner_axes is None else plan.mesh.ordered(options.owner_axes),
            {plan.owner_axes},
        ),
    }
    wrong = [
        f"{name}={value!r} but the plan was made with {sorted(map(str, planned))}"
        for name, (value, planned) in named.items()
        if value is not None and planned - {value}
    ]
    if wrong:
        raise ValueError("options must agree with plan=: " + "; ".join(wrong))


def name_some(paths: Sequence[str], most: int = 5) -> str:
    """The first few of ``paths``."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more


def plan_owners(
    params: Any,
    mesh: AnyMesh | None = None,
    *,
    param_shardings: Any = None,
    momentum_shardings: Any = None,
    muon_weight_dimension_numbers: Any = None,
    **options: Any,
) -> Plan:
    """The plan that ``dmuon`` would make, without running anything.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``; those that go to Adam are left
        out by the same rule as in ``dmuon``.
      mesh: the mesh; may be left out if the shardings tell.
      param_shardings: as for ``dmuon``.
      momentum_shardings: as for ``dmuon``.
      muon_weight_dimension_numbers: as for ``dmuon``.
      **options: ``compute_dtype``, ``exchange_dtype``, ``method``, ``owner_axes``: as for
        ``dmuon``.

    Returns:
      The plan: hashable, with ``summary()``, ``to_json()`` and ``Plan.from_json``.

    Raises:
      ValueError: if the sharding of a leaf is not known, or does not fit.
    """
    choices = OwnerOptions(
        param_shardings=param_shardings, momentum_shardings=momentum_shardings, **options
    )
    paths, arrays = flatten(params)
    dims = leaf_dimensions(muon_weight_dimension_numbers, params)
    kept = [i for i, dim in enumerate(dims) if dim is not None]
    paths, arrays, dims = ([items[i] for i in kept] for items in (paths, arrays, dims))
    given = given_shardings(param_shardings)
    seen = {p: see_one(x, p, given) for p, x in zip(paths, arrays, strict=True)}
    found = find_mesh(seen)
    if mesh is not None and found is not None and mesh_shape(mesh) != mesh_shape(found):
        raise ValueError(
            f"mesh must be the one of the arrays, {mesh_shape(found)}, got "
            f"{mesh_shape(mesh)}"
        )
    mesh = found if mesh is None else mesh
    hidden = [p for p, s in seen.items() if s.spec is None or s.mesh is None]
    if hidden and mesh_shape(mesh).num_devices > 1:
        raise ValueError(
            f"the sharding of each leaf must be known on {mesh_shape(mesh)}: pass "
            f"param_shardings=; unknown at {name_some(hidden)}"
        )
    leaves = make_leaves(paths, arrays, dims, seen, mesh, momentum_shardings)
    return make_plan(leaves, mesh_shape(mesh), make_settings(choices, mesh))
