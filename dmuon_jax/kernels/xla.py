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


def multiply_add(
    scale: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
    """`a @ b + scale * x`, rounded once to the dtype of *x*."""
    return (multiply(a, b) + scale * x.astype(accumulator_dtype(x.dtype))).astype(
        x.dtype
    )


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
