"""QK-clip: keeps attention logits bounded by rescaling query and key weights.

The other half of MuonClip (Kimi Team, "Kimi K2", arXiv 2507.20534, section 2.1). After an
optimizer step, a head whose largest logit S of that step exceeded the threshold t gets its
logits scaled by ``gamma = min(1, t / S)``, through its projections: what it computes is the
same, softened. Heads below the threshold do not change at all.

Weights are trees of arrays with the heads and the head dimension last, as Flax has them:
kernels ``[in, heads, head_dim]``, biases ``[heads, head_dim]``. Scanned layers come first
in both weights and logits: ``[layers, in, heads, head_dim]`` and ``[layers, heads]``.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


def max_attention_logits(
    query: jax.Array, key: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """The largest ``q . k / sqrt(head_dim)`` of each head, over batch and positions.

    Builds all logits; a flash kernel that returns its row maxima is cheaper.

    Args:
      query: ``[..., length, heads, head_dim]``.
      key: ``[..., length, kv_heads, head_dim]``; consecutive query heads share one.
      mask: bool, broadcastable to ``[..., heads, query length, key length]``; False
        positions do not count.

    Returns:
      ``[heads]``, float32 or wider.
    """
    heads, kv_heads = query.shape[-2], key.shape[-2]
    check_groups(heads, kv_heads)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    key = jnp.repeat(key, heads // kv_heads, axis=-2)
    logits = jnp.einsum(
        "...qhd,...khd->...hqk", query, key, preferred_element_type=wide
    )
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    largest = jnp.max(logits, axis=(-2, -1))
    largest = jnp.max(largest, axis=tuple(range(largest.ndim - 1)))
    return largest / jnp.sqrt(jnp.asarray(query.shape[-1], wide))


def clip_factors(
    max_logits: jax.Array, threshold: float | jax.Array = 100.0
) -> jax.Array:
    """``min(1, threshold / max_logits)``; 1 where the logit is not finite.

    Raises:
      ValueError: if ``threshold`` is not positive.
    """
    if not isinstance(threshold, Tracer) and not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}")
    above = jnp.isfinite(max_logits) & (max_logits > threshold)
    return jnp.where(above, threshold / jnp.where(above, max_logits, 1), 1)


def clip_qk(
    query: Any,
    key: Any,
    max_logits: jax.Array,
    threshold: float | jax.Array = 100.0,
) -> tuple[Any, Any]:
    """Query and key weights whose logits are scaled by each head's factor.

    With a key head for each query head both take ``sqrt(gamma)``. Where query heads share
    a key head, that takes the root of their smallest factor, and each query head what is
    left of its own, so that every head's logits are scaled by exactly its gamma.

    Args:
      query: a tree of ``[..., heads, head_dim]``.
      key: a tree of ``[..., kv_heads, head_dim]``.
      max_logits: ``[..., heads]``, leading layers as the weights.
      threshold: 100 in Kimi K2.

    Raises:
      ValueError: if the heads do not fit, or the threshold is not positive.
    """
    gamma = clip_factors(jnp.asarray(max_logits), threshold)
    heads = gamma.shape[-1]
    kv_heads = {x.shape[-2] for x in jax.tree.leaves(key)}
    if len(kv_heads) != 1:
        raise ValueError(
            f"key weights must have one number of heads, got {sorted(kv_heads)}"
        )
    (kv_heads,) = kv_heads
    check_groups(heads, kv_heads)
    grouped = gamma.reshape(*gamma.shape[:-1], kv_heads, heads // kv_heads)
    shared = jnp.sqrt(jnp.min(grouped, axis=-1, keepdims=True))
    own = (grouped / shared).reshape(gamma.shape)
    return scale_heads(query, own), scale_heads(key, shared[..., 0])


def clip_mla(
    query_up: Any,
    key_value_up: Any,
    max_logits: jax.Array,
    content_dim: int,
    threshold: float | jax.Array = 100.0,
) -> tuple[Any, Any]:
    """As ``clip_qk`` for multi-head latent attention, with its rotary key left alone.

    Content parts of query and key take ``sqrt(gamma)``, the rotary query takes ``gamma``;
    the rotary key is shared by all heads, and values do not take part.

    Args:
      query_up: a tree of ``[..., heads, content_dim + rotary_dim]``, content first.
      key_value_up: a tree of ``[..., heads, content_dim + value_dim]``, key content first.
      max_logits: ``[..., heads]``.
      content_dim: head dimension of the part without rotary embedding.
      threshold: see ``clip_qk``.

    Raises:
      ValueError: if the heads do not fit, or the threshold is not positive.
    """
    gamma = clip_factors(jnp.asarray(max_logits), threshold)
    root = jnp.sqrt(gamma)
    one = jnp.ones_like(gamma)
    return (
        scale_heads(query_up, root, (content_dim, gamma)),
        scale_heads(key_value_up, root, (content_dim, one)),
    )


def clip_attention(
    params: Any, max_logits: Any, threshold: float | jax.Array = 100.0
) -> Any:
    """``clip_qk`` on every attention module of a tree of parameters.

    Args:
      params: nested dicts; an attention module holds ``"query"`` and ``"key"``, as those
        of Flax do (``nnx.to_pure_dict(nnx.state(model))`` in NNX).
      max_logits: nested dicts with the largest logits where ``params`` has an attention
        module. What it does not name stays as it is.
      threshold: see ``clip_qk``.

    Returns:
      A tree like ``params``.

    Raises:
      ValueError: if ``params`` lacks a name, or what ``clip_qk`` raises.
    """
    if isinstance(max_logits, Mapping):
        wanted = set(max_logits)
    else:
        wanted = {"query", "key"}
    if not isinstance(params, Mapping) or not wanted <= set(params):
        found = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(f"params must hold {sorted(wanted)}, got {found}")
    if isinstance(max_logits, Mapping):
        changed = {
            name: clip_attention(params[name], below, threshold)
            for name, below in max_logits.items()
        }
    else:
        query, key = clip_qk(params["query"], params["key"], max_logits, threshold)
        changed = {"query": query, "key": key}
    return {**params, **changed}


def scale_heads(
    tree: Any,
    factors: jax.Array,
    rest: tuple[int, jax.Array] | None = None,
) -> Any:
    """Every leaf ``[layers..., ..., heads, dim]`` times ``factors`` ``[layers..., heads]``.

    ``rest``: where in ``dim`` the entries start that take other factors, and those.
    """

    def scale(x):
        layers, heads = factors.shape[:-1], factors.shape[-1]
        depth = len(layers)
        if x.ndim < depth + 2 or (*x.shape[:depth], x.shape[-2]) != factors.shape:
            raise ValueError(
                f"weights must have shape [{', '.join(map(str, layers))} ..., {heads}, "
                f"head_dim], got {x.shape}"
            )
        shape = (*layers, *(1,) * (x.ndim - depth - 2), heads, 1)
        factor = factors.reshape(shape)
        if rest is not None:
            start, others = rest
            first = jnp.arange(x.shape[-1]) < start
            factor = jnp.where(first, factor, others.reshape(shape))
        return x * factor.astype(x.dtype)

    return jax.tree.map(scale, tree)


def check_groups(heads: int, kv_heads: int) -> None:
    """Raises ``ValueError`` unless each key head serves equally many query heads."""
    if heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads={kv_heads}, got {heads}"
        )
