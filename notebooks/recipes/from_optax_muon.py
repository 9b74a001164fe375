"""A running ``optax.contrib.muon`` job goes on with ``dmuon``, from the same state.

The state has the same structure, so nothing is converted; with ``method="direct"`` the
losses go on as they would have, up to rounding. The way back works too.
"""

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy import batches, init_params, loss, use_virtual_devices

from dmuon_jax import dmuon


def train(tx, params, state, data):
    """Trains on some batches."""

    @jax.jit
    def train_step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for x, y in data:
        params, state, value = train_step(params, state, x, y)
        losses.append(float(value))
    return params, state, losses


def main(steps: int = 20) -> list[float]:
    """Trains half with each; returns the losses."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    params = jax.tree.map(
        lambda x: jax.device_put(
            x, NamedSharding(mesh, PartitionSpec("fsdp" if x.ndim == 2 else None))
        ),
        init_params(),
    )
    data = list(batches(steps))
    old = optax.contrib.muon(0.02, weight_decay=0.01)
    params, state, first = train(old, params, old.init(params), data[: steps // 2])

    new = dmuon(0.02, weight_decay=0.01)
    fresh = new.init(params)  # reads the shardings, and says where the state belongs
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, fresh)
    _, _, second = train(new, params, state, data[steps // 2 :])
    return first + second


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
