"""Scale of an update from the shape of its matrix."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dmuon_jax.routing import matrix_dimensions
from dmuon_jax.split import scale_array


def shape_scale(
    fan_in: int, fan_out: int, consistent_rms: jax.typing.ArrayLike | None
) -> jax.typing.ArrayLike:
    """Factor of a ``(fan_in, fan_out)`` matrix.

    ``sqrt(max(1, fan_out / fan_in))`` (K. Jordan, Muon, 2024), or with a number c for
    ``consistent_rms``, ``c * sqrt(max(fan_in, fan_out))`` (arXiv 2502.16982, eq. 4).
    """
    if consistent_rms is None:
        return math.sqrt(max(1.0, fan_out / fan_in))
    return consistent_rms * math.sqrt(max(fan_in, fan_out))


def scale_by_matrix_shape(
    dimensions: Callable[[Any], Any],
    consistent_rms: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformation:
    """Scales each leaf by its ``shape_scale``; has no state.

    Args:
      dimensions: from a tree of leaves to a tree of ``MuonDimensionNumbers``.
      consistent_rms: see ``shape_scale``.
    """

    def scale(fan_in, fan_out):
        return shape_scale(fan_in, fan_out, consistent_rms)

    def update_fn(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        dims = matrix_dimensions(dimensions, updates)
        scaled = [
            multiply(x, scale_array(dim, x.shape, scale))
            for x, dim in zip(leaves, dims, strict=True)
        ]
        return treedef.unflatten(scaled), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def multiply(x: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """``x * factor`` in the dtype and sharding of ``x``."""
    factor = jnp.asarray(factor).astype(x.dtype)
    if factor.ndim:
        factor = jnp.zeros_like(x) + jnp.broadcast_to(factor, x.shape)
    return x * factor
