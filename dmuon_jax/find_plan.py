"""Finds the plan of a tree: given, or made from the shardings that can be seen."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dmuon_jax.agreement import check_agreement, must_agree
from dmuon_jax.costs import (
    how_to_measure,
    measured_table,
    obstacle,
    spans_processes,
)
from dmuon_jax.leaves import make_leaves, make_settings, see_one
from dmuon_jax.matrices import Leaf
from dmuon_jax.options import OwnerOptions, owner_options
from dmuon_jax.paths import name_some
from dmuon_jax.plan_checks import check_agrees, check_fits
from dmuon_jax.planning.build import Settings, make_plan
from dmuon_jax.planning.compare import AUTO, cheapest_plan, owner_axes_candidates
from dmuon_jax.planning.cost import TableCost
from dmuon_jax.planning.plan import Plan
from dmuon_jax.routing import matrices_of
from dmuon_jax.shardings import (
    AnyMesh,
    Seen,
    find_mesh,
    given_shardings,
    mesh_shape,
    same_mesh,
    tell_apart,
)
from dmuon_jax.split import Dimensions
from dmuon_jax.tree_checks import check_arrays, check_given
from dmuon_jax.update_time import UpdatePath

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

    def __init__(self, options: OwnerOptions, path: UpdatePath | None = None):
        self.options = options
        self.path = UpdatePath() if path is None else path
        self.given = given_shardings(options.param_shardings)
        self.memory: dict[tuple, Plan] = {}
        self.plans: dict[tuple, Plan] = {}
        self.meshes: dict[Any, AnyMesh] = {}
        self.tables: dict[tuple, TableCost] = {}
        self.agreed: set[Any] = set()

    def find(
        self,
        arrays: Mapping[str, Any],
        dims: Mapping[str, Dimensions],
        at_init: bool = False,
    ) -> Found:
        """The plan for ``arrays``, all of them matrices or stacks of matrices.

        Args:
          arrays: by path; arrays, tracers or ``ShapeDtypeStruct``s.
          dims: dimension numbers by path.
          at_init: whether costs may be measured though no one asked for it.

        Raises:
          ValueError: unknown shardings, a plan made for something else, or other plans in
            other processes (only where arrays are concrete and lie on all of them).
        """
        seen = {path: see_one(x, path, self.given) for path, x in arrays.items()}
        mesh = find_mesh(seen)
        if self.options.plan is not None:
            return self.given_plan(self.options.plan, arrays, dims, seen, mesh)
        shape = mesh_shape(mesh)
        bare = [path for path, item in seen.items() if item.mesh is None]
        if self.given and mesh is not None and bare:
            raise ValueError(
                "param_shardings must have a sharding for each matrix that shows none, got "
                f"none at {name_some(bare)}"
            )
        tree = tuple((path, np.shape(x)) for path, x in arrays.items())
        key = (tree, shape)
        hidden = [path for path, item in seen.items() if item.spec is None]
        if not hidden:
            self.memory[key] = self.make(arrays, dims, seen, mesh, at_init)
        elif key not in self.memory:
            others = [str(mesh) for known, mesh in self.memory if known == tree]
            raise ValueError(
                f"the sharding of a traced parameter must be told on a mesh with Auto axes "
                f"{shape}: {HOW_TO_TELL}; unknown at {name_some(hidden)}"
                + (f"; init saw them on {name_some(others)} only" if others else "")
            )
        return Found(self.memory[key], mesh)

    def make(
        self,
        arrays: Mapping[str, Any],
        dims: Mapping[str, Dimensions],
        seen: Mapping[str, Seen],
        mesh: AnyMesh | None,
        at_init: bool = False,
    ) -> Plan:
        """Solves a plan, once for each set of leaves, mesh and costs."""
        momentum = self.options.momentum_shardings
        leaves = make_leaves(arrays, dims, seen, mesh, momentum)
        settings = make_settings(self.options, mesh)
        key = (tuple(leaves), mesh_shape(mesh), settings)
        shared = must_agree(arrays.values(), mesh)
        if shared and key not in self.agreed:
            options = repr((settings, self.options.owner_axes, self.options.costs))
            check_agreement({"parameters": repr(leaves), "costs or options": options})
            self.agreed.add(key)
        table = self.table(key, arrays.values(), mesh, at_init)
        if table is not None:
            settings = dataclasses.replace(settings, cost=table)
        solved = (*key, table)
        if solved not in self.plans:
            self.plans[solved] = solve(leaves, mesh, settings, self.options)
        plan = self.plans[solved]
        if shared and plan not in self.agreed:
            check_agreement({"owners": plan.to_json()})
            self.agreed.add(plan)
        return plan

    def table(
        self, key: tuple, arrays: Iterable[Any], mesh: AnyMesh | None, at_init: bool
    ) -> TableCost | None:
        """The costs measured for ``key``, now or before; None to plan without.

        Raises:
          ValueError: if they were asked for by name and cannot be measured now.
        """
        leaves, shape, settings = key
        how, needed = how_to_measure(self.options.costs, settings.platform, at_init)
        if how is None or key in self.tables:
            return self.tables.get(key)
        why_not = obstacle(arrays, mesh)
        if why_not and needed:
            raise ValueError(
                f"costs must be measured beforehand where {why_not}: call init on the real "
                "arrays, or pass costs=measure_costs(...) or costs='roofline'"
            )
        if why_not:
            return None
        candidates = [settings.owner_axes]
        if self.options.owner_axes == AUTO:
            candidates = owner_axes_candidates(leaves, shape, settings.bandwidths)
        path = dataclasses.replace(
            self.path,
            compute_dtype=settings.compute_dtype,
            exchange_dtype=settings.exchange_dtype,
        )
        work = (path, settings.method, leaves, mesh, candidates)
        self.tables[key] = measured_table(how, *work)
        return self.tables[key]

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


def solve(
    leaves: Sequence[Leaf],
    mesh: AnyMesh | None,
    settings: Settings,
    options: OwnerOptions,
) -> Plan:
    """The plan for ``leaves``, over the owner axes that ``options`` name or leave open."""
    make = cheapest_plan if options.owner_axes == AUTO else make_plan
    return make(leaves, mesh_shape(mesh), settings)


def plan_owners(
    params: Any,
    mesh: AnyMesh | None = None,
    *,
    param_shardings: Any = None,
    momentum_shardings: Any = None,
    muon_weight_dimension_numbers: Any = None,
    **options: Any,
) -> Plan:
    """The plan that ``dmuon`` would make by a roofline, without running anything.

    On GPU and TPU an eager ``init`` measures its costs by default; ``costs="measured"`` does
    so here, and ``dmuon(plan=...)`` then uses this plan.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``; those that go to Adam are left
        out by the same rule as in ``dmuon``.
      mesh: the mesh; may be left out if the shardings tell. Where neither does, as with
        abstract parameters without shardings, the plan is for one device, and says so.
      param_shardings: as for ``dmuon``.
      momentum_shardings: as for ``dmuon``.
      muon_weight_dimension_numbers: as for ``dmuon``.
      **options: ``compute_dtype``, ``exchange_dtype``, ``method``, ``implementation``,
        ``owner_axes``, ``max_wave_bytes``, ``max_owner_bytes``, ``costs``: as for ``dmuon``.
        This function never communicates, and so refuses to measure for a mesh that spans
        processes: measure in one, and share the table.

    Returns:
      The plan: hashable, with ``summary()``, ``to_json()`` and ``Plan.from_json``.

    Raises:
      ValueError: if the sharding of a leaf is not known, or does not fit.
    """
    choices = owner_options(
        "plan_owners",
        param_shardings=param_shardings,
        momentum_shardings=momentum_shardings,
        **options,
    )
    kinds = jax.sharding.Mesh | jax.sharding.AbstractMesh
    if mesh is not None and not isinstance(mesh, kinds):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")
    check_arrays("params", params)
    check_given(
        params, param_shardings=param_shardings, momentum_shardings=momentum_shardings
    )
    arrays, dims = matrices_of(params, muon_weight_dimension_numbers)
    given = given_shardings(param_shardings)
    seen = {path: see_one(x, path, given) for path, x in arrays.items()}
    found = find_mesh(seen)
    if mesh is not None and found is not None and not same_mesh(found, mesh):
        own, other = tell_apart(found, mesh)
        raise ValueError(f"mesh must be the one of the arrays, {own}, got {other}")
    mesh = found if mesh is None else mesh
    hidden = [p for p, s in seen.items() if s.spec is None or s.mesh is None]
    if hidden and mesh_shape(mesh).num_devices > 1:
        raise ValueError(
            f"the sharding of each leaf must be known on {mesh_shape(mesh)}: pass "
            f"param_shardings=; unknown at {name_some(hidden)}"
        )
    finder = PlanFinder(choices, UpdatePath(implementation=choices.implementation))
    leaves = make_leaves(arrays, dims, seen, mesh, momentum_shardings)
    settings = make_settings(choices, mesh)
    how, _ = how_to_measure(choices.costs, settings.platform, at_init=False)
    if how is not None and spans_processes(mesh):
        raise ValueError(
            "costs must be measured in one process and shared where the mesh spans several: "
            "pass costs=TableCost.from_json(text) with to_json() of its measure_costs(...)"
        )
    key = (tuple(leaves), mesh_shape(mesh), settings)
    table = finder.table(key, arrays.values(), mesh, at_init=False)
    if table is not None:
        settings = dataclasses.replace(settings, cost=table)
    return solve(leaves, mesh, settings, choices)
