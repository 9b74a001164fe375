"""Transformers to simulate, built from the shapes of a shipped workload.

A model is one or several towers of equal layers (RMSNorm, rotary attention with
grouped keys, gated or plain MLP) with an embedding and a next-token loss on the first
tower. What the table does not hold (vocabulary, size of a head) is below. The towers of
vision-language-action models run side by side on their own tokens, an assumption that
only sets how much forward and backward work there is beside the update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dmuon_jax.planning.workloads import Matrices, load_workload

Params = dict[str, dict[str, jax.Array]]

# Vocabulary, whether input and output embedding are one, size of a head, from each
# model's public configuration.
CONFIGS: dict[str, tuple[int, bool, int]] = {
    "qwen2.5-1.5b": (151936, True, 128),
    "qwen2.5-3b": (151936, True, 128),
    "llama-3.2-3b": (128256, True, 128),
    "qwen2.5-7b": (152064, False, 128),
    "llama-3.1-8b": (128256, False, 128),
    "qwen2.5-14b": (152064, False, 128),
    "qwen3-1.7b": (151936, True, 128),
    "qwen3-32b": (151936, False, 128),
    "wall-x": (151936, True, 128),
    "pi0": (257152, True, 256),
}

# Tokens of a tower for one token of the sequence.
TOKEN_SHARES = {"action": 1 / 16, "vit": 1 / 4, "vision": 1 / 4}
MLP_ROLES = ("gate", "up", "down", "gate_up", "fc1", "fc2")


@dataclasses.dataclass(frozen=True)
class Sharded:
    """How a step is spread over devices.

    Attributes:
      gather: turns a stored weight, given with its role, into the whole bf16 weight.
      pin: keeps activations split over the batch.
      spread: splits what an embedding table gives, and its gradient, like the table.
      attend: attention on queries, keys and values [batch, token, head, channel].
    """

    gather: Callable[[jax.Array, str], jax.Array]
    pin: Callable[[jax.Array], jax.Array]
    spread: Callable[[jax.Array], jax.Array]
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Tower:
    """Equal layers.

    Attributes:
      name: prefix of its matrices in the table, or "layers".
      layers: how many.
      matrices: shape of the matrices of one layer by role.
      tail: shapes of matrices behind the last layer.
    """

    name: str
    layers: int
    matrices: Mapping[str, tuple[int, int]]
    tail: Mapping[str, tuple[int, int]]

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        names = [role for role in ("q", "qkv") if role in self.matrices]
        return self.matrices[names[0]][0]


@dataclasses.dataclass(frozen=True)
class Model:
    """What there is to build."""

    name: str
    towers: tuple[Tower, ...]
    vocabulary: int
    tied: bool
    head_size: int

    @property
    def width(self) -> int:
        """Width of the tower that the loss belongs to."""
        return self.towers[0].width


def roles(name: str, shape: tuple[int, int], copies: int) -> dict[str, tuple[int, int]]:
    """Matrices of one layer that one row of the table stands for."""
    if name == "qkvo":
        return {part: shape for part in "qkvo"}
    if copies != 1:
        raise NotImplementedError(f"copies of {name} must be 1, got {copies}")
    return {name: shape}


def tower_of(name: str, rows: list[tuple[str, Matrices]]) -> Tower:
    """A tower from its rows (role, matrices)."""
    layers = next(item.count for role, item in rows if role in ("down", "fc2"))
    matrices: dict[str, tuple[int, int]] = {}
    tail: dict[str, tuple[int, int]] = {}
    for role, item in rows:
        if item.count % layers:
            tail[role] = item.shape
        else:
            matrices |= roles(role, item.shape, item.count // layers)
    return Tower(name, layers, matrices, tail)


def model_named(name: str) -> Model:
    """The model called `name`.

    Raises:
      ValueError: the workload table holds no such model.
      NotImplementedError: it does, but the model has no dense layers only.
    """
    workload = load_workload(name)
    if name not in CONFIGS:
        known = ", ".join(sorted(CONFIGS))
        raise NotImplementedError(f"model must be one of {known}, got {name!r}")
    towers: dict[str, list[tuple[str, Matrices]]] = {}
    for item in workload.matrices:
        prefix, _, role = item.name.rpartition(".")
        towers.setdefault(prefix or "layers", []).append((role, item))
    built = tuple(tower_of(prefix, rows) for prefix, rows in towers.items())
    return Model(name, built, *CONFIGS[name])


def parameter_shapes(model: Model) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Master weights in fp32; the matrices of a tower are stacked over its layers."""

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    tree = {"ends": {"embedding": shape(model.vocabulary, model.width)}}
    if not model.tied:
        tree["ends"]["head"] = shape(model.width, model.vocabulary)
    tree["ends"]["norm"] = shape(model.width)
    for tower in model.towers:
        leaves = {
            role: shape(tower.layers, *dims) for role, dims in tower.matrices.items()
        }
        leaves |= {role: shape(*dims) for role, dims in tower.tail.items()}
        for norm in ("attention_norm", "mlp_norm"):
            leaves[norm] = shape(tower.layers, tower.width)
        tree[tower.name] = leaves
    return tree


