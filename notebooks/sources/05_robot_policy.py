# %% [markdown]
# # 5. A robot policy
#
# A small vision-language-action model: a vision tower looks, a language trunk reads the
# instruction and mixes it with what was seen, an action expert answers with a chunk of
# motions. Three towers of different widths make many shapes of matrices of very different
# cost: the workload that owners were invented for.

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
# ## The task
#
# A picture of 32 × 32 pixels shows a red and a blue square. The instruction names one of
# them; the actions are the eight steps of a straight way there from the centre.

# %%
import jax.numpy as jnp
import numpy as np

SIDE, PATCH, CHUNK, BATCH = 32, 8, 8, 32
WORDS = ("reach", "the", "red", "blue", "square")


def observe(seed):
    rng = np.random.default_rng(seed)
    places = rng.integers(0, SIDE - 5, size=(BATCH, 2, 2))
    images = np.zeros((BATCH, SIDE, SIDE, 3), np.float32)
    for image, (red, blue) in zip(images, places):
        image[red[0] : red[0] + 5, red[1] : red[1] + 5, 0] = 1
        image[blue[0] : blue[0] + 5, blue[1] : blue[1] + 5, 2] = 1
    colour = rng.integers(0, 2, size=BATCH)
    text = np.stack([np.array([0, 1, 2 + c, 4]) for c in colour])
    target = (places[np.arange(BATCH), colour] + 2.5) / SIDE - 0.5
    way = np.linspace(1 / CHUNK, 1, CHUNK)[:, None]
    return images, text, (target[:, None] * way).astype(np.float32)


# %%
# %matplotlib inline
import matplotlib.pyplot as plt

images, text, actions = observe(0)
figure, panels = plt.subplots(1, 3, figsize=(8, 2.8))
for panel, image, words, way in zip(panels, images, text, actions):
    panel.imshow(image)
    panel.plot((way[:, 1] + 0.5) * SIDE, (way[:, 0] + 0.5) * SIDE, "w.-")
    panel.set_title(" ".join(WORDS[word] for word in words), fontsize="small")
    panel.set_axis_off()
plt.show()

# %% [markdown]
# ## The model
#
# Each tower is a stack of transformer layers in one leaf per weight, run by a scan.

# %%
from dmuon_jax import HiddenMatrices, dmuon, plan_owners, routing_report

TOWERS = {"vision": (2, 64, 256), "trunk": (3, 96, 288), "action": (2, 48, 96)}
HEADS, POLICY = 4, "vision trunk action".split()


def init_tower(key, layers, width, hidden):
    shapes = {name: (width, width) for name in ("query", "key", "value", "out")}
    shapes |= {"up": (width, hidden), "down": (hidden, width)}
    tower = {}
    for name, shape in shapes.items():
        key, here = jax.random.split(key)
        kernel = jax.random.normal(here, (layers, *shape)) / shape[0] ** 0.5
        tower[name] = {"kernel": kernel * (0.3 if name in ("out", "down") else 1)}
    return tower | {"norm": {"scale": jnp.ones((layers, width))}}


