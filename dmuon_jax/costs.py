"""Which costs a plan is made with: given, of a roofline, or measured; and by whom."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax

from dmuon_jax.agreement import from_first_process, is_abstract, processes_of
from dmuon_jax.kernels.records import Cache, cache_directory
from dmuon_jax.matrices import Axes, Leaf
from dmuon_jax.measure import BUDGET_S, default_device, measure_costs
from dmuon_jax.planning.batches import even_batches
from dmuon_jax.planning.cost import TableCost
from dmuon_jax.planning.problem import CostModel, Method
from dmuon_jax.shardings import AnyMesh, mesh_shape
from dmuon_jax.update_time import UpdatePath

MEASURED_BY_DEFAULT = ("gpu", "tpu")
"""Platforms on which an eager ``init`` measures unless it is told otherwise."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """``costs="measured"``, and how.

    Attributes:
      cache: where results are kept, see ``measure_costs``; False turns it off.
      budget_s: seconds that measuring may take, see ``measure_costs``.
    """

    cache: Cache = True
    budget_s: float = BUDGET_S

    def __post_init__(self):
        cache_directory(self.cache)
        if not isinstance(self.budget_s, int | float):
            raise TypeError(f"budget_s must be a number, got {self.budget_s!r}")
        if not 0 <= self.budget_s < math.inf:
            raise ValueError(
                f"budget_s must be at least 0 and finite, got {self.budget_s}"
            )


Costs = CostModel | Measured | Literal["measured", "roofline"] | None


def check_costs(costs: Any) -> None:
    """Raises unless ``costs`` is one of `Costs`."""
    if isinstance(costs, str):
        if costs not in ("measured", "roofline"):
            raise ValueError(
                "costs must be None, 'measured', 'roofline', Measured(...) or a cost "
                f"model, got {costs!r}"
            )
    elif not (costs is None or isinstance(costs, Measured | CostModel)):
        raise TypeError(
            "costs must be None, 'measured', 'roofline', Measured(...) or a cost model "
            f"with time_us(shape, batch, method), got {type(costs).__name__}"
        )


def how_to_measure(
    costs: Costs, platform: str, at_init: bool
) -> tuple[Measured | None, bool]:
    """How to measure if that is wanted, and whether nothing else will do."""
    if isinstance(costs, Measured):
        return costs, True
    if costs == "measured":
        return Measured(), True
    by_default = costs is None and at_init and platform in MEASURED_BY_DEFAULT
    return (Measured() if by_default else None), False


def obstacle(arrays: Iterable[Any], mesh: AnyMesh | None) -> str:
    """Why nothing can be measured for ``arrays`` now; "" if it can."""
    if is_abstract(arrays):
        return "the arrays are traced or abstract"
    if mesh is None:
        return ""
    if not isinstance(mesh, jax.sharding.Mesh):
        return "the mesh has no devices"
    holders = processes_of(mesh)
    if not spans_processes(mesh) or holders == set(range(jax.process_count())):
        return ""
    return f"the mesh is of processes {sorted(holders)}, neither one's own nor all"


def spans_processes(mesh: AnyMesh | None) -> bool:
    """Whether some device of ``mesh`` belongs to another process."""
    return isinstance(mesh, jax.sharding.Mesh) and bool(
        processes_of(mesh) - {jax.process_index()}
    )


def own_device(mesh: AnyMesh | None) -> Any:
    """The first device of ``mesh`` that is this process's; without a mesh the default."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return default_device()
    index = jax.process_index()
    return next(d for d in mesh.devices.flat if d.process_index == index)


def measured_table(
    how: Measured,
    path: UpdatePath,
    method: Method | None,
    leaves: Sequence[Leaf],
    mesh: AnyMesh | None,
    candidates: Sequence[Axes],
) -> TableCost:
    """Times of what owners of ``leaves`` may get; the same on all processes of the mesh.

    Where the mesh spans processes each must call this: the first one measures, and all use
    its table.
    """

    def make() -> str:
        batches = even_batches(leaves, mesh_shape(mesh), candidates)
        device = own_device(mesh)
        table = measure_costs(
            batches,
            path,
            method=method,
            device=device,
            cache=how.cache,
            budget_s=how.budget_s,
        )
        return table.to_json()

    text = from_first_process(make) if spans_processes(mesh) else make()
    return TableCost.from_json(text)
