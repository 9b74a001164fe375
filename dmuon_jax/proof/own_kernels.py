"""FLOPs of this package's Pallas kernels, from the shapes that a program's text shows.

The kernels compute the tiles of a symmetric product that touch its lower triangle; the
list of those tiles is an operand ``s32[tiles, 2]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dmuon_jax.proof.hlo import Shape

KernelFlops = Callable[[Sequence[Shape], Shape], float]


def computed_share(operands: Sequence[Shape]) -> float:
    """Share of a square product that `T = n (n + 1) / 2` of its `n^2` tiles are."""
    lists = [x for x in operands if x.dtype == "s32" and len(x.dims) == 2]
    if not lists:
        return 0.5
    tiles = lists[0].dims[0]
    rows = math.isqrt(2 * tiles)
    return tiles / rows**2 if rows * (rows + 1) == 2 * tiles else 0.5


def stacks(operands: Sequence[Shape]) -> list[Shape]:
    """The operands that are batches of matrices."""
    return [shape for shape in operands if len(shape.dims) == 3]


def product_flops(operands: Sequence[Shape], result: Shape) -> float:
    """One symmetric product of [batch, s, k] and its partner."""
    length = stacks(operands)[0].dims[-1]
    return 2.0 * result.size * length * computed_share(operands)


def steps_of(operands: Sequence[Shape]) -> int:
    """Iterations, as many as there are rows of three coefficients."""
    return next(x.dims[0] for x in operands if len(x.dims) == 2 and x.dims[1] == 3)


def polynomial_flops(operands: Sequence[Shape], result: Shape) -> float:
    """Four products of s x s a step."""
    batch, short, _ = result.dims
    return 8.0 * steps_of(operands) * batch * short**3


def direct_flops(operands: Sequence[Shape], result: Shape) -> float:
    """Two products of s x s x l and one of s x s x s a step."""
    batch, short, long = result.dims
    return steps_of(operands) * batch * (4.0 * short**2 * long + 2.0 * short**3)


OWN_KERNELS: dict[str, KernelFlops] = {
    "/gram/": product_flops,
    "/symmetric_matmul/": product_flops,
    "/polynomial_kernel/": polynomial_flops,
    "/direct_kernel/": direct_flops,
}
