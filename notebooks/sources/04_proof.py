# %% [markdown]
# # 4. Proof
#
# Does the compiled step really move each block once, and orthogonalize each matrix once?
# `audit` reads the program that XLA made, on any machine, and `check` turns the answer
# into a test of your own.

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
# ## A train step
#
# Any jitted step will do. This one: three layers under FSDP, clipping by global norm.

# %%
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dmuon_jax import dmuon, plan_owners

WIDTH, HIDDEN = 128, 512
mesh = Mesh(devices, ("fsdp",))
rows = NamedSharding(mesh, P("fsdp"))


def matrix(key, *shape):
    return jax.device_put(jax.random.normal(key, shape) / shape[0] ** 0.5, rows)


keys = iter(jax.random.split(jax.random.key(0), 6))
params = [
    {"up": matrix(next(keys), WIDTH, HIDDEN), "down": matrix(next(keys), HIDDEN, WIDTH)}
    for _ in range(3)
]
batch = matrix(jax.random.key(1), 64, WIDTH)


def loss(params, x):
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def compile_step(tx):
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()


# %% [markdown]
# ## What it does
#
# One line per kind of collective: how many, how often they run, how many bytes, and how
# long computation waits for them in a model of the device.

# %%
from dmuon_jax.proof import AuditError, audit

plan = plan_owners(params)
ours = audit(compile_step(dmuon(1e-3, plan=plan)), device="cpu")
print(ours.summary())

# %% [markdown]
# The two `all-to-all`s are the exchange: momentum to the owners, updates back. The other
# collectives are FSDP's. For comparison, `optax.contrib.muon`:

# %%
theirs = audit(compile_step(optax.contrib.muon(1e-3)), device="cpu")
for name, found in (("optax.contrib.muon", theirs), ("dmuon", ours)):
    print(
        f"{name:20s} {len(found.collectives):4d} collectives, "
        f"{found.collective_bytes / 2**20:6.2f} MiB, {found.dot_flops / 1e9:.3f} GFLOP"
    )

# %% [markdown]
# ## As a test of your own
#
# With the plan, `audit` knows the least work there is. The redundancy compares the update
# alone, so here is the compiled update without the model.

# %%
tx = dmuon(1e-3, plan=plan)
update = jax.jit(tx.update).lower(params, tx.init(params), params)
found = audit(update, plan=plan)
print(f"redundancy {found.redundancy:.3f}, bytes over the plan's {found.bytes_ratio:.3f}")
_ = found.check(redundancy=1.05, collectives_in_loops=0, bytes_ratio=1.01)

# %% [markdown]
# A check that fails names what broke it:

# %%
muon = optax.contrib.muon(1e-3)
update = jax.jit(muon.update).lower(params, muon.init(params), params)
try:
    audit(update, plan=plan).check(redundancy=1.05, bytes_ratio=1.05)
except AuditError as error:
    print("\n".join(str(error).splitlines()[:6]))

# %% [markdown]
# ## The timeline
#
# The scheduled program on two lanes. On a CPU nothing overlaps; compiled for GPUs,
# exchanges start early and hide behind Newton–Schulz.

# %%
from IPython.display import Image

from dmuon_jax.proof.picture import draw

draw(ours.timeline, "/tmp/timeline.png", "train step")
Image("/tmp/timeline.png", width=900)

# %% [markdown]
# ## A cluster that you do not have
#
# XLA can compile for GPUs that are not there. With the CUDA plugin installed
# (`pip install 'dmuon_jax[cuda13]'`), this compiles the train step of a public model for
# eight H200 with three optimizers (about a minute; not run here):
#
# ```
# dmuon-jax simulate --model qwen2.5-1.5b --mesh fsdp=8 --device h200
# ```
#
# Next: [a robot policy](05_robot_policy.ipynb).
