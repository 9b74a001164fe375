"""A layer of routed experts: tokens go to the experts that a router chose, and back.

Every expert of a sequence has as many slots as even routing fills, ``tokens * top_k /
experts``; what exceeds them is dropped. So the FLOPs are those of even routing, and
all shapes are static. Slots are found by sorting the choices by expert; with experts
spread over a mesh axis the two changes of layout are all-to-alls (GShard, arXiv
2006.16668).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Layout = Callable[[jax.Array], jax.Array]


class Routes(NamedTuple):
    """Where the tokens of one sequence go.

    Attributes:
      source: [experts, slots] token in each slot.
      filled: [experts, slots] whether a token is there.
      slot: [tokens, top_k] slot of each choice, counted over all experts.
      share: [tokens, top_k] weight of each choice, zero where it found no slot.
    """

    source: jax.Array
    filled: jax.Array
    slot: jax.Array
    share: jax.Array


def routes(chosen: jax.Array, share: jax.Array, experts: int) -> Routes:
    """Gives the choices of one sequence their slots, first come first served.

    Args:
      chosen: [tokens, top_k] number of each chosen expert.
      share: [tokens, top_k] weight of each choice.
      experts: how many there are.
    """
    tokens, top_k = chosen.shape
    slots = -(-tokens * top_k // experts)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0)
    starts = jnp.cumsum(sizes) - sizes
    rank = (jnp.argsort(order) - starts[flat]).reshape(chosen.shape)
    place = jnp.minimum(starts[:, None] + jnp.arange(slots), flat.size - 1)
    return Routes(
        source=order[place] // top_k,
        filled=jnp.arange(slots) < sizes[:, None],
        slot=jnp.where(rank < slots, chosen * slots + rank, 0),
        share=jnp.where(rank < slots, share, 0),
    )


def dispatch(x: jax.Array, route: Routes) -> jax.Array:
    """[tokens, width] to [experts, slots, width]; empty slots are zero."""
    return jnp.where(route.filled[..., None], x[route.source], 0)


def combine(y: jax.Array, route: Routes) -> jax.Array:
    """[experts, slots, width] to [tokens, width], weighted."""
    picked = y.reshape(-1, y.shape[-1])[route.slot]
    return jnp.sum(picked * route.share[..., None].astype(y.dtype), axis=1)


def mixture(
    weights: Mapping[str, jax.Array],
    x: jax.Array,
    top_k: int,
    to_experts: Layout,
    to_tokens: Layout,
) -> jax.Array:
    """SwiGLU experts on the tokens that chose them.

    Args:
      weights: "router" [width, experts], "experts_gate" and "experts_up" [experts,
        width, hidden], "experts_down" [experts, hidden, width].
      x: [batch, tokens, width].
      top_k: experts of a token; their weights add up to one.
      to_experts: lays [batch, experts, slots, width] out with each expert's slots at
        the expert.
      to_tokens: lays the same out as the tokens are.
    """
    logits = (x @ weights["router"]).astype(jnp.float32)
    share, chosen = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    share = share / jnp.sum(share, axis=-1, keepdims=True)
    give = functools.partial(routes, experts=logits.shape[-1])
    route = jax.vmap(give)(chosen, share)
    sent = to_experts(jax.vmap(dispatch)(x, route))
    gate = jnp.einsum("besd,edf->besf", sent, weights["experts_gate"])
    up = jnp.einsum("besd,edf->besf", sent, weights["experts_up"])
    hidden = jax.nn.silu(gate) * up
    back = jnp.einsum("besf,efd->besd", hidden, weights["experts_down"])
    return jax.vmap(combine)(to_tokens(to_experts(back)), route)
