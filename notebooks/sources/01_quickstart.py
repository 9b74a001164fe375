# %% [markdown]
# # 1. From `optax.contrib.muon` to `dmuon`
#
# One import changes. The curve stays, the update becomes cheaper. This runs on a laptop:
# eight virtual devices share its cores.

# %%
# Install what is missing (from a wheel beside this notebook, the repository around it, or
# the index), then find devices: several accelerators, or eight virtual CPUs.
import glob
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("dmuon_jax") is None:
    repository = ".." if os.path.exists("../pyproject.toml") else "dmuon_jax"
    (source, *_) = (*glob.glob("dmuon_jax-*.whl"), repository)
    pip = [sys.executable, "-m", "pip", "install", "-q", f"{source}[demo]"]
    subprocess.run(pip, check=True)

import jax

jax.config.update("jax_num_cpu_devices", 8)
devices = jax.devices() if jax.device_count() > 1 else jax.devices("cpu")
jax.config.update("jax_default_device", devices[0])
print(f"jax {jax.__version__}: {len(devices)} x {devices[0].device_kind}")

# %% [markdown]
# ## A model and its shardings
#
# A residual network of four layers, its matrices cut by rows over eight devices (FSDP).

# %%
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WIDTH, HIDDEN, LAYERS = 128, 512, 4
mesh = Mesh(devices, ("fsdp",))


def init(key):
    tree = {}
    for layer in range(LAYERS):
        key, up, down = jax.random.split(key, 3)
        tree[f"layer_{layer}"] = {
            "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
            "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5 / 4,
            "bias": jnp.zeros(WIDTH),
        }
    return tree


def shard(x):
    return jax.device_put(x, NamedSharding(mesh, P("fsdp" if x.ndim == 2 else None)))


params = jax.tree.map(shard, init(jax.random.key(0)))
sum(x.size for x in jax.tree.leaves(params))

# %% [markdown]
# The task: imitate a fixed random function of 128 numbers.

# %%
def loss(params, x, y):
    for layer in params.values():
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"] + layer["bias"]
    return jnp.mean((x - y) ** 2)


def batch(step):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (256, WIDTH))
    return x, jnp.sin(3 * jnp.roll(x, 5, axis=1)) + x[:, ::-1]


# %% [markdown]
# ## Train with both
#
# `tx` is all that differs.

# %%
import optax

from dmuon_jax import dmuon

STEPS = 30


def train(tx):
    state, now = tx.init(params), params

    @jax.jit
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for number in range(STEPS):
        now, state, value = step(now, state, *batch(number))
        losses.append(float(value))
    return losses


theirs = train(optax.contrib.muon(0.01, weight_decay=0.01))
ours = train(dmuon(0.01, weight_decay=0.01))

# %%
import matplotlib.pyplot as plt

plt.figure(figsize=(6, 3))
plt.plot(theirs, label="optax.contrib.muon", linewidth=4, alpha=0.4)
plt.plot(ours, label="dmuon", linewidth=1.5)
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()
largest = max(abs(a - b) for a, b in zip(theirs, ours))
assert largest < 0.05  # accelerators iterate in 16 bits; on a CPU this is rounding only
print(f"largest difference of the two curves: {largest:.1e}")

# %% [markdown]
# ## What the update costs
#
# `audit` reads the compiled program: how much every device multiplies, and what it moves.

# %%
from dmuon_jax.proof import audit


def compiled(tx):
    state = tx.init(params)
    run = jax.jit(tx.update).lower(params, state, params).compile()
    return run, lambda: jax.block_until_ready(run(params, state, params))


programs = {
    "optax.contrib.muon": compiled(optax.contrib.muon(0.01)),
    "dmuon": compiled(dmuon(0.01)),
}
for name, (program, _) in programs.items():
    found = audit(program)
    print(
        f"{name:20s} {found.dot_flops / 1e9:6.2f} GFLOP and {len(found.collectives):4d} "
        f"collectives per device, {found.collective_bytes / 2**20:6.2f} MiB moved"
    )

# %% [markdown]
# And how long it takes here. Eight virtual devices share a few cores, so the time saved
# is that of the repeated work; the updates take turns.

# %%
import statistics
import time

times = {name: [] for name in programs}
for _ in range(7):
    for name, (_, call) in programs.items():
        started = time.perf_counter()
        call()
        times[name].append(1e3 * (time.perf_counter() - started))
for name, row in times.items():
    print(f"{name:20s} {statistics.median(row):7.1f} ms")

# %% [markdown]
# Next: [who owns what](02_owners.ipynb), and for clusters that you do not have.
