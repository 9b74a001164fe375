"""Scale of an update from the shape of its matrix."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dmuon_jax.matrices import normalize_axes
from dmuon_jax.routing import leaf_dimensions


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

    def update_fn(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        scaled = [
            x * jnp.asarray(scale_of(x.shape, dim, consistent_rms)).astype(x.dtype)
            for x, dim in zip(leaves, leaf_dimensions(dimensions, updates), strict=True)
        ]
        return treedef.unflatten(scaled), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def scale_of(
    shape: tuple[int, ...], dim: Any, consistent_rms: jax.typing.ArrayLike | None
) -> jax.typing.ArrayLike:
    """The factor of a leaf."""
    reduction, output = normalize_axes(len(shape), *dim, path="a leaf")
    fan_in = math.prod(shape[axis] for axis in reduction)
    fan_out = math.prod(shape[axis] for axis in output)
    return shape_scale(fan_in, fan_out, consistent_rms)
