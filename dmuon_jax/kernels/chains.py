"""Whole Newton-Schulz iterations, written over any implementation of the products."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dmuon_jax.kernels import xla

Gram = Callable[[jax.Array], jax.Array]
SymmetricMatmul = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def polynomial_chain(
    r: jax.Array, coefficients: jax.Array, symmetric_matmul: SymmetricMatmul
) -> jax.Array:
    """`Q` after the steps of the Gram iteration, from `Q = I` and the Gram matrix *r*.

    With `p(R) = a I + b R + c R^2` and one row `a, b, c` of *coefficients*
    (`[steps, 3]`) for each step: `Q <- Q p(R)`, `R <- p(R) R p(R)`. Evaluated through
    `Z = b R + c R^2`, which keeps the large term `a` out of the rounding of factors.
    The first product with `Q` and the last `R` are not needed, so not computed.
    """
    zero, one = jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
    steps = coefficients.shape[0]
    q = None
    for index in range(steps):
        a, b, c = coefficients[index].astype(jnp.float32)
        add = jnp.stack([one, a, zero])
        z = symmetric_matmul(r, r, r, jnp.stack([c, b, zero]))
        if q is None:
            q = z + (a * jnp.eye(r.shape[-1], dtype=jnp.float32)).astype(r.dtype)
        else:
            q = symmetric_matmul(q, z, q, add)
        if index < steps - 1:
            rz = symmetric_matmul(r, z, r, add)
            r = symmetric_matmul(rz, z, rz, add)
    if q is None:
        raise ValueError(f"coefficients must have a row, got {coefficients.shape}")
    return q


def direct_chain(
    x: jax.Array,
    coefficients: jax.Array,
    gram: Gram,
    symmetric_matmul: SymmetricMatmul,
) -> jax.Array:
    """*x* after the steps of the direct iteration, `X <- a X + (b A + c A^2) X`.

    `A = X X^H`, with one row `a, b, c` of *coefficients* (`[steps, 3]`) for each step.
    """
    zero = jnp.zeros((), jnp.float32)
    for index in range(coefficients.shape[0]):
        a, b, c = coefficients[index].astype(jnp.float32)
        r = gram(x)
        z = symmetric_matmul(r, r, r, jnp.stack([c, b, zero]))
        x = xla.multiply_add(a, x, z, x)
    return x
