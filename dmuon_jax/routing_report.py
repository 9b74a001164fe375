"""``routing_report``: every leaf with its route, its matrices, and what looks wrong."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from dmuon_jax.hidden_matrices import (
    Decision,
    HiddenMatrices,
    hidden_matrices,
    name_leaves,
)
from dmuon_jax.leaf_readings import Named, Names
from dmuon_jax.leaves import see_one
from dmuon_jax.paths import leaf_name
from dmuon_jax.routing import DimensionNumbers, leaf_dimensions
from dmuon_jax.shardings import given_shardings, partition_spec
from dmuon_jax.split import matrix_axes, pieces_of
from dmuon_jax.tree_checks import check_arrays, check_given

Route = Literal["muon", "adam", "undecided"]


@dataclasses.dataclass(frozen=True)
class RoutingRow:
    """One leaf.

    Attributes:
      path: where it sits (``paths.leaf_name``).
      route: "muon", "adam", or "undecided" where ``HiddenMatrices`` refuses.
      shape: its logical shape.
      dtype: name of its dtype.
      num_matrices: matrices that Muon finds in it; 0 on other routes.
      matrix_shape: (fan_in, fan_out) of each; None on other routes.
      sharding: its spec; "one device", or "hidden" where a trace does not show it.
      reason: why ``HiddenMatrices`` decided so; empty for other rules.
      flags: what looks wrong.
    """

    path: str
    route: Route
    shape: tuple[int, ...]
    dtype: str
    num_matrices: int
    matrix_shape: tuple[int, int] | None
    sharding: str
    reason: str
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RoutingReport:
    """The leaves of a tree in order; ``str()`` is a table.

    Attributes:
      rows: one for each leaf.
    """

    rows: tuple[RoutingRow, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """All that looks wrong, each with the path of its leaf."""
        return tuple(f"{row.path}: {flag}" for row in self.rows for flag in row.flags)

    def __str__(self) -> str:
        head = ("leaf", "route", "shape", "dtype", "matrices", "sharding")
        lines = [head, *(cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = [
            "  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True))
            for line in lines
        ]
        matrices = sum(row.num_matrices for row in self.rows)
        count = {r: sum(row.route == r for row in self.rows) for r in ("muon", "adam")}
        table.append(
            f"{len(self.rows)} leaves: {count['muon']} to Muon with {matrices} matrices, "
            f"{count['adam']} to Adam; {len(self.flags)} flags"
        )
        return "\n".join([*(line.rstrip() for line in table), *self.flags])


def cells(row: RoutingRow) -> tuple[str, ...]:
    """The cells of a row's line."""
    matrices = ""
    if row.matrix_shape is not None:
        matrices = f"{row.num_matrices} x {row.matrix_shape}"
    route = row.route + (" !" if row.flags else "")
    return row.path, route, str(row.shape), row.dtype, matrices, row.sharding


def routing_report(
    params: Any, rule: Any = None, *, param_shardings: Any = None
) -> RoutingReport:
    """Lists where ``dmuon`` sends each leaf, and flags what looks wrong.

    Flagged, by names and by what lies beside, are: a leaf on Muon that looks like a stack
    of biases or scales, or is named as an embedding, an unembedding or a router; matrices
    with one row or column; dimension numbers that do not fit, or that differ from the only
    ones that ``hidden_matrices`` finds; a leaf on Adam with three dimensions or more and no
    reason for it; a leaf that is not floating point; one that ``HiddenMatrices`` refuses.

    Args:
      params: arrays or shapes.
      rule: as ``muon_weight_dimension_numbers`` of ``dmuon``; None: leaves with two
        dimensions are matrices.
      param_shardings: a tree of ``NamedSharding`` (or a prefix), as for ``dmuon``.

    Raises:
      ValueError, TypeError: if the rule is no rule for this tree, a leaf is no array of
        numbers, or ``param_shardings`` contradict the arrays'.
    """
    check_arrays("params", params)
    check_given(params, param_shardings=param_shardings)
    is_own = isinstance(rule, HiddenMatrices)
    decisions = (rule if is_own else hidden_matrices).explain(params)
    leaves = name_leaves(params)
    if is_own:
        dims = [decision.dims for decision in decisions.values()]
    else:
        dims = leaf_dimensions(rule, params)
    modules: dict[Names, list[tuple[int, ...]]] = {}
    for leaf in leaves.values():
        modules.setdefault(leaf.names[:-1], []).append(leaf.shape)
    given = given_shardings(param_shardings)
    items = jax.tree_util.tree_leaves_with_path(params)
    rows = []
    for (key, x), dim in zip(items, dims, strict=True):
        path = leaf_name(key)
        leaf, decision = leaves[path], decisions[path]
        route, matrices, flags = judge(leaf, dim, decision, is_own)
        if dim is not None and is_stack_of_vectors(leaf, modules[leaf.names[:-1]]):
            flags.append(
                f"{len(leaf.shape)}-D leaf on Muon looks like a stack of biases"
            )
        rows.append(
            RoutingRow(
                path=path,
                route=route,
                shape=leaf.shape,
                dtype=np.dtype(jax.dtypes.result_type(x)).name,
                num_matrices=matrices[0],
                matrix_shape=matrices[1],
                sharding=sharding_text(x, path, given),
                reason=decision.reason if is_own else "",
                flags=tuple(flags),
            )
        )
    return RoutingReport(tuple(rows))


