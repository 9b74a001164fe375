"""Whether a leaf of a plan, which may come from a file, is one that can be."""

import itertools

from dmuon_jax.matrices import Leaf, Piece, normalize_axes
from dmuon_jax.planning.report import ITEMSIZE


def check_leaf(leaf: Leaf) -> None:
    """Raises ``ValueError`` unless dtype, shape, axes and pieces are possible."""
    check_dtype("dtype", leaf.dtype)
    if min(leaf.shape, default=1) < 0:
        raise ValueError(f"shape must not be negative, got {leaf.shape} at {leaf.path}")
    axes = (leaf.reduction_axes, leaf.output_axes)
    if normalize_axes(len(leaf.shape), *axes, path=leaf.path) != axes:
        raise ValueError(f"axes must not be negative, got {axes} at {leaf.path}")
    if leaf.pieces and not covers(leaf):
        raise ValueError(f"pieces must cover a parcel once, got {leaf.pieces} at {leaf.path}")


def covers(leaf: Leaf) -> bool:
    """Whether pieces follow one another, or alternate, along one whole side."""
    axis, count = leaf.pieces[0].axis, len(leaf.pieces)
    side = leaf.parcel_shape[min(max(axis, 0), 1)]
    starts = itertools.accumulate((piece.size for piece in leaf.pieces), initial=0)
    rows = [Piece(axis, start, x.size) for start, x in zip(starts, leaf.pieces, strict=False)]
    follow = leaf.pieces == tuple(rows) and sum(x.size for x in leaf.pieces) == side
    turns = tuple(Piece(axis, i, side // count, count) for i in range(count))
    alternate = leaf.pieces == turns and side % count == 0
    sizes = min(piece.size for piece in leaf.pieces)
    return axis in (0, 1) and sizes > 0 and (follow or alternate)


def check_dtype(name: str, dtype: str) -> None:
    if dtype not in ITEMSIZE:
        raise ValueError(
            f"{name} must be one of {sorted(ITEMSIZE)}, got {dtype!r}"
        )
