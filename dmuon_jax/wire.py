"""Blocks as float16 on their way, each with an exponent: any range, the precision of one."""

import math

import jax
import jax.numpy as jnp

from dmuon_jax.layout import Side
from dmuon_jax.scales import power_of_two

NOTHING = -1000
"""Exponent that stands for a block of zeros; float16 holds it exactly."""


def encode(x: jax.Array, tops: jax.Array, block_ndim: int) -> jax.Array:
    """Blocks (the trailing dimensions) as float16, each with its exponent behind it.

    A block is divided by the power of two just above its largest entry, which is also the
    largest of *tops*; the exponent is an integer that float16 holds exactly.
    """
    lead = x.shape[: x.ndim - block_ndim]
    flat = x.reshape(*lead, math.prod(x.shape[len(lead) :]))
    flat = flat.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(tops.reshape(*lead, -1), axis=-1, keepdims=True)
    largest = largest.astype(flat.dtype)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1))
    exponent = jnp.where(largest == 0, NOTHING, exponent)
    small = power_of_two(flat, -jnp.where(largest == 0, 0, exponent))
    sent = jnp.concatenate([small, exponent.astype(flat.dtype)], axis=-1)
    return sent.astype(jnp.float16)


def decode(sent: jax.Array, side: Side) -> tuple[jax.Array, jax.Array]:
    """Undoes ``encode``: float16 blocks, and int32 exponents that broadcast with them."""
    block = side.block_shape
    blocks = sent[..., :-1].reshape(*sent.shape[:-1], *block)
    exponent = sent[..., -1].astype(jnp.int32)
    return blocks, exponent.reshape(*exponent.shape, *(1,) * len(block))


def align(sent: jax.Array, side: Side) -> tuple[jax.Array, jax.Array]:
    """Blocks with one exponent for each slot, still in float16, and those exponents.

    What falls below float16 in this is below 2^-24 of the parcel's largest entry.
    """
    blocks, exponent = decode(sent, side)
    ahead = tuple(range(blocks.ndim - len(side.dims) - 1))
    common = jnp.max(exponent, axis=ahead, keepdims=True)
    blocks = power_of_two(blocks.astype(jnp.float32), exponent - common)
    blocks = blocks.astype(jnp.float16)
    common = jnp.where(common == NOTHING, 0, common)
    return blocks, common.reshape(-1, 1, 1)
