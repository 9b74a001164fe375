"""Layers of the transformers to simulate: norm, attention, MLP and experts.

Arrays in, arrays out; how they are spread over devices is told by constraints from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Weights = Mapping[str, jax.Array]

# Channels of a latent head that carry a rotary position (DeepSeek-V2, arXiv 2405.04434).
ROTARY = 64


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
    weights: Weights, x: jax.Array, head_size: int, attend: Callable
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


def mlp(weights: Weights, x: jax.Array) -> jax.Array:
    """SwiGLU, or a GELU between two matrices."""
    if "fc1" in weights:
        return jax.nn.gelu(x @ weights["fc1"]) @ weights["fc2"]
    if "gate_up" in weights:
        gate, up = jnp.split(x @ weights["gate_up"], 2, axis=-1)
    else:
        gate, up = x @ weights["gate"], x @ weights["up"]
    return (jax.nn.silu(gate) * up) @ weights["down"]


def latent_attention(
    weights: Weights, x: jax.Array, head_size: int, attend: Callable
) -> jax.Array:
    """Causal attention whose keys and values are expanded from a narrow latent.

    Of a head's channels the first `head_size` carry no position, `ROTARY` more do; those
    of the keys are shared by all heads (multi-head latent attention, arXiv 2405.04434).
    Values are padded to the width of the keys, as fused kernels want them.
    """
    q = x @ weights["wq"] if "wq" in weights else x @ weights["wq_a"] @ weights["wq_b"]
    both = x @ weights["wkv_a"]
    latent, shared = both[..., :-ROTARY], both[..., -ROTARY:]
    q = heads(q, head_size + ROTARY)
    count = q.shape[2]
    wide = heads(latent @ weights["wkv_b"], weights["wkv_b"].shape[1] // count)
    k, v = jnp.split(wide, [head_size], axis=-1)
    shared = jnp.broadcast_to(rotate(heads(shared, ROTARY)), (*k.shape[:3], ROTARY))
    k = jnp.concatenate([k, shared], axis=-1)
    q = jnp.concatenate([q[..., :head_size], rotate(q[..., head_size:])], axis=-1)
    missing = k.shape[-1] - v.shape[-1]
    padded = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing)))
    mixed = attend(q, k, padded)[..., : v.shape[-1]]
    return mixed.reshape(*x.shape[:2], -1) @ weights["wo"]


def mixer(
    weights: Weights, x: jax.Array, head_size: int, attend: Callable
) -> jax.Array:
    """The attention that the weights' names ask for."""
    chosen = latent_attention if "wkv_a" in weights else attention
    return chosen(weights, x, head_size, attend)
