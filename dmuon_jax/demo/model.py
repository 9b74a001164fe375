"""A byte-level GPT in Flax NNX, and which of its leaves Muon updates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from optax.contrib import MuonDimensionNumbers

NUM_BYTES = 256


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
      width: Features of the residual stream.
      num_layers: Transformer blocks.
      num_heads: Query heads; there are half as many key/value heads.
      hidden: Features inside the gated MLP.
      length: Positions the model sees.
    """

    width: int = 384
    num_layers: int = 6
    num_heads: int = 6
    hidden: int = 1024
    length: int = 128


class Attention(nnx.Module):
    """Causal attention in which two query heads share one key/value head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.width
        self.head_dim = width // config.num_heads
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        # Keys and values in one leaf [width, 2, width / 2]: two matrices for Muon.
        self.key_value = nnx.LinearGeneral(
            width, (2, width // 2), use_bias=False, rngs=rngs
        )
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        query = self.query(x).reshape(batch, length, -1, self.head_dim)
        key_value = self.key_value(x).reshape(batch, length, 2, -1, self.head_dim)
        mixed = jax.nn.dot_product_attention(
            query, key_value[:, :, 0], key_value[:, :, 1], is_causal=True
        )
        return self.out(mixed.reshape(batch, length, width))


class Mlp(nnx.Module):
    """Gated MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width, hidden = config.width, config.hidden
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One transformer layer, normalised before each half."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nnx.Module):
    """Bytes ``[batch, length]`` in, logits ``[batch, length, 256]`` out."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(NUM_BYTES, config.width, rngs=rngs)
        self.position = nnx.Embed(config.length, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.unembed = nnx.Linear(config.width, NUM_BYTES, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.norm(x))


def muon_dimension_numbers(params: Any) -> Any:
    """Marks the blocks' kernels as Muon's and everything else (``None``) as Adam's.

    Args:
      params: The model's parameters as a nested dict.

    Returns:
      The same tree; a kernel ``[in, ..., out]`` is contracted over its first axis.
    """

    def mark(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
        is_matrix = path[0].key == "blocks" and leaf.ndim >= 2
        return MuonDimensionNumbers(0, leaf.ndim - 1) if is_matrix else None

    return jax.tree_util.tree_map_with_path(mark, params)
