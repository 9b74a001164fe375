"""Leaves of a tree by name."""

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
