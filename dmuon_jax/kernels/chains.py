"""Whole Newton-Schulz iterations, written over any implementation of the products."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dmuon_jax.kernels import xla

Gram = Callable[[jax.Array], jax.Array]
SymmetricMatmul = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def polynomial_chain(
    r: jax.Array,
    coefficients: jax.Array,
    symmetric_matmul: SymmetricMatmul,
    valid: jax.Array | None = None,
) -> jax.Array:
    """`Q` after the steps of the Gram iteration, from `Q = I` and the Gram matrix *r*.

    With `p(R) = a I + b R + c R^2` and one row `a, b, c` of *coefficients*
    (`[steps, 3]`) for each step: `Q <- Q p(R)`, `R <- p(R) R p(R)`. Evaluated through
    `Z = b R + c R^2`, which keeps the large term `a` out of the rounding of factors.
    The first product with `Q` and the last `R` are not needed, so not computed. Slots
    that *valid* excludes give zeros, as *symmetric_matmul* must by itself.
    """
    wide = xla.accumulator_dtype(jnp.finfo(r.dtype).dtype)
    zero, one = jnp.zeros((), wide), jnp.ones((), wide)
    steps = coefficients.shape[0]
    q = None
    for index in range(steps):
        a, b, c = coefficients[index].astype(wide)
        add = jnp.stack([one, a, zero])
        z = symmetric_matmul(r, r, r, jnp.stack([c, b, zero]))
        if q is None:
            q = z + (a * jnp.eye(r.shape[-1], dtype=wide)).astype(r.dtype)
            q = xla.keep_valid(q, valid)
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
    valid: jax.Array | None = None,
) -> jax.Array:
    """*x* after the steps of the direct iteration, `X <- a X + (b A + c A^2) X`.

    `A = X X^H`, with one row `a, b, c` of *coefficients* (`[steps, 3]`) for each step.
    In 16 bits `a` goes onto the diagonal of the factor: a sum after the product would
    be one more pass over X, with X kept in fp32, and is no more accurate there. Wider
    matrices keep the sum, in a loop: unrolled, XLA sums up anew from the first step on.
    """
    is_narrow = jnp.finfo(x.dtype).bits < 32

    def step(x, row):
        a, b, c = row
        diagonal = a if is_narrow else jnp.zeros_like(a)
        r = gram(x)
        z = symmetric_matmul(r, r, r, jnp.stack([c, b, diagonal]))
        return xla.matmul(z, x) if is_narrow else xla.multiply_add(a, x, z, x)

    x = xla.keep_valid(x, valid)
    wide = xla.accumulator_dtype(jnp.finfo(x.dtype).dtype)
    coefficients = coefficients.astype(wide)
    if not is_narrow:
        return jax.lax.scan(lambda x, row: (step(x, row), None), x, coefficients)[0]
    for row in coefficients:
        x = step(x, row)
    return x
