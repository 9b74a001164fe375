"""Tile sizes of the Pallas kernels, and the order in which tiles are computed."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How one kernel is cut up; every number is a power of two, save the last two.

    Attributes:
      rows: Rows of the tile of the result one program computes; the sides of operands
        are zero-padded to multiples of it.
      columns: Its columns; at most *rows*.
      depth: Length of one slice of the contracted axis; at most *rows*.
      num_warps: Warps that compute (in Mosaic kernels, 4 to a warpgroup, which splits
        the rows; the warps that load are not counted).
      num_stages: Slices of the contracted axis in flight.
      supertile: Tiles are walked in squares of this many rows a side, whose operands
        then stay in the L2 cache.
    """

    rows: int
    columns: int
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3
    supertile: int = 8

    def __post_init__(self):
        for name in ("rows", "columns", "depth", "num_warps"):
            value = dataclasses.asdict(self)[name]
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        for name in ("columns", "depth"):
            value = dataclasses.asdict(self)[name]
            if value > self.rows:
                raise ValueError(f"{name} must be at most rows, got {value}")
        for name in ("num_stages", "supertile"):
            value = dataclasses.asdict(self)[name]
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def ratio(self) -> int:
        """How many tiles cover a square of *rows* by *rows*."""
        return self.rows // self.columns


@dataclasses.dataclass(frozen=True)
class ChainConfig:
    """How a whole iteration runs on chip: one matrix per program of *num_warps*."""

    num_warps: int

    def __post_init__(self):
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps must be a power of two, got {self.num_warps}")


def round_up(size: int, multiple: int) -> int:
    """The least multiple of *multiple* that is not below *size*."""
    return -(-size // multiple) * multiple


def next_power(size: int) -> int:
    """The least power of two that is not below *size*."""
    return 1 << (size - 1).bit_length()


def triangle_order(num_rows: int, config: TileConfig) -> np.ndarray:
    """The tiles that touch the lower triangle, supertile by supertile.

    Tile `(i, j)` lies wholly below the diagonal, and so has a mirror image that is no
    other tile, where `j < ratio * i`. The remaining tiles cover the diagonal.

    Args:
      num_rows: Number of rows of tiles.
      config: Gives the ratio of the tile's sides and the side of a supertile.

    Returns:
      int32 `[ratio * num_rows * (num_rows + 1) / 2, 2]`, pairs of row and column.
    """
    row, square = np.tril_indices(num_rows)
    row = np.repeat(row, config.ratio)
    square = np.repeat(square, config.ratio)
    column = config.ratio * square + np.arange(len(row)) % config.ratio
    side = config.supertile
    order = np.lexsort((column, row, square // side, row // side))
    return np.stack([row[order], column[order]], axis=1).astype(np.int32)
