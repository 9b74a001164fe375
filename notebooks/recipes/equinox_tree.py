"""Equinox: weights are (out, in), and modules hold functions beside arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from toy import HIDDEN, WIDTH, batches, by_rows, use_virtual_devices

from dmuon_jax import HiddenMatrices, dmuon


def loss(model, x, y):
    """Mean squared error."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def main(steps: int = 20) -> list[float]:
    """Trains; returns the losses."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params = jax.device_put(params, by_rows(params, mesh))
    # out_in: rows are outputs. It decides the scale of each update, and what is hidden.
    tx = dmuon(0.02, muon_weight_dimension_numbers=HiddenMatrices(out_in=True))
    state = tx.init(params)

    @jax.jit
    def train_step(params, state, x, y):
        value, grads = jax.value_and_grad(
            lambda params: loss(eqx.combine(params, static), x, y)
        )(params)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    losses = []
    for x, y in batches(steps):
        params, state, value = train_step(params, state, x, y)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
