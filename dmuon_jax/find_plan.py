"""Finds the plan of a tree: given, or made from the shardings that can be seen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dmuon_jax.agreement import check_agreement, must_agree
from dmuon_jax.leaves import make_leaves, make_settings, name_some, see_one
from dmuon_jax.options import OwnerOptions
from dmuon_jax.plan_checks import check_agrees, check_fits
from dmuon_jax.planning.build import make_plan
from dmuon_jax.planning.plan import Plan
from dmuon_jax.routing import matrices_of
from dmuon_jax.shardings import AnyMesh, Seen, find_mesh, given_shardings, mesh_shape
from dmuon_jax.split import Dimensions
from dmuon_jax.tree_checks import check_arrays

HOW_TO_TELL = (
    "pass param_shardings= (a tree of NamedSharding) or plan= (from plan_owners), or call "
    "init on the real arrays before tracing"
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A plan and the mesh that carries the arrays (None for one device)."""

    plan: Plan
    mesh: AnyMesh | None


class PlanFinder:
    """Finds plans for the trees that one transform meets, and remembers them.

    The memory holds what an eager ``init`` saw, for a later trace in which specs are hidden.
    """

    def __init__(self, options: OwnerOptions):
        self.options = options
        self.given = given_shardings(options.param_shardings)
        self.memory: dict[tuple, Plan] = {}
        self.plans: dict[tuple, Plan] = {}
        self.meshes: dict[Any, AnyMesh] = {}
        self.agreed: set[Plan] = set()

    def find(
        self, arrays: Mapping[str, Any], dims: Mapping[str, Dimensions]
    ) -> Found:
        """The plan for ``arrays``, all of them matrices or stacks of matrices.

        Args:
          arrays: by path; arrays, tracers or ``ShapeDtypeStruct``s.
          dims: dimension numbers by path.

        Raises:
          ValueError: unknown shardings, a plan made for something else, or other plans in
            other processes (only where arrays are concrete and lie on all of them).
        """
        seen = {path: see_one(x, path, self.given) for path, x in arrays.items()}
        mesh = find_mesh(seen)
        if self.options.plan is not None:
            return self.given_plan(self.options.plan, arrays, dims, seen, mesh)
        shape = mesh_shape(mesh)
        key = (tuple((path, np.shape(x)) for path, x in arrays.items()), shape)
        hidden = [path for path, item in seen.items() if item.spec is None]
        if not hidden:
            self.memory[key] = self.make(arrays, dims, seen, mesh)
        elif key not in self.memory:
            raise ValueError(
                f"the sharding of a traced parameter must be told on a mesh with Auto axes "
                f"{shape}: {HOW_TO_TELL}; unknown at {name_some(hidden)}"
            )
        return Found(self.memory[key], mesh)

    def make(
        self,
        arrays: Mapping[str, Any],
        dims: Mapping[str, Dimensions],
        seen: Mapping[str, Seen],
        mesh: AnyMesh | None,
    ) -> Plan:
        """Solves a plan, once for each set of leaves and mesh."""
        momentum = self.options.momentum_shardings
        leaves = make_leaves(arrays, dims, seen, mesh, momentum)
        settings = make_settings(self.options, mesh)
        key = (tuple(leaves), mesh_shape(mesh), settings)
        if key not in self.plans:
            self.plans[key] = make_plan(leaves, mesh_shape(mesh), settings)
        plan = self.plans[key]
        if plan not in self.agreed and must_agree(arrays.values(), mesh):
            facts = {"parameters": repr(leaves), "costs or options": repr(settings)}
            check_agreement({**facts, "owners": plan.to_json()})
            self.agreed.add(plan)
        return plan

    def given_plan(
        self,
        plan: Plan,
        arrays: Mapping[str, Any],
        dims: Mapping[str, Dimensions],
        seen: Mapping[str, Seen],
        mesh: AnyMesh | None,
    ) -> Found:
        """``plan``, after checking that it was made for these arrays and this mesh."""
        context = jax.sharding.get_abstract_mesh()
        if mesh is None and not context.empty and mesh_shape(context) == plan.mesh:
            mesh = context
        mesh = self.meshes.get(plan.mesh) if mesh is None else mesh
        check_fits(plan, arrays, dims, seen, mesh)
        check_agrees(plan, self.options)
        if plan not in self.agreed and must_agree(arrays.values(), mesh):
            check_agreement({"owners": plan.to_json()})
            self.agreed.add(plan)
        if mesh is not None:
            self.meshes[plan.mesh] = mesh
        return Found(plan, mesh)


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
      **options: ``compute_dtype``, ``exchange_dtype``, ``method``, ``owner_axes``,
        ``max_wave_bytes``: as for ``dmuon``.

    Returns:
      The plan: hashable, with ``summary()``, ``to_json()`` and ``Plan.from_json``.

    Raises:
      ValueError: if the sharding of a leaf is not known, or does not fit.
    """
    choices = OwnerOptions(
        param_shardings=param_shardings,
        momentum_shardings=momentum_shardings,
        **options,
    )
    kinds = jax.sharding.Mesh | jax.sharding.AbstractMesh
    if mesh is not None and not isinstance(mesh, kinds):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")
    check_arrays("params", params)
    arrays, dims = matrices_of(params, muon_weight_dimension_numbers)
    given = given_shardings(param_shardings)
    seen = {path: see_one(x, path, given) for path, x in arrays.items()}
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
    leaves = make_leaves(arrays, dims, seen, mesh, momentum_shardings)
    return make_plan(leaves, mesh_shape(mesh), make_settings(choices, mesh))