def judge(
    leaf: Named, dim: DimensionNumbers, decision: Decision, is_own: bool
) -> tuple[Route, tuple[int, tuple[int, int] | None], list[str]]:
    """Route, matrices and flags of a leaf, as far as it and its name tell."""
    flags = [] if leaf.is_float else ["not floating point"]
    kind = leaf.role.kind
    if dim is None:
        if is_own and not decision.is_decided:
            return "undecided", (0, None), [*flags, f"refused: {decision.reason}"]
        is_open = kind in ("matrix", "unknown") and not is_own
        if is_open and sum(size != 1 for size in leaf.shape) >= 3:
            flags.append(f"{len(leaf.shape)}-D leaf on Adam")
        return "adam", (0, None), flags
    if kind in ("embedding", "unembedding", "router"):
        article = "a" if kind == "router" else "an"
        flags.append(f"named as {article} {kind}, on Muon")
    try:
        axes = matrix_axes(dim, len(leaf.shape), ".".join(leaf.names))
    except ValueError as error:
        return "muon", (0, None), [*flags, str(error)]
    fan_in, fan_out = (math.prod(leaf.shape[a] for a in group) for group in axes)
    if 1 in (fan_in, fan_out):
        flags.append("matrices with one row or column")
    if decision.dims is not None and not is_own:
        other = matrix_axes(decision.dims, len(leaf.shape), ".".join(leaf.names))
        if differ(axes, other, is_square=fan_in == fan_out):
            flags.append(
                f"reduction {axes[0]} and output {axes[1]}, where names and shapes fit only "
                f"reduction {other[0]} and output {other[1]}"
            )
    count = math.prod(leaf.shape) // max(1, fan_in * fan_out)
    try:
        pieces = pieces_of(dim, leaf.shape, ".".join(leaf.names))
    except ValueError as error:
        return "muon", (0, None), [*flags, str(error)]
    return "muon", (count * max(1, len(pieces)), (fan_in, fan_out)), flags


def differ(axes: Sequence[Any], other: Sequence[Any], is_square: bool) -> bool:
    """Whether two readings of a leaf give different updates."""
    ours, theirs = [set(group) for group in axes], [set(group) for group in other]
    return ours != theirs and not (is_square and ours == theirs[::-1])


def is_stack_of_vectors(leaf: Named, beside: Sequence[tuple[int, ...]]) -> bool:
    """Whether a leaf's name, or a kernel beside it with one axis more, says so."""
    if leaf.role.kind != "unknown":
        return leaf.role.kind == "vector"
    return any(
        shape[:axis] + shape[axis + 1 :] == leaf.shape
        for shape in beside
        for axis in range(len(shape))
        if len(shape) >= 3
    )


def sharding_text(x: Any, path: str, given: Mapping[str, Any]) -> str:
    """The spec of an array, as far as it can be seen."""
    seen = see_one(x, path, given)
    if seen.spec is None:
        return "hidden"
    return "one device" if seen.mesh is None else f"P{tuple(partition_spec(seen.spec))}"