def is_matrix(tower: str, role: str) -> bool:
    """Whether Muon updates the parameter: all matrices but embedding and head."""
    return tower != "ends" and not role.endswith("norm")


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x over its root mean square, times `scale`, in fp32 inside."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, token, head, channel]."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * rates
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    turned = (low * cos - high * sin, high * cos + low * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def heads(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, size)


def attention(
    weights: Mapping[str, jax.Array], x: jax.Array, head_size: int, attend: Callable
) -> jax.Array:
    """Causal attention with grouped keys and values."""
    width = weights["o"].shape[0]
    if "qkv" in weights:
        rest = (weights["qkv"].shape[1] - width) // 2
        q, k, v = jnp.split(x @ weights["qkv"], [width, width + rest], axis=-1)
    else:
        q, k, v = (x @ weights[role] for role in "qkv")
    size = head_size if not q.shape[-1] % head_size else q.shape[-1] // 16
    size = size if not k.shape[-1] % size else k.shape[-1]
    q, k, v = rotate(heads(q, size)), rotate(heads(k, size)), heads(v, size)
    if q.shape[2] % k.shape[2]:
        group = jnp.arange(q.shape[2]) * k.shape[2] // q.shape[2]
        k, v = k[:, :, group], v[:, :, group]
    return attend(q, k, v).reshape(*x.shape[:2], width) @ weights["o"]


def mlp(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """SwiGLU, or a GELU between two matrices."""
    if "fc1" in weights:
        return jax.nn.gelu(x @ weights["fc1"]) @ weights["fc2"]
    if "gate_up" in weights:
        gate, up = jnp.split(x @ weights["gate_up"], 2, axis=-1)
    else:
        gate, up = x @ weights["gate"], x @ weights["up"]
    return (jax.nn.silu(gate) * up) @ weights["down"]


def run_tower(
    tower: Tower,
    params: Mapping[str, jax.Array],
    x: jax.Array,
    how: Sharded,
    mix: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array],
) -> jax.Array:
    """All layers as a scan, each computed again in the backward pass."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, stacked):
        weights = {role: how.gather(stacked[role], role) for role in tower.matrices}
        x = how.pin(x + mix(weights, rms_norm(x, stacked["attention_norm"])))
        return how.pin(x + mlp(weights, rms_norm(x, stacked["mlp_norm"]))), None

    stacks = {role: leaf for role, leaf in params.items() if role not in tower.tail}
    x, _ = jax.lax.scan(layer, x, stacks)
    for role in tower.tail:
        weight = how.gather(params[role], role)
        x = x.reshape(x.shape[0], -1, weight.shape[0]) @ weight
    return x


def next_token_loss(x: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy; logits in bf16, their sums in fp32."""
    logits = (x @ head).astype(jnp.float32)
    wanted = jnp.roll(tokens, -1, axis=1)[..., None]
    picked = jnp.take_along_axis(logits, wanted, axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def loss_function(
    model: Model, how: Sharded
) -> Callable[[Params, jax.Array], jax.Array]:
    """Loss of parameters on tokens [batch, sequence]."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        ends = params["ends"]
        embedding = how.gather(ends["embedding"], "embedding")
        mix = functools.partial(attention, head_size=model.head_size, attend=how.attend)
        total = jnp.zeros(())
        for number, tower in enumerate(model.towers):
            length = int(tokens.shape[1] * TOKEN_SHARES.get(tower.name, 1))
            x = how.pin(how.spread(embedding[tokens[:, :length]]))
            missing = max(0, tower.width - model.width)
            x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)))[..., : tower.width]
            x = run_tower(tower, params[tower.name], x, how, mix)
            if number:
                total += jnp.mean(jnp.square(x.astype(jnp.float32)))
                continue
            head = embedding.T if model.tied else how.gather(ends["head"], "head")
            total += next_token_loss(rms_norm(x, ends["norm"]), head, tokens)
        return total

    return loss
