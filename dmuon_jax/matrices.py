"""Matrices: what a leaf holds, told in static integers. No arrays, no devices.

A *leaf* of a parameter tree has reduction axes, output axes and batch axes (all others).
It holds ``prod(batch)`` *parcels*, each one logical ``(reduction, output)`` matrix. A parcel
is orthogonalized whole, or cut into *pieces* first where a fused weight is split.
"""

import dataclasses
import math
from collections.abc import Sequence

Axes = tuple[str, ...]
"""Mesh axis names, major to minor."""

Spec = tuple[Axes, ...]
"""For each dimension of an array, the mesh axes that shard it."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the axes of a mesh, without its devices."""

    names: Axes
    sizes: tuple[int, ...]

    def __post_init__(self):
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(
            self.names
        ):
            raise ValueError(
                "a mesh must have one size for each of its distinct axis names, got "
                f"names={self.names} sizes={self.sizes}"
            )

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        """Product of the sizes of ``axes``."""
        table = dict(zip(self.names, self.sizes, strict=True))
        return math.prod(table[name] for name in axes)

    def ordered(self, axes) -> Axes:
        """``axes`` in mesh order."""
        return tuple(name for name in self.names if name in axes)

    def coordinates(self, device: int) -> dict[str, int]:
        """Coordinates of the ``device``-th device, row-major over the mesh."""
        found = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            device, found[name] = divmod(device, size)
        return found

    def index(self, coordinates: dict[str, int], axes: Sequence[str]) -> int:
        """Row-major index over ``axes`` of the device at ``coordinates``."""
        index = 0
        for name in axes:
            index = index * self.size((name,)) + coordinates[name]
        return index


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a parcel that is a matrix of its own: strided rows or columns.

    Attributes:
      axis: 0 cuts the (flattened) reduction dimension, 1 the output dimension.
      start: first row or column.
      size: number of rows or columns.
      stride: distance between them (2 for interleaved gate and up).
    """

    axis: int
    start: int
    size: int
    stride: int = 1


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the tree that Muon updates.

    Attributes:
      path: where it sits, as ``jax.tree_util.keystr`` writes it.
      shape: logical (global) shape.
      dtype: name of its dtype.
      reduction_axes: dimensions that are summed over in ``x @ W``, non-negative.
      output_axes: dimensions of the result, non-negative.
      spec_in: sharding of its momentum.
      spec_out: sharding of the parameter, and so of the update.
      pieces: parts orthogonalized on their own; empty means the parcel is one matrix.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    reduction_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    spec_in: Spec
    spec_out: Spec
    pieces: tuple[Piece, ...] = ()

    @property
    def batch_axes(self) -> tuple[int, ...]:
        matrix = self.reduction_axes + self.output_axes
        return tuple(axis for axis in range(len(self.shape)) if axis not in matrix)

    @property
    def num_parcels(self) -> int:
        return math.prod(self.shape[axis] for axis in self.batch_axes)

    @property
    def parcel_shape(self) -> tuple[int, int]:
        """(fan_in, fan_out)."""
        return (
            math.prod(self.shape[axis] for axis in self.reduction_axes),
            math.prod(self.shape[axis] for axis in self.output_axes),
        )

    @property
    def matrix_shapes(self) -> tuple[tuple[int, int], ...]:
        """(reduction, output) shape of each matrix of one parcel."""
        fan_in, fan_out = self.parcel_shape
        if not self.pieces:
            return ((fan_in, fan_out),)
        return tuple(
            (piece.size, fan_out) if piece.axis == 0 else (fan_in, piece.size)
            for piece in self.pieces
        )


def oriented(shape: tuple[int, int]) -> tuple[int, int]:
    """``shape`` with the short side first."""
    return min(shape), max(shape)


def normalize_axes(
    ndim: int, reduction_axis, output_axis, *, path: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Non-negative reduction and output axes of a leaf with ``ndim`` dimensions.

    Args:
      ndim: number of dimensions.
      reduction_axis: an int or a sequence of ints, negative ones count from the end.
      output_axis: likewise.
      path: where the leaf sits, for the error.

    Raises:
      ValueError: if the leaf has fewer than two dimensions, an axis is out of range or
        repeated, or the two sets meet.
    """
    if ndim < 2:
        raise ValueError(
            f"a leaf updated by Muon must have at least 2 dimensions, got {ndim} at {path}"
        )
    found = []
    for name, axes in (
        ("reduction_axis", reduction_axis),
        ("output_axis", output_axis),
    ):
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        if not axes or any(not -ndim <= axis < ndim for axis in axes):
            raise ValueError(
                f"{name} must name dimensions of a {ndim}-dimensional leaf, got {axes} "
                f"at {path}"
            )
        found.append(tuple(axis % ndim for axis in axes))
    reduction, output = found
    if len(set(reduction + output)) != len(reduction) + len(output):
        raise ValueError(
            "reduction and output axes must be distinct, got "
            f"reduction={reduction} output={output} at {path}"
        )
    return reduction, output
