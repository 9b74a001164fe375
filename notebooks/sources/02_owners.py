# %% [markdown]
# # 2. Owners
#
# Every matrix has one device that orthogonalizes it: its *owner*. Who owns what is a
# *plan*, made when the optimizer starts. A plan needs no device: here are plans for a
# cluster that you do not have.

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
# ## A plan for the arrays at hand
#
# `plan_owners` reads the shardings of a tree. Here: 11 matrices of three shapes, cut in
# three different ways, on eight devices.

# %%
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dmuon_jax import plan_owners

mesh = Mesh(devices, ("fsdp",))


def place(shape, *spec):
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, P(*spec)))


params = {
    "rows": [place((64, 128), "fsdp") for _ in range(6)],
    "columns": [place((128, 64), None, "fsdp") for _ in range(4)],
    "large": place((256, 256), "fsdp"),
    "bias": place((64,)),
}
plan = plan_owners(params)
print(plan.summary())

# %% [markdown]
# How to read it. Rows are *buckets*: matrices of one shape, which an owner stacks and
# orthogonalizes together. *Gap* is the distance to a proven lower bound. *EMPTY slots*
# are places in an owner's stack that it does not need: all devices run one program, so
# stacks have one size.

# %%
# %matplotlib inline
plan.plot()

# %% [markdown]
# ## Heterogeneous models on 32 H200
#
# WALL-X and Pi0 are robot policies: several towers, a dozen shapes of very different
# cost. Handing out matrices in turn would leave some owners with all the large ones.

# %%
from dmuon_jax.matrices import MeshShape
from dmuon_jax.planning.build import make_plan
from dmuon_jax.planning.clusters import Placement, cluster_settings, model_leaves
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.estimate import estimate
from dmuon_jax.planning.workloads import load_workload

h200 = DEVICES["h200"]


def plan_model(name, owner_axes=None, experts=(), **axes):
    mesh = MeshShape(tuple(axes), tuple(axes.values()))
    where = Placement(mesh, fsdp_axes=("fsdp",), expert_axes=experts)
    settings = cluster_settings(h200, mesh, owner_axes=owner_axes)
    return make_plan(model_leaves(load_workload(name), where), mesh, settings)


wallx = plan_model("wall-x", fsdp=32)
wallx.plot()

# %%
pi0 = plan_model("pi0", fsdp=32)
pi0.plot()

# %% [markdown]
# ## What an update would cost
#
# Arithmetic on the device's rates (`planning/devices.py`), nothing measured: Newton–Schulz
# of the busiest owner, passes over memory, and the exchange, which XLA hides behind both
# as far as it can.

# %%
for name, plan in (("wall-x", wallx), ("pi0", pi0)):
    costs = estimate(plan, h200)
    print(
        f"{name:7s} AdamW {costs.adamw_us / 1e3:5.2f} ms; Muon "
        f"{costs.hidden_us / 1e3:5.2f} ms if the exchange hides, "
        f"{costs.exposed_us / 1e3:5.2f} ms if nothing hides it"
    )

# %% [markdown]
# ## Two nodes apart
#
# On HSDP the parameters are replicated over `data`. Owners over all axes divide the work
# by all devices, but results come back over the slow links. Owners over `fsdp` only repeat
# the work on every replica and stay within the node. Neither is always right:

# %%
for owner_axes in (("data", "fsdp"), ("fsdp",)):
    costs = estimate(plan_model("qwen2.5-7b", owner_axes, data=4, fsdp=8), h200)
    print(
        f"owner_axes={owner_axes}: {costs.hidden_us / 1e3:6.1f} ms if the exchange hides, "
        f"{costs.exposed_us / 1e3:6.1f} ms if nothing hides it"
    )

# %% [markdown]
# ## Experts stay where they are
#
# A stack of experts that is cut by expert is whole already: its owners are the devices
# that hold it, and only the cut along `fsdp` is exchanged.

# %%
moonlight = plan_model("moonlight-16b-a3b", experts=("expert",), fsdp=2, expert=16)
print(moonlight.summary())

# %% [markdown]
# The same from the shell: `dmuon-jax plan --model moonlight-16b-a3b --mesh
# fsdp=2,expert=16 --plot plan.png`. A plan is data: `plan.to_json()` writes it,
# `dmuon(..., plan=Plan.from_json(text))` uses it.
#
# Next: [the iteration itself](03_gram_and_restarts.ipynb).
