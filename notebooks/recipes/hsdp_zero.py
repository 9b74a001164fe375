"""HSDP with ZeRO-sharded master weights.

Plain HSDP keeps fp32 weights on every replica, so the owners' results must be gathered
over the slow links between replicas. Here master weights (and momentum) are cut over the
replicas too; what is gathered over them is the bf16 copy that the forward pass needs, and
the update only moves each block to its owner and back.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from toy import batches, by_rows, init_params, loss, use_virtual_devices

from dmuon_jax import dmuon, plan_owners

SHARDED = ("fsdp", "replica")  # rows of master weights, as cut


def master_weights(mesh: Mesh):
    """fp32 weights, cut over replicas too."""
    return jax.device_put(init_params(), by_rows(init_params(), mesh, SHARDED))


def main(steps: int = 20) -> list[float]:
    """Trains; returns the losses."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "fsdp"))
    masters = master_weights(mesh)
    plan = plan_owners(masters)
    print(plan.summary())
    tx = dmuon(0.02, plan=plan)
    state = tx.init(masters)

    def working_copy(masters):
        """bf16 weights, gathered over the replicas: the only traffic between them."""
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters)
        return jax.lax.with_sharding_constraint(narrow, by_rows(masters, mesh))

    @jax.jit
    def train_step(masters, state, x, y):
        value, grads = jax.value_and_grad(
            lambda masters: loss(working_copy(masters), x, y)
        )(masters)
        updates, state = tx.update(grads, state, masters)
        return optax.apply_updates(masters, updates), state, value

    losses = []
    for x, y in batches(steps):
        masters, state, value = train_step(masters, state, x, y)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
