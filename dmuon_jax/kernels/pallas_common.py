"""What the Pallas kernels share: types of results under shard_map, and padding."""

from typing import overload

import jax
import jax.numpy as jnp

from dmuon_jax.kernels.tiles import round_up


def varying_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """*arrays*, each varying over every manual mesh axis that one of them varies over.

    Pallas calls, unlike JAX's own operations, do not do this by themselves.
    """
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    union = frozenset().union(*axes)
    return tuple(
        jax.lax.pcast(array, tuple(sorted(union - have)), to="varying")
        if union - have
        else array
        for array, have in zip(arrays, axes, strict=True)
    )


def result_like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result: the dtype and varying axes of the operand *x*."""
    return jax.ShapeDtypeStruct(
        shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type
    )


def flatten_batch(x: jax.Array | None, kept: int) -> jax.Array | None:
    """*x* with its leading dimensions, all but the last *kept*, made one."""
    if x is None:
        return None
    return x.reshape(-1, *x.shape[x.ndim - kept :])


@overload
def pad_matrices(x: jax.Array, rows: int, columns: int) -> jax.Array: ...
@overload
def pad_matrices(x: None, rows: int, columns: int) -> None: ...
def pad_matrices(x: jax.Array | None, rows: int, columns: int) -> jax.Array | None:
    """*x* `[batch, p, q]`, zeros added up to multiples of *rows* and of *columns*."""
    if x is None:
        return None
    widths = [
        (0, round_up(size, multiple) - size)
        for size, multiple in zip(x.shape, (1, rows, columns), strict=True)
    ]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x
