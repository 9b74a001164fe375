"""Gradient accumulation: ``optax.MultiSteps`` around ``dmuon``.

The iteration runs on the mean gradient, once for every few batches. Inside the transform
(averaging orthogonalized gradients) it would be another, worse optimizer.
"""

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy import batches, init_params, loss, use_virtual_devices

from dmuon_jax import dmuon, place_state


def main(steps: int = 40, every: int = 4) -> list[float]:
    """Trains; returns the losses of all batches."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    params = jax.tree.map(
        lambda x: jax.device_put(
            x, NamedSharding(mesh, PartitionSpec("fsdp" if x.ndim == 2 else None))
        ),
        init_params(),
    )
    tx = optax.MultiSteps(dmuon(0.02), every_k_schedule=every)
    # MultiSteps' own counters are put on the mesh too, or the step compiles twice.
    state = place_state(tx.init(params), mesh, params)

    @jax.jit
    def train_step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for x, y in batches(steps):
        params, state, value = train_step(params, state, x, y)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
