"""``Split``: a fused weight whose parts are matrices of their own."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

from dmuon_jax.matrices import Piece, normalize_axes


@dataclasses.dataclass(frozen=True)
class Split:
    """Dimension numbers of a leaf whose matrices are cut into parts before Newton-Schulz.

    Each part has its own norm and its own shape scale. Stands wherever a
    ``MuonDimensionNumbers`` does.

    Example:
      >>> qkv = Split((2048, 512, 512))                  # [q | k | v], unequal columns
      >>> gate_up = Split(2)                             # [gate | up], contiguous
      >>> alternating = Split(2, interleaved=True)       # g0, u0, g1, u1, ...
      >>> heads = Split(8, MuonDimensionNumbers(0, (1, 2)))  # (D, 8, head_dim), per head

    Attributes:
      parts: sizes of the parts along the flattened axis, or a number of equal parts.
      dimension_numbers: matrix axes of the leaf.
      axis: which flattened axis is cut.
      interleaved: whether equal parts alternate instead of following one another.
    """

    parts: int | tuple[int, ...]
    dimension_numbers: MuonDimensionNumbers = MuonDimensionNumbers()
    axis: Literal["reduction", "output"] = "output"
    interleaved: bool = False

    def __post_init__(self):
        sizes = self.parts if isinstance(self.parts, tuple | list) else (self.parts,)
        if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(f"parts must be positive integers, got {self.parts}")
        if self.axis not in ("reduction", "output"):
            raise ValueError(f"axis must be 'reduction' or 'output', got {self.axis!r}")
        if self.interleaved and not isinstance(self.parts, int):
            raise ValueError(
                f"parts must be a number where they are interleaved, got {self.parts}"
            )


Dimensions = MuonDimensionNumbers | Split


def matrix_axes(
    dims: Dimensions, ndim: int, path: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Non-negative reduction and output axes; raises as ``normalize_axes``."""
    numbers = dims.dimension_numbers if isinstance(dims, Split) else dims
    return normalize_axes(ndim, *numbers, path=path)


def pieces_of(dims: Dimensions, shape: tuple[int, ...], path: str) -> tuple[Piece, ...]:
    """The pieces that cover each matrix of a leaf; none if it is not split.

    Raises:
      ValueError: if the parts do not add up to the dimension.
    """
    if not isinstance(dims, Split):
        return ()
    axis = 0 if dims.axis == "reduction" else 1
    size = math.prod(shape[a] for a in matrix_axes(dims, len(shape), path)[axis])
    if not isinstance(dims.parts, int):
        if sum(dims.parts) != size:
            raise ValueError(
                f"parts must add up to the {dims.axis} dimension {size}, got {dims.parts} "
                f"at {path}"
            )
        starts = np.cumsum((0, *dims.parts[:-1])).tolist()
        return tuple(Piece(axis, a, n) for a, n in zip(starts, dims.parts, strict=True))
    if size % dims.parts:
        raise ValueError(
            f"parts must divide the {dims.axis} dimension {size}, got {dims.parts} at {path}"
        )
    count, each = dims.parts, size // dims.parts
    if dims.interleaved:
        return tuple(Piece(axis, i, each, count) for i in range(count))
    return tuple(Piece(axis, i * each, each) for i in range(count))


def scale_array(
    dims: Dimensions, shape: tuple[int, ...], scale: Any
) -> jax.typing.ArrayLike:
    """What a leaf is multiplied by: ``scale(fan_in, fan_out)`` of the matrix of each entry.

    Returns:
      One number, or for a split leaf an array that broadcasts along the axis cut.
    """
    axes = matrix_axes(dims, len(shape), "a leaf")
    fans = [math.prod(shape[a] for a in group) for group in axes]
    pieces = pieces_of(dims, shape, "a leaf")
    if not pieces:
        return scale(*fans)
    cut = pieces[0].axis
    row = np.zeros(fans[cut], np.int32)
    factors = []
    for number, piece in enumerate(pieces):
        row[piece.start :: piece.stride][: piece.size] = number
        part = list(fans)
        part[cut] = piece.size
        factors.append(scale(*part))
    values = jnp.stack([jnp.asarray(f, jnp.float32) for f in factors])[row]
    order = np.argsort(axes[cut])
    values = values.reshape([shape[a] for a in axes[cut]]).transpose(order)
    return values.reshape([n if a in axes[cut] else 1 for a, n in enumerate(shape)])
