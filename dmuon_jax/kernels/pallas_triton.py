"""Products with symmetric results through Pallas-Triton (sm_80, sm_90, sm_100).

Each program computes one tile on or below the diagonal and stores it and its mirror
image. Operands have one batch dimension and sides that are multiples of the tile's.

Roofline: an `s x s` product of depth `l` costs `s^2 l (1 + block / s)` FLOPs, half of a
full product's `2 s^2 l` for many tiles, and moves at least `2 s (l + s)` bytes. Tiles of
128 do 64 FLOPs per byte read through L2, those of 64 half of that.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dmuon_jax.kernels.pallas_common import result_like, varying_together
from dmuon_jax.kernels.tiles import TileConfig, triangle_order


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _product_kernel(*refs, config: TileConfig, is_gram: bool, has_c: bool, flags: bool):
    """One tile of `x x^T` (*is_gram*) or of `alpha a b + beta c + gamma I`."""
    refs = list(refs)
    order = refs.pop(0)
    valid = refs.pop(0) if flags else None
    coefficients = None if is_gram else refs.pop(0)
    a, b = refs.pop(0), refs.pop(0)
    c = refs.pop(0) if has_c else None
    (d,) = refs

    step, slot = pl.program_id(0), pl.program_id(1)
    i, j = order[step, 0], order[step, 1]
    rows = pl.ds(i * config.block, config.block)
    columns = pl.ds(j * config.block, config.block)

    def accumulate(k, total):
        depth = pl.ds(k * config.block_k, config.block_k)
        right = b[slot, columns, depth].T if is_gram else b[slot, depth, columns]
        return total + _dot(a[slot, rows, depth], right)

    def store(tile):
        d[slot, rows, columns] = tile

        @pl.when(i != j)
        def _():
            d[slot, columns, rows] = tile.T

    def compute():
        shape = (config.block, config.block)
        tile = jax.lax.fori_loop(
            0, a.shape[2] // config.block_k, accumulate, jnp.zeros(shape, jnp.float32)
        )
        if not is_gram:
            tile *= coefficients[0]
            if has_c:
                tile += coefficients[1] * c[slot, rows, columns].astype(jnp.float32)
            row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            diagonal = jnp.where(i == j, coefficients[2], 0.0)
            tile += jnp.where(row == column, diagonal, 0.0)
        store(tile.astype(d.dtype))

    if not flags:
        compute()
        return
    pl.when(valid[slot] != 0)(compute)

    @pl.when(valid[slot] == 0)
    def _():
        store(jnp.zeros((config.block, config.block), d.dtype))


@functools.partial(jax.jit, static_argnames=("config", "is_gram", "interpret"))
def _product(a, b, c, coefficients, valid, *, config, is_gram, interpret):
    batch, size, _ = a.shape
    order = triangle_order(size // config.block, config.supertile)
    operands = [jnp.asarray(order)]
    if valid is not None:
        operands.append(valid.astype(jnp.int32))
    if not is_gram:
        operands.append(coefficients.astype(jnp.float32))
    operands += [a, b] if c is None else [a, b, c]
    operands = varying_together(*operands)
    kernel = functools.partial(
        _product_kernel,
        config=config,
        is_gram=is_gram,
        has_c=c is not None,
        flags=valid is not None,
    )
    return pl.pallas_call(
        kernel,
        out_shape=result_like(operands[-1], (batch, size, size)),
        grid=(len(order), batch),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="gram" if is_gram else "symmetric_matmul",
    )(*operands)


def gram(
    x: jax.Array,
    valid: jax.Array | None,
    config: TileConfig,
    interpret: bool = False,
) -> jax.Array:
    """`x @ x^T` for 16-bit *x* `[batch, s, l]`, s and l multiples of the tile's sides."""
    return _product(
        x, x, None, None, valid, config=config, is_gram=True, interpret=interpret
    )


def symmetric_matmul(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None,
    coefficients: jax.Array,
    valid: jax.Array | None,
    config: TileConfig,
    interpret: bool = False,
) -> jax.Array:
    """`alpha a b + beta c + gamma I` for 16-bit `[batch, s, s]`, s a tile multiple."""
    return _product(
        a, b, c, coefficients, valid, config=config, is_gram=False, interpret=interpret
    )
