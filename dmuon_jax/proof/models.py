"""Transformers to simulate, built from the shapes of a shipped workload.

A model is one or several towers of equal layers (RMSNorm, attention with grouped or
latent keys, an MLP or routed experts) with an embedding and a next-token loss on the
first tower or what follows it. What the table does not hold (vocabulary, size of a head,
experts of a token) is below. The towers of vision-language-action models run side by
side on their own tokens, an assumption that only sets how much forward and backward work
there is beside the update.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dmuon_jax.planning.workloads import Matrices, Workload, load_workload
from dmuon_jax.proof.blocks import mixer, mlp, rms_norm
from dmuon_jax.proof.experts import Layout, mixture

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
    "moonlight-16b-a3b": (163840, False, 128),
    "qwen3-30b-a3b": (151936, False, 128),
    "kimi-k2": (163840, False, 128),
}
# Experts that a token is sent to, likewise.
TOP_K = {"moonlight-16b-a3b": 6, "qwen3-30b-a3b": 8, "kimi-k2": 8}

# Tokens of a tower for one token of the sequence.
TOKEN_SHARES = {"action": 1 / 16, "vit": 1 / 4, "vision": 1 / 4}
# Rows of the table that stand for several matrices of one layer.
PARTS = {
    ("qkvo", 4): ("q", "k", "v", "o"),
    ("kv", 2): ("k", "v"),
    ("gate_up", 2): ("gate", "up"),
}
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sharded:
    """How a step is spread over devices.

    Attributes:
      gather: turns a stored weight, given with its role, into the whole bf16 weight.
      pin: keeps activations split over the batch.
      spread: splits what an embedding table gives, and its gradient, like the table.
      attend: attention on queries, keys and values [batch, token, head, channel].
      to_experts: lays [batch, experts, slots, width] out as the experts are.
      to_tokens: lays the same out as the tokens are.
    """

    gather: Callable[[jax.Array, str], jax.Array]
    pin: Callable[[jax.Array], jax.Array]
    spread: Callable[[jax.Array], jax.Array]
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    to_experts: Layout
    to_tokens: Layout


@dataclasses.dataclass(frozen=True)
class Tower:
    """Equal layers.

    Attributes:
      name: prefix of its matrices in the table, or "layers".
      layers: how many.
      matrices: shape of the matrices of one layer by role; stacks of experts have three
        dimensions.
      tail: shapes of matrices behind the last layer.
      follows: whether it goes on with what the tower before it gives.
    """

    name: str
    layers: int
    matrices: Mapping[str, Shape]
    tail: Mapping[str, Shape]
    follows: bool = False

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        names = [role for role in ("q", "qkv", "wkv_a") if role in self.matrices]
        return self.matrices[names[0]][0]

    @property
    def experts(self) -> int:
        """Experts of a layer, zero in a dense tower."""
        return self.matrices.get("experts_down", (0,))[0]


@dataclasses.dataclass(frozen=True)
class Model:
    """What there is to build."""

    name: str
    towers: tuple[Tower, ...]
    vocabulary: int
    tied: bool
    head_size: int
    top_k: int = 0

    @property
    def width(self) -> int:
        """Width of the tower that the loss belongs to."""
        return self.towers[0].width


def parts(name: str, shape: Shape, copies: int) -> dict[str, Shape]:
    """Matrices of one layer that one row of the table stands for."""
    if copies == 1:
        return {name: shape}
    if (name, copies) not in PARTS:
        raise NotImplementedError(f"copies of {name} must be 1, got {copies}")
    return {part: shape for part in PARTS[name, copies]}


def tower_of(name: str, rows: list[tuple[str, Matrices]]) -> Tower:
    """A tower from its rows (role, matrices)."""
    layers = next(item.count for role, item in rows if role in ("down", "fc2"))
    matrices: dict[str, Shape] = {}
    tail: dict[str, Shape] = {}
    for role, item in rows:
        if item.count % layers:
            tail[role] = item.shape
        else:
            matrices |= parts(role, item.shape, item.count // layers)
    return Tower(name, layers, matrices, tail)


def dense_towers(workload: Workload) -> tuple[Tower, ...]:
    """Towers side by side, one for each prefix in the table."""
    towers: dict[str, list[tuple[str, Matrices]]] = {}
    for item in workload.matrices:
        prefix, _, role = item.name.rpartition(".")
        towers.setdefault(prefix or "layers", []).append((role, item))
    return tuple(tower_of(prefix, rows) for prefix, rows in towers.items())


def expert_towers(workload: Workload) -> tuple[Tower, ...]:
    """The first layers with a dense MLP, if there are any, then those with experts."""
    attention: dict[str, Shape] = {}
    dense: dict[str, Shape] = {}
    routed: dict[str, Shape] = {}
    counts = {item.name: item.count for item in workload.matrices}
    first = counts.get("dense.down", 0)
    rest = workload.layers - first
    for item in workload.matrices:
        prefix, _, role = item.name.rpartition(".")
        if prefix == "dense":
            dense |= parts(role, item.shape, item.count // first)
        elif prefix == "":
            attention |= parts(role, item.shape, item.count // workload.layers)
        else:
            copies = item.count // (rest * math.prod(item.stack))
            found = parts(role, (*item.stack, *item.shape), copies)
            routed |= {f"{prefix}_{part}": shape for part, shape in found.items()}
    if not attention:
        raise NotImplementedError(f"{workload.name} must have attention, got none")
    towers = (Tower("layers", rest, attention | routed, {}, follows=bool(first)),)
    return (Tower("dense", first, attention | dense, {}), *towers) if first else towers


def model_named(name: str) -> Model:
    """The model called `name`.

    Raises:
      ValueError: the workload table holds no such model.
      NotImplementedError: it does, but not enough of the model to run it.
    """
    workload = load_workload(name)
    if name not in CONFIGS:
        known = ", ".join(sorted(CONFIGS))
        raise NotImplementedError(f"model must be one of {known}, got {name!r}")
    routed = any(item.name.startswith("experts.") for item in workload.matrices)
    towers = (expert_towers if routed else dense_towers)(workload)
    return Model(name, towers, *CONFIGS[name], TOP_K.get(name, 0))


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
        if tower.experts:
            leaves["router"] = shape(tower.layers, tower.width, tower.experts)
        for norm in ("attention_norm", "mlp_norm"):
            leaves[norm] = shape(tower.layers, tower.width)
        tree[tower.name] = leaves
    return tree


def is_matrix(tower: str, role: str) -> bool:
    """Whether Muon updates it: all matrices but embedding, head and routers."""
    return tower != "ends" and role != "router" and not role.endswith("norm")


def feed_forward(
    weights: Mapping[str, jax.Array], x: jax.Array, how: Sharded, top_k: int
) -> jax.Array:
    """An MLP, or routed experts beside the shared one."""
    if "router" not in weights:
        return mlp(weights, x)
    y = mixture(weights, x, top_k, how.to_experts, how.to_tokens)
    prefix = "shared_"
    shared = {
        role.removeprefix(prefix): weight
        for role, weight in weights.items()
        if role.startswith(prefix)
    }
    return y + mlp(shared, x) if shared else y


def run_tower(
    model: Model,
    tower: Tower,
    params: Mapping[str, jax.Array],
    x: jax.Array,
    how: Sharded,
) -> jax.Array:
    """All layers as a scan, each computed again in the backward pass."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, stacked):
        weights = {
            role: how.gather(leaf, role)
            for role, leaf in stacked.items()
            if not role.endswith("norm")
        }
        normed = rms_norm(x, stacked["attention_norm"])
        x = how.pin(x + mixer(weights, normed, model.head_size, how.attend))
        normed = rms_norm(x, stacked["mlp_norm"])
        return how.pin(x + feed_forward(weights, normed, how, model.top_k)), None

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
        outputs: list[jax.Array] = []
        for tower in model.towers:
            if tower.follows:
                x = outputs.pop()
            else:
                length = int(tokens.shape[1] * TOKEN_SHARES.get(tower.name, 1))
                x = how.pin(how.spread(embedding[tokens[:, :length]]))
                missing = max(0, tower.width - model.width)
                x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)))[..., : tower.width]
            outputs.append(run_tower(model, tower, params[tower.name], x, how))
        head = embedding.T if model.tied else how.gather(ends["head"], "head")
        total = next_token_loss(rms_norm(outputs[0], ends["norm"]), head, tokens)
        for x in outputs[1:]:
            total += jnp.mean(jnp.square(x.astype(jnp.float32)))
        return total

    return loss
