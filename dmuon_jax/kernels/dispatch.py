"""Runs a choice: brings operands into the form its kernel wants, and back."""

import functools
from collections.abc import Callable
from types import ModuleType

import jax

from dmuon_jax.kernels.pallas_common import flatten_batch, pad_matrices
from dmuon_jax.kernels.select import INTERPRETED, Choice, Implementation
from dmuon_jax.kernels.tiles import next_power

_SMALLEST_SIDE = 32


def run(
    choice: Choice,
    implementation: Implementation,
    kernel: Callable[..., jax.Array],
    reference: Callable[..., jax.Array],
    *operands: jax.Array | None,
) -> jax.Array:
    """*kernel* of *operands* as *choice* says, or *reference*, the XLA version.

    A kernel that was not insisted on by name is lowered for CUDA only, so that the
    program still runs on other platforms.
    """
    if choice.implementation == "xla":
        return reference(*operands)
    kernel = functools.partial(kernel, choice)
    if isinstance(implementation, str) or _interpreted(choice):
        return kernel(*operands)
    return jax.lax.platform_dependent(*operands, cuda=kernel, default=reference)


def _module(choice: Choice) -> ModuleType:
    """The module with the tiled products; imported late, as few platforms can."""
    if choice.implementation == "pallas_mosaic_sm90":
        from dmuon_jax.kernels import pallas_mosaic_sm90

        return pallas_mosaic_sm90
    from dmuon_jax.kernels import pallas_triton

    return pallas_triton


def _interpreted(choice: Choice) -> bool:
    return choice.implementation == INTERPRETED


def gram(choice: Choice, x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """`x x^T` for any batch and size."""
    size = x.shape[-2]
    result = _module(choice).gram(
        pad_matrices(flatten_batch(x, 2), choice.tiles.rows, choice.tiles.rows),
        flatten_batch(valid, 0),
        choice.tiles,
        _interpreted(choice),
    )
    return result[:, :size, :size].reshape(*x.shape[:-1], size)


def symmetric_matmul(
    choice: Choice,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None,
    coefficients: jax.Array,
    valid: jax.Array | None,
) -> jax.Array:
    """`alpha a b + beta c + gamma I` for any batch and size."""
    size = a.shape[-1]
    rows = choice.tiles.rows
    padded = (pad_matrices(flatten_batch(x, 2), rows, rows) for x in (a, b, c))
    result = _module(choice).symmetric_matmul(
        *padded,
        coefficients,
        flatten_batch(valid, 0),
        choice.tiles,
        _interpreted(choice),
    )
    return result[:, :size, :size].reshape(a.shape)


def chain(
    choice: Choice,
    x: jax.Array,
    coefficients: jax.Array,
    valid: jax.Array | None,
    *,
    name: str,
) -> jax.Array:
    """The on-chip iteration *name* for any batch."""
    from dmuon_jax.kernels import pallas_triton_small

    functions = {
        "polynomial_chain": pallas_triton_small.polynomial_chain,
        "direct_chain": pallas_triton_small.direct_chain,
    }
    rows, columns = (max(_SMALLEST_SIDE, next_power(size)) for size in x.shape[-2:])
    result = functions[name](
        pad_matrices(flatten_batch(x, 2), rows, columns),
        coefficients,
        flatten_batch(valid, 0),
        choice.chain.num_warps,
        _interpreted(choice),
    )
    return result[:, : x.shape[-2], : x.shape[-1]].reshape(x.shape)
