"""Products with symmetric results through Pallas-Triton (sm_80, sm_90, sm_100).

Each program computes one tile that touches the lower triangle, and stores it and its
mirror image. Operands have one batch dimension and sides that are multiples of the
tile's rows.

Roofline: an `s x s` product of depth `l` costs `s^2 l (1 + rows / s)` FLOPs, half of a
full product's for many tiles, and moves at least `2 s (l + s)` bytes. Tiles of
128 x 128 do 64 FLOPs per byte read through L2, those of 64 x 64 half of that.
"""

import functools
from typing import Any

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
    valid: Any = refs.pop(0) if flags else None
    coefficients: Any = None if is_gram else refs.pop(0)
    a, b = refs.pop(0), refs.pop(0)
    c: Any = refs.pop(0) if has_c else None
    (d,) = refs

    slot = pl.program_id(1)
    i, j = order[pl.program_id(0), 0], order[pl.program_id(0), 1]
    shape = (config.rows, config.columns)
    rows = pl.ds(i * config.rows, config.rows)
    columns = pl.ds(j * config.columns, config.columns)

    def accumulate(k, total):
        depth = pl.ds(k * config.depth, config.depth)
        right = b[slot, columns, depth].T if is_gram else b[slot, depth, columns]
        return total + _dot(a[slot, rows, depth], right)

    def epilogue(tile):
        tile *= coefficients[0]
        if has_c:
            tile += coefficients[1] * c[slot, rows, columns].astype(jnp.float32)
        row = i * config.rows + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        column = j * config.columns + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        return tile + jnp.where(row == column, coefficients[2], 0.0)

    def store(tile):
        d[slot, rows, columns] = tile

        @pl.when(j < config.ratio * i)
        def _():
            d[slot, columns, rows] = tile.T

    def compute():
        tile = jax.lax.fori_loop(
            0, a.shape[2] // config.depth, accumulate, jnp.zeros(shape, jnp.float32)
        )
        store((tile if is_gram else epilogue(tile)).astype(d.dtype))

    if not flags:
        compute()
        return
    pl.when(valid[slot] != 0)(compute)
    pl.when(valid[slot] == 0)(lambda: store(jnp.zeros(shape, d.dtype)))


@functools.partial(jax.jit, static_argnames=("config", "is_gram", "interpret"))
def _product(a, b, c, coefficients, valid, *, config, is_gram, interpret):
    batch, size, _ = a.shape
    order = triangle_order(size // config.rows, config)
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
    """`x @ x^T` for 16-bit `[batch, s, l]`, s and l multiples of the tile's rows."""
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
    """`alpha a b + beta c + gamma I` for 16-bit `[batch, s, s]`, s such a multiple."""
    return _product(
        a, b, c, coefficients, valid, config=config, is_gram=False, interpret=interpret
    )
