"""Which leaves go to Muon, and which of their axes make a matrix."""

from typing import Any

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from dmuon_jax.paths import by_path, covers, leaf_name, name_some
from dmuon_jax.split import Dimensions, Split

DimensionNumbers = Dimensions | None


def is_dimension(x: Any) -> bool:
    """Whether ``x`` stands for one entry of a tree of dimension numbers."""
    return x is None or isinstance(x, MuonDimensionNumbers | Split | optax.MaskedNode)


def leaf_dimensions(rule: Any, params: Any) -> list[DimensionNumbers]:
    """Dimension numbers of each leaf of ``params``; None sends a leaf to Adam.

    Args:
      rule: as ``muon_weight_dimension_numbers`` of ``optax.contrib.muon``: None (leaves with
        two dimensions are matrices), one ``MuonDimensionNumbers`` or ``Split``, a tree of
        them (a prefix of ``params``), or a callable that returns such a tree.
      params: arrays or shapes.

    Raises:
      ValueError: if the tree is not a prefix of ``params``.
      TypeError: if an entry is no ``MuonDimensionNumbers``, ``Split`` or None.
    """
    leaves = jax.tree.leaves(params)
    if rule is None:
        return [MuonDimensionNumbers() if np.ndim(x) == 2 else None for x in leaves]
    tree = rule(params) if callable(rule) else rule
    found: list[DimensionNumbers] = []

    def fill(path, entry, subtree):
        if not is_dimension(entry):
            raise TypeError(
                "dimension numbers must be MuonDimensionNumbers, Split or None, got "
                f"{type(entry).__name__} at {leaf_name(path) or 'their root'}"
            )
        found.extend([entry] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree_util.tree_map_with_path(fill, tree, params, is_leaf=is_dimension)
    except ValueError as error:
        raise ValueError(
            "dimension numbers must have the structure of params, or a prefix of it: "
            f"{difference(tree, params) or error}"
        ) from error
    return found


def difference(tree: Any, params: Any) -> str:
    """Where a tree of dimension numbers and ``params`` differ; "" if not in their paths."""
    entries = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_dimension)
    names = [leaf_name(path) for path, _ in entries]
    paths = list(by_path(params))
    extra = [n for n in names if not any(covers(n, path) for path in paths)]
    missing = [path for path in paths if not any(covers(n, path) for n in names)]
    found = {"no leaf of params at": extra, "none for": missing}
    return "; ".join(f"{what} {name_some(at)}" for what, at in found.items() if at)


class Router:
    """A rule decided on whole trees, for transforms that see parts of them.

    Inside ``optax.partition`` the leaves of the other half are masked away; a rule that
    looks at what lies beside a leaf could decide otherwise there. ``labels`` meets the
    whole tree, at every ``init`` and ``update``, before ``dimensions`` meets a part of it.
    """

    def __init__(self, rule: Any):
        self.rule = rule
        self.decided: dict[str, DimensionNumbers] = {}

    def labels(self, params: Any) -> Any:
        """``"muon"`` or ``"adam"`` for each leaf of a whole tree."""
        dims = leaf_dimensions(self.rule, params)
        items = jax.tree_util.tree_leaves_with_path(params)
        self.decided = {
            leaf_name(path): dim
            for (path, _), dim in zip(items, dims, strict=True)
        }
        labels = ["adam" if dim is None else "muon" for dim in dims]
        return jax.tree.structure(params).unflatten(labels)

    def dimensions(self, part: Any) -> Any:
        """Dimension numbers of a part of the tree that ``labels`` met last."""
        items = jax.tree_util.tree_leaves_with_path(part)
        dims = [self.decided[leaf_name(path)] for path, _ in items]
        return jax.tree.structure(part).unflatten(dims)


def matrix_dimensions(rule: Any, tree: Any) -> list[Dimensions]:
    """As ``leaf_dimensions`` for a tree of matrices only.

    Raises:
      ValueError: for leaves that ``rule`` sends to Adam.
    """
    return list(only_matrices(tree, rule)[1].values())


def only_matrices(
    tree: Any, rule: Any
) -> tuple[dict[str, Any], dict[str, Dimensions]]:
    """As ``matrices_of`` for a tree of matrices only; raises as ``matrix_dimensions``."""
    arrays, dims = matrices_of(tree, rule)
    if others := [path for path in by_path(tree) if path not in arrays]:
        raise ValueError(
            "a leaf updated by Muon must have dimension numbers (by default leaves with two "
            f"dimensions have), got none at {name_some(others)}"
        )
    return arrays, dims


def matrices_of(tree: Any, rule: Any) -> tuple[dict[str, Any], dict[str, Dimensions]]:
    """The leaves that ``rule`` calls matrices, and their dimension numbers, by path."""
    dims = leaf_dimensions(rule, tree)
    items = jax.tree_util.tree_leaves_with_path(tree)
    arrays: dict[str, Any] = {}
    numbers: dict[str, Dimensions] = {}
    for (path, x), dim in zip(items, dims, strict=True):
        if dim is not None:
            name = leaf_name(path)
            arrays[name], numbers[name] = x, dim
    return arrays, numbers
