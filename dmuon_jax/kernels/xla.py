"""Plain JAX versions of every kernel: they run everywhere and judge the others.

All of them accumulate in at least fp32 and round once, to the dtype of their first
operand. Operands of 32 bits and more are multiplied at `Precision.HIGHEST`, so that
neither TF32 (GPU) nor bf16 passes (TPU) enter.
"""

import jax
import jax.numpy as jnp


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype sums are held in: fp32, or *dtype* itself where that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b` left in the accumulator's dtype."""
    wide = jnp.finfo(a.dtype).bits >= 32
    return jnp.matmul(
        a,
        b,
        precision=jax.lax.Precision.HIGHEST if wide else None,
        preferred_element_type=accumulator_dtype(a.dtype),
    )


def keep_valid(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """*x* with zeros in the slots that *valid* (bool, the batch shape) excludes."""
    if valid is None:
        return x
    return jnp.where(valid[..., None, None], x, jnp.zeros((), x.dtype))


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b` for `[..., p, q]` and `[..., q, r]`, in the dtype of *a*."""
    return multiply(a, b).astype(a.dtype)


def gram(x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """`x @ x^H` for `[..., s, l]`: `[..., s, s]`."""
    return keep_valid(matmul(x, jnp.matrix_transpose(x).conj()), valid)


def symmetric_matmul(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None,
    coefficients: jax.Array,
    valid: jax.Array | None = None,
) -> jax.Array:
    """`alpha * a @ b + beta * c + gamma * I` for `[..., s, s]` operands."""
    wide = accumulator_dtype(a.dtype)
    alpha, beta, gamma = coefficients.astype(wide)
    result = alpha * multiply(a, b)
    if c is not None:
        result += beta * c.astype(wide)
    result += gamma * jnp.eye(a.shape[-1], dtype=wide)
    return keep_valid(result.astype(a.dtype), valid)


def polynomial_chain(
    r: jax.Array, coefficients: jax.Array, valid: jax.Array | None = None
) -> jax.Array:
    """`Q` after the steps of the Gram iteration, from `Q = I` and the Gram matrix *r*.

    With `p(R) = a I + b R + c R^2` and one row `a, b, c` of *coefficients*
    (`[steps, 3]`) for each step: `Q <- Q p(R)`, `R <- p(R) R p(R)`. Evaluated through
    `Z = b R + c R^2`, which keeps the large term `a` out of the rounding of factors.
    """
    steps = coefficients.shape[0]
    zero = jnp.zeros((), jnp.float32)
    q = None
    for index in range(steps):
        a, b, c = coefficients[index].astype(jnp.float32)
        add = jnp.stack([zero + 1, a, zero])
        z = symmetric_matmul(r, r, r, jnp.stack([c, b, zero]))
        if q is None:
            q = z + (a * jnp.eye(r.shape[-1])).astype(r.dtype)
        else:
            q = symmetric_matmul(q, z, q, add)
        if index < steps - 1:
            rz = symmetric_matmul(r, z, r, add)
            r = symmetric_matmul(rz, z, rz, add)
    return keep_valid(q, valid)


def direct_chain(
    x: jax.Array,
    coefficients: jax.Array,
    valid: jax.Array | None = None,
) -> jax.Array:
    """*x* after the steps of the direct iteration, `X <- a X + (b A + c A^2) X`.

    `A = X X^H`, with one row `a, b, c` of *coefficients* (`[steps, 3]`) for each step.
    """
    zero = jnp.zeros((), jnp.float32)
    wide = accumulator_dtype(x.dtype)
    for index in range(coefficients.shape[0]):
        a, b, c = coefficients[index].astype(jnp.float32)
        gram_x = gram(x)
        z = symmetric_matmul(gram_x, gram_x, gram_x, jnp.stack([c, b, zero]))
        x = (a * x.astype(wide) + multiply(z, x)).astype(x.dtype)
    return keep_valid(x, valid)
