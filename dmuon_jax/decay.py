"""Weight decay that acts only where it agrees with the update."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def add_cautious_decayed_weights(
    weight_decay: jax.typing.ArrayLike = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    """Adds ``weight_decay * p`` where update and parameter have the same sign.

    Cautious Weight Decay (arXiv 2510.12402): decay only where the step ``-u`` moves the
    parameter towards zero as well, ``u * p >= 0``. Takes the place of
    ``optax.add_decayed_weights``, before the learning rate. Has no state.

    Args:
      weight_decay: strength, later multiplied with the learning rate.
      mask: as for ``optax.add_decayed_weights``.
    """

    def decay(update, param):
        agrees = jnp.real(update * jnp.conj(param)) >= 0
        return update + jnp.where(agrees, weight_decay * param, 0).astype(update.dtype)

    def update_fn(updates, state, params=None):
        if params is None:
            raise ValueError("params must be given to update for weight decay, got None")
        return jax.tree.map(decay, updates, params), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)
    return tx if mask is None else optax.masked(tx, mask)
