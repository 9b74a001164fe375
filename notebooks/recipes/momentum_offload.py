"""Momentum in host memory: it comes to the device for the update only.

Saves 4 bytes per parameter of device memory, and costs two copies over PCIe per step.
"""

import jax
import optax
from jax.sharding import Mesh
from toy import batches, by_rows, init_params, loss, use_virtual_devices

from dmuon_jax import dmuon, plan_owners, state_shardings


def main(steps: int = 20) -> list[float]:
    """Trains; returns the losses."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    shardings = by_rows(init_params(), mesh)
    params = jax.device_put(init_params(), shardings)
    host = {
        name: {"kernel": shardings[name]["kernel"].with_memory_kind("pinned_host")}
        for name in ("up", "down")
    }
    tx = dmuon(0.02, param_shardings=shardings, momentum_shardings=host)
    state = tx.init(params)
    kept = state_shardings(tx, params, plan_owners(params, momentum_shardings=host))

    def train_step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    # Told where the state stays, jit keeps the momentum in host memory between steps.
    train_step = jax.jit(train_step, out_shardings=(shardings, kept, None))
    losses = []
    for x, y in batches(steps):
        params, state, value = train_step(params, state, x, y)
        losses.append(float(value))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim == 2}
    if kinds != {"pinned_host"}:
        raise RuntimeError(f"momentum must be in host memory, got {kinds}")
    return losses


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
