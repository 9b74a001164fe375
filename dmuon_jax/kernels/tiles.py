"""Tile sizes of the Pallas kernels, and the order in which tiles are computed."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How one kernel is cut up.

    Attributes:
      block: Side of the square tile of the result one program computes; shapes are
        zero-padded to multiples of it.
      block_k: Length of one slice of the contracted axis; must divide `block` or be a
        multiple of it, so that padding to *pad_multiple* suits both.
      num_warps: Warps per program (Triton).
      num_stages: Slices of the contracted axis in flight.
      supertile: Tiles are walked in squares of this many tiles a side, whose operands
        then stay in the L2 cache.
    """

    block: int
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    supertile: int = 8

    def __post_init__(self):
        for name in ("block", "block_k", "num_warps"):
            value = dataclasses.asdict(self)[name]
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        for name in ("num_stages", "supertile"):
            value = dataclasses.asdict(self)[name]
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def pad_multiple(self) -> int:
        """What the sides of an operand must be multiples of."""
        return max(self.block, self.block_k)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of *multiple* that is not below *size*."""
    return -(-size // multiple) * multiple


def triangle_order(num_rows: int, supertile: int) -> np.ndarray:
    """The tiles on and below the diagonal, supertile by supertile.

    Args:
      num_rows: Number of tiles along one side of the matrix.
      supertile: Number of tiles along one side of a supertile.

    Returns:
      int32 `[num_rows * (num_rows + 1) / 2, 2]`, pairs `row >= column`.
    """
    row, column = np.tril_indices(num_rows)
    order = np.lexsort((column, row, column // supertile, row // supertile))
    return np.stack([row[order], column[order]], axis=1).astype(np.int32)
