"""Flax Linen: ``TrainState.create(tx=dmuon(...))``, sharded before it is created."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from toy import BATCH, HIDDEN, WIDTH, batches, by_rows, use_virtual_devices

from dmuon_jax import dmuon


class Network(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.tanh(nn.Dense(HIDDEN)(x)))


@jax.jit
def train_step(state: TrainState, x, y):
    """One step."""

    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def main(steps: int = 20) -> list[float]:
    """Trains; returns the losses."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    module = Network()
    params = module.init(jax.random.key(0), jnp.zeros((BATCH, WIDTH)))["params"]
    params = jax.device_put(params, by_rows(params, mesh))
    state = TrainState.create(apply_fn=module.apply, params=params, tx=dmuon(0.02))
    losses = []
    for x, y in batches(steps):
        state, value = train_step(state, x, y)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
