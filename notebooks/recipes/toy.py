"""What the recipes share: a small task to learn, and devices to learn it on."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, BATCH = 32, 64, 64


def use_virtual_devices(number: int = 8) -> None:
    """Cuts the CPU into virtual devices; call it first. No effect on accelerators."""
    jax.config.update("jax_num_cpu_devices", number)


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
