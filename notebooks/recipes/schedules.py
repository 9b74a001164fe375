"""A schedule for each half, and hyperparameters that can be read and set while running."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from toy import batches, by_rows, init_params, loss, use_virtual_devices

from dmuon_jax import dmuon, place_state

RATES = ("learning_rate", "adam_learning_rate")


def main(steps: int = 20) -> list[float]:
    """Trains; returns the losses."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    shardings = by_rows(init_params(), mesh)
    params = jax.device_put(init_params(), shardings)

    # inject_hyperparams makes the transform anew in every trace, where shardings are
    # hidden; so they are told.
    tx = optax.inject_hyperparams(dmuon)(
        learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.03, 3, steps, 0.003),
        adam_learning_rate=optax.linear_schedule(3e-3, 3e-4, steps),
        weight_decay=0.01,
        param_shardings=shardings,
    )
    state = place_state(tx.init(params), mesh, params)

    @jax.jit
    def train_step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for step, (x, y) in enumerate(batches(steps)):
        if step == steps // 2:  # what has no schedule can be set by hand
            decay = place_state(jnp.float32(0.0), mesh)
            state.hyperparams["weight_decay"] = decay
        params, state, value = train_step(params, state, x, y)
        losses.append(float(value))
    rates = [float(state.hyperparams[name]) for name in RATES]
    print("learning rates at the end:", dict(zip(RATES, rates, strict=True)))
    return losses


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