def init(key):
    widths = {name: width for name, (_, width, _) in TOWERS.items()}
    keys = iter(jax.random.split(key, 16))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    params = {name: init_tower(next(keys), *TOWERS[name]) for name in POLICY}
    patches = (SIDE // PATCH) ** 2
    return params | {
        "patch_embedding": {"kernel": normal(PATCH * PATCH * 3, widths["vision"])},
        "patch_position": {"embedding": normal(patches, widths["vision"])},
        "word_embedding": {"embedding": normal(len(WORDS), widths["trunk"])},
        "word_position": {"embedding": normal(4, widths["trunk"])},
        "action_query": {"embedding": normal(CHUNK, widths["action"])},
        "vision_to_trunk": {"kernel": normal(widths["vision"], widths["trunk"])},
        "trunk_to_action": {"kernel": normal(widths["trunk"], widths["action"])},
        "action_head": {"kernel": normal(widths["action"], 2)},
    }


# %%
def normalise(x, scale=1.0):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def tower(weights, x):
    """Transformer layers over all tokens of x, [batch, token, channel]."""

    def layer(x, w):
        seen = normalise(x, w["norm"]["scale"])
        q, k, v = (
            (seen @ w[name]["kernel"]).reshape(*x.shape[:2], HEADS, -1)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + mixed @ w["out"]["kernel"]
        hidden = jax.nn.gelu(normalise(x) @ w["up"]["kernel"])
        return x + hidden @ w["down"]["kernel"], None

    return jax.lax.scan(layer, x, weights)[0]


def policy(params, images, text):
    """Actions [batch, step, (row, column)]."""
    grid = SIDE // PATCH
    patches = images.reshape(-1, grid, PATCH, grid, PATCH, 3)
    patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(len(images), grid * grid, -1)
    seen = patches @ params["patch_embedding"]["kernel"]
    seen = tower(params["vision"], seen + params["patch_position"]["embedding"])
    read = params["word_embedding"]["embedding"][text]
    read = read + params["word_position"]["embedding"]
    both = jnp.concatenate([seen @ params["vision_to_trunk"]["kernel"], read], axis=1)
    context = normalise(tower(params["trunk"], both)) @ params["trunk_to_action"]["kernel"]
    asked = params["action_query"]["embedding"]
    asked = jnp.broadcast_to(asked, (len(images), *asked.shape))
    acted = tower(params["action"], jnp.concatenate([context, asked], axis=1))
    return normalise(acted[:, -CHUNK:]) @ params["action_head"]["kernel"]


def loss(params, images, text, actions):
    return jnp.mean((policy(params, images, text) - actions) ** 2)


# %% [markdown]
# ## Which matrices, and whose
#
# `HiddenMatrices` sends the towers' matrices to Muon, one by one although they are
# stacked, and embeddings and positions to AdamW. What names do not tell it, `overrides`
# do: here, that the action head is an output. The report shows every leaf.

# %%
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(devices, ("fsdp",))


def shard(x):
    divides = x.ndim > 1 and x.shape[-2] % mesh.size == 0
    spec = [None] * (x.ndim - 2) + ["fsdp"] if divides else []
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


params = jax.tree.map(shard, init(jax.random.key(0)))
rule = HiddenMatrices(overrides={"action_head": None})
print(routing_report(params, rule))

# %%
plan = plan_owners(params, muon_weight_dimension_numbers=rule)
plan.plot()

# %% [markdown]
# ## Training

# %%
import optax

STEPS = 80
rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 8, STEPS)


def train(tx):
    state, now = tx.init(params), params

    @jax.jit
    def step(params, state, observation):
        value, grads = jax.value_and_grad(loss)(params, *observation)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    whole = NamedSharding(mesh, P("fsdp"))
    losses = []
    for number in range(STEPS):
        observation = jax.device_put(observe(number), whole)
        now, state, value = step(now, state, observation)
        losses.append(float(value))
    return now, losses


muon = dmuon(
    rate,
    adam_learning_rate=rate,
    consistent_rms=0.2,  # updates the size of AdamW's, so that one rate serves both
    weight_decay=0.01,
    muon_weight_dimension_numbers=rule,
    plan=plan,
)
trained, losses = train(muon)
_, adamw = train(optax.adamw(rate, weight_decay=0.01))

# %%
plt.figure(figsize=(6, 3))
plt.semilogy(adamw, label="AdamW")
plt.semilogy(losses, label="dmuon")
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()
print(f"mean loss of the last 10 steps: dmuon {np.mean(losses[-10:]):.4f}, "
      f"AdamW {np.mean(adamw[-10:]):.4f}")  # fmt: skip
assert np.mean(losses[-10:]) < 0.7 * losses[0]

# %% [markdown]
# One seed and one learning rate for both: a demonstration, not a comparison of optimizers.
# What the policy does with pictures that it has not seen:

# %%
images, text, actions = observe(10_000)
answers = policy(trained, images, text)
figure, panels = plt.subplots(1, 4, figsize=(10, 2.8))
for panel, image, words, way in zip(panels, images, text, np.asarray(answers)):
    panel.imshow(image)
    panel.plot((way[:, 1] + 0.5) * SIDE, (way[:, 0] + 0.5) * SIDE, "w.-")
    panel.set_title(" ".join(WORDS[word] for word in words), fontsize="small")
    panel.set_axis_off()
plt.show()
