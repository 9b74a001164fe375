"""What the recipes share: a small task, devices to learn it on, and the usual loop."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

WIDTH, HIDDEN, BATCH = 32, 64, 64


def use_virtual_devices(number: int = 8) -> None:
    """Cuts the CPU into virtual devices; call it first. No effect on accelerators."""
    jax.config.update("jax_num_cpu_devices", number)


def by_rows(tree, mesh, axes="fsdp"):
    """Shardings for FSDP: matrices cut by rows over ``axes``, the rest whole."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec(axes if x.ndim == 2 else None)),
        tree,
    )


def batches(steps: int, seed: int = 0):
    """Inputs and what a fixed random network answers, [BATCH, WIDTH] each."""
    teacher_in, teacher_out = (
        jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / WIDTH**0.5
        for i in (1, 2)
    )
    for step in range(steps):
        key = jax.random.fold_in(jax.random.key(seed), step)
        x = jax.random.normal(key, (BATCH, WIDTH))
        yield x, jnp.tanh(x @ teacher_in) @ teacher_out


def init_params(seed: int = 3):
    """Weights of a two-layer network, as a plain tree."""
    up, down = jax.random.split(jax.random.key(seed))
    return {
        "up": {"kernel": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5},
        "down": {"kernel": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5},
        "bias": jnp.zeros(WIDTH),
    }


def predict(params, x):
    """The two-layer network."""
    return (
        jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"] + params["bias"]
    )


def loss(params, x, y):
    """Mean squared error."""
    return jnp.mean((predict(params, x) - y) ** 2)


def train(tx, params, state, data, loss=loss):
    """Trains on some batches; returns parameters, state and the losses."""

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
