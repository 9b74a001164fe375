"""Over which mesh axes owners are spread, by price: fewer axes repeat work, and send less.

Along an axis that is left out every device does the same work, so that nothing crosses it
but the blocks that are cut along it, and results need no gathering there.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from dmuon_jax.matrices import Axes, Leaf, MeshShape
from dmuon_jax.planning.build import Settings, make_plan
from dmuon_jax.planning.plan import Alternative, Plan
from dmuon_jax.planning.problem import MemoryLimitError

AUTO: Literal["auto"] = "auto"


def owner_axes_candidates(
    leaves: Sequence[Leaf],
    mesh: MeshShape,
    bandwidths: Sequence[tuple[str, float]] = (),
) -> tuple[Axes, ...]:
    """Choices of owner axes worth pricing; the first is all of them.

    Left out are in turn the first axes one by one, which are those between nodes; all
    axes slower than the fastest; those that no parameter is sharded over; and both.
    """
    names = mesh.names
    speeds = dict(bandwidths)
    fastest = max(speeds.values(), default=0.0)
    fast = {n for n in names if speeds.get(n, fastest) >= fastest}
    cut = {axis for leaf in leaves for axes in leaf.spec_out for axis in axes}
    wanted = [set(names[first:]) for first in range(len(names))]
    wanted += [fast, cut, fast & cut]
    found: dict[Axes, Axes] = {}
    for axes in wanted:
        kept = mesh.ordered(tuple(axes & set(names)))
        # Axes of size 1 make no difference.
        real = tuple(n for n in kept if mesh.size((n,)) > 1)
        if real or kept == names:
            found.setdefault(real, kept)
    return tuple(found.values()) or (names,)


NEAR = 0.05
"""Plans this near to the cheapest count as equal: of their exchange some part is hidden."""


def cheapest_plan(leaves: Sequence[Leaf], mesh: MeshShape, settings: Settings) -> Plan:
    """The plan whose owner axes have the least makespan plus exchange.

    Among those within `NEAR` of it the one with the least makespan. The others are in its
    ``alternatives``, but for those that a limit on memory forbids.

    Args:
      leaves: what is planned.
      mesh: its mesh.
      settings: ``owner_axes`` is not looked at.

    Raises:
      ValueError: as for ``make_plan`` with all axes.
    """
    candidates = owner_axes_candidates(leaves, mesh, settings.bandwidths)
    plans: list[Plan] = []
    for axes in candidates:
        try:
            plans.append(
                make_plan(leaves, mesh, dataclasses.replace(settings, owner_axes=axes))
            )
        except MemoryLimitError:
            # Fewer owners hold more each; with all of them it must fit.
            if axes == candidates[0]:
                raise
    least_us = min(plan.objective_us for plan in plans)
    near = [plan for plan in plans if plan.objective_us <= least_us * (1 + NEAR)]
    best = min(near, key=lambda plan: plan.makespan_us)
    others = tuple(
        Alternative(plan.owner_axes, plan.makespan_us, plan.exchange_us)
        for plan in plans
        if plan is not best
    )
    return dataclasses.replace(best, alternatives=others)
