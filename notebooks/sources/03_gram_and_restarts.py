# %% [markdown]
# # 3. Gram space and restarts
#
# Newton–Schulz pushes all singular values of a matrix towards 1. It can work on the
# matrix X (*direct*) or on the small R = X Xᵀ (*Gram*), which is cheaper for wide
# matrices, but loses accuracy in half precision unless it *restarts*. This notebook shows
# why.

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
# ## Singular values through five steps
#
# One step maps every singular value x to a x + b x³ + c x⁵. Jordan's coefficients are
# fast rather than exact; Polar Express takes the best polynomial for each step.

# %%
import matplotlib.pyplot as plt
import numpy as np

from dmuon_jax.coefficients import JORDAN, YOU
from dmuon_jax.polar_express import polar_express

tables = {"jordan": [JORDAN] * 5, "you": YOU, "polar_express": polar_express(5)}
x = np.geomspace(1e-4, 1, 500)
figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), sharey=True)
for panel, (name, table) in zip(axes, tables.items()):
    values = x
    for step, (a, b, c) in enumerate(table):
        values = a * values + b * values**3 + c * values**5
        panel.semilogx(x, values, color=plt.cm.viridis(step / 5), label=f"step {step + 1}")
    panel.axhline(1, color="black", linewidth=0.5)
    panel.set_title(name)
    panel.set_xlabel("singular value before")
axes[0].legend(fontsize="small")
plt.show()

# %% [markdown]
# ## Why Gram: fewer operations
#
# For s × l matrices, five steps: direct 20 s²l + 10 s³, Gram 8 s²l + 28 s³. Kernels that
# compute only half of a symmetric product change the balance.

# %%
from dmuon_jax.planning.cost import iteration_flops

ratios = np.linspace(1, 8, 60)
plt.figure(figsize=(6, 3))
for symmetric, style in ((False, "-"), (True, "--")):
    saved = [
        iteration_flops((1024, int(1024 * r)), "direct", symmetric=symmetric)
        / iteration_flops((1024, int(1024 * r)), "gram", symmetric=symmetric)
        for r in ratios
    ]
    label = "half of symmetric products" if symmetric else "plain products"
    plt.plot(ratios, saved, style, label=label)
plt.axhline(1, color="black", linewidth=0.5)
plt.xlabel("long side / short side")
plt.ylabel("FLOPs direct / Gram")
plt.legend()
plt.show()

# %% [markdown]
# ## Why restarts: rounding
#
# In float16 the products that make R from step to step are rounded. An eigenvalue that
# should be tiny becomes negative, and every step multiplies it by about a². Here is the
# smallest eigenvalue of R, with and without a restart before step 2, for a spectrum from
# 1 to 10⁻⁶.


# %%
def smallest_eigenvalues(x, table, restarts):
    """Of R after each step of the Gram form, every product rounded to float16."""

    def half(m):
        return m.astype(np.float16).astype(np.float32)

    r, q, found = half(x @ x.T), np.eye(len(x), dtype=np.float32), []
    for step, (a, b, c) in enumerate(table):
        if step in restarts:
            x = half(q @ x)
            r, q = half(x @ x.T), np.eye(len(x), dtype=np.float32)
        found.append(np.linalg.eigvalsh(r)[0])
        z = half(b * r + c * r @ r)
        q = half(q @ z + a * q)
        r = half(r @ z + a * r)
        r = half(r @ z + a * r)
    return found


rng = np.random.default_rng(0)
left, _ = np.linalg.qr(rng.normal(size=(64, 64)))
right, _ = np.linalg.qr(rng.normal(size=(256, 64)))
spectrum = np.geomspace(1, 1e-6, 64)
hard = ((left * spectrum) @ right.T / np.linalg.norm(spectrum)).astype(np.float32)
for restarts in ((), (2,)):
    values = smallest_eigenvalues(hard, tables["jordan"], restarts)
    print(f"restarts {restarts!s:5}: " + "  ".join(f"{v:10.2e}" for v in values))

# %% [markdown]
# Without the restart R is no Gram matrix of anything any more. The error of the result:

# %%
import jax.numpy as jnp

from dmuon_jax.newton_schulz import orthogonalize_batch


def error(method, dtype, restarts=None):
    with jax.default_matmul_precision("highest"):
        found = orthogonalize_batch(
            jnp.asarray(hard)[None],
            jnp.asarray(tables["jordan"]),
            5,
            method=method,
            compute_dtype=dtype,
            restarts=restarts,
        )[0]
    exact = hard.astype(np.float64)
    exact /= np.linalg.norm(exact)
    for a, b, c in tables["jordan"]:
        r = exact @ exact.T
        exact = a * exact + (b * r + c * r @ r) @ exact
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


for method, dtype, restarts in (
    ("direct", "float32", None),
    ("direct", "float16", None),
    ("gram", "float32", None),
    ("gram", "float16", ()),
    ("gram", "float16", (2,)),
    ("direct", "bfloat16", None),
    ("gram", "bfloat16", (2,)),
):
    where = "" if method == "direct" else f" restarts {restarts}"
    print(f"{method:6s} {dtype:8s} {error(method, dtype, restarts):8.1e}{where}")

# %% [markdown]
# So float16 Gram with one restart is about as good as float16 direct, and bfloat16 Gram is
# never a default. Where to restart is found offline, by trying every place on hard spectra;
# `dmuon` restarts before step 2, which is near the best for all its tables.

# %%
from dmuon_jax.restarts import choose_restarts, gram_error

for place in ((), (1,), (2,), (3,), (4,)):
    print(f"restart before {place!s:5}: {gram_error(tables['jordan'], 'float16', place):.3f}")
print("chosen:", choose_restarts(tables["jordan"], "float16"))

# %% [markdown]
# ## Why it chooses
#
# `dmuon(method=None)` lets the planner price both forms for every shape of the model:

# %%
from dmuon_jax.planning.cost import RooflineCost
from dmuon_jax.planning.devices import DEVICES

cost = RooflineCost(DEVICES["h200"], "float16")
for shape in ((4096, 4096), (4096, 14336), (1408, 2048), (2560, 2560), (256, 1536)):
    times = {m: cost.time_us(shape, 8, m) for m in ("direct", "gram")}
    print(shape, {m: f"{t:.0f} us" for m, t in times.items()}, min(times, key=times.get))

# %% [markdown]
# Times are a roofline's, not measured. Next: [proof](04_proof.ipynb).
