"""Leaves of a tree by name."""

from collections.abc import Sequence
from typing import Any

import jax


def leaf_name(path: tuple[Any, ...]) -> str:
    """A path as ``jax.tree_util.keystr`` writes it, without NNX's ``.value``.

    ``nnx.Optimizer`` shows its variables at ``init`` and their arrays at ``update``; both
    are one leaf.
    """
    return jax.tree_util.keystr(path).removesuffix(".value")


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, in tree order."""
    items = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path): x for path, x in items}


def covers(prefix: str, path: str) -> bool:
    """Whether ``prefix`` names the leaf at ``path``, or a subtree that it is in."""
    return path == prefix or not prefix or path.startswith((prefix + "[", prefix + "."))


def name_some(paths: Sequence[str], most: int = 5) -> str:
    """The first few of ``paths``."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
