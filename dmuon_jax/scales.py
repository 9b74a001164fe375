"""Powers of two that bring arrays into range: exact, and safe at both ends."""

import jax
import jax.numpy as jnp


def power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2^exponent``, exactly unless the result leaves the range of *x*'s dtype.

    Two factors, since 2^exponent alone may leave that range. They are made of bits and
    have the shape of *exponent*, so that what is done to each entry of x is two products.
    """
    half = exponent // 2
    return x * exact_power(half, x.dtype) * exact_power(exponent - half, x.dtype)


def exact_power(exponent: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``2^exponent`` in a floating dtype, the exponent cut to that of normal numbers."""
    info = jnp.finfo(dtype)
    integer = jnp.dtype(f"int{info.bits}")
    kept = jnp.clip(exponent, info.minexp, info.maxexp - 1).astype(integer)
    bits = (kept + (info.maxexp - 1)) << info.nmant
    return jax.lax.bitcast_convert_type(bits, dtype)


def frobenius(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norm of each matrix ``[..., m, n]`` as ``y * 2^e``, whatever its size.

    One pass: squares are summed at three scales, of which one neither overflows nor loses
    what matters. Accurate for norms down to about the least normal number.

    Returns:
      y, real, and int32 e, both ``[..., 1, 1]``.
    """
    size = jnp.abs(x)
    top = jnp.finfo(size.dtype).maxexp
    shift = top * 45 // 64

    def total(exponent):
        part = power_of_two(size, jnp.full((), exponent, jnp.int32))
        return jnp.sum(part**2, axis=(-2, -1), keepdims=True)

    small, middle, large = total(shift), total(0), total(-shift)
    is_small = middle < 2.0 ** -(top * 15 // 32)
    is_large = jnp.isinf(middle)
    square = jnp.where(is_small, small, jnp.where(is_large, large, middle))
    exponent = jnp.where(is_small, -shift, jnp.where(is_large, shift, 0))
    return jnp.sqrt(square), exponent


def restored(x: jax.Array, exponent: jax.Array | None) -> jax.Array:
    """``x * 2^exponent``, in float32 at least; ``x`` itself where there is no exponent."""
    if exponent is None:
        return x
    return power_of_two(x.astype(jnp.promote_types(x.dtype, jnp.float32)), exponent)
