"""Powers of two that bring arrays into range: exact, and safe at both ends."""

import jax
import jax.numpy as jnp


def power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2^exponent``, in two factors since 2^exponent alone may leave the range."""
    half = exponent // 2
    return jnp.ldexp(jnp.ldexp(x, half), exponent - half)


def scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each matrix ``[..., m, n]`` as ``y * 2^e`` with its largest entry in [1/2, 1).

    Returns:
      y in the dtype of x, and int32 e ``[..., 1, 1]``; 0 for matrices that are zero or not
      finite, which come back as they are.
    """
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    usable = jnp.isfinite(largest) & (largest > 0)
    _, exponent = jnp.frexp(jnp.where(usable, largest, 1))
    exponent = jnp.where(usable, exponent, 0)
    if jnp.iscomplexobj(x):
        y = jax.lax.complex(
            power_of_two(x.real, -exponent), power_of_two(x.imag, -exponent)
        )
        return y, exponent
    return power_of_two(x, -exponent), exponent


def restored(x: jax.Array, exponent: jax.Array | None) -> jax.Array:
    """``x * 2^exponent``, in float32 at least; ``x`` itself where there is no exponent."""
    if exponent is None:
        return x
    return power_of_two(x.astype(jnp.promote_types(x.dtype, jnp.float32)), exponent)
