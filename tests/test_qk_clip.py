"""QK-clip: exactly the logits of the heads above the threshold, scaled onto it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from dmuon_jax.qk_clip import (
    clip_attention,
    clip_factors,
    clip_mla,
    clip_qk,
    max_attention_logits,
)
from tests.references import normal

IN, DIM, LENGTH = 12, 4, 6


def project(x, weights):
    return jnp.einsum("bli,ihd->blhd", x, weights["kernel"]) + weights["bias"]


def weights(heads, seed, scale=1.0):
    kernel, bias = normal(IN, heads, DIM, seed=seed), normal(heads, DIM, seed=seed + 1)
    return {"kernel": jnp.asarray(scale * kernel), "bias": jnp.asarray(scale * bias)}


def all_logits(q, k):
    """``[batch, heads, query, key]`` in NumPy."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])


def test_factors():
    found = clip_factors(jnp.asarray([-5.0, 50.0, 100.0, 400.0, np.inf, np.nan]), 100.0)
    np.testing.assert_allclose(found, [1, 1, 1, 0.25, 1, 1])
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        clip_factors(jnp.ones(2), 0)


def test_max_logits_with_a_mask():
    q, k = normal(2, LENGTH, 4, DIM), normal(2, LENGTH, 2, DIM, seed=1)
    logits = all_logits(q, k)
    found = max_attention_logits(jnp.asarray(q), jnp.asarray(k))
    np.testing.assert_allclose(found, logits.max(axis=(0, 2, 3)), rtol=1e-5)
    mask = np.tril(np.ones((LENGTH, LENGTH), bool))
    found = max_attention_logits(jnp.asarray(q), jnp.asarray(k), jnp.asarray(mask))
    right = np.where(mask, logits, -np.inf).max(axis=(0, 2, 3))
    np.testing.assert_allclose(found, right, rtol=1e-5)
    assert np.any(found < logits.max(axis=(0, 2, 3)))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_are_scaled_by_exactly_gamma(kv_heads):
    x = jnp.asarray(normal(2, LENGTH, IN, seed=9))
    query, key = weights(4, 0), weights(kv_heads, 2)
    before = all_logits(*np.asarray(project(x, query)[None]), np.asarray(project(x, key)))
    largest = before.max(axis=(0, 2, 3))
    threshold = float(np.sort(largest)[1:3].mean())  # two heads above, two below
    gamma = np.minimum(1, threshold / largest)
    assert sorted(gamma < 1) == [False, False, True, True]
    query, key = jax.jit(clip_qk)(query, key, jnp.asarray(largest), threshold)
    q, k = project(x, query), project(x, key)
    after = all_logits(np.asarray(q), np.asarray(k))
    np.testing.assert_allclose(after, gamma[:, None, None] * before, atol=1e-4)
    limit = np.minimum(largest, threshold)
    np.testing.assert_allclose(max_attention_logits(q, k), limit, rtol=1e-5)


def test_equal_heads_share_the_factor():
    query, key = weights(2, 0), weights(2, 2)
    new_query, new_key = clip_qk(query, key, jnp.asarray([400.0, 1.0]))
    for old, new in ((query, new_query), (key, new_key)):
        ratio = np.asarray(new["kernel"] / old["kernel"])
        np.testing.assert_allclose(ratio[:, 0], 0.5, rtol=1e-6)
        np.testing.assert_array_equal(new["kernel"][:, 1], old["kernel"][:, 1])


def test_latent_attention():
    content, rotary, value, heads, latent = 4, 2, 3, 2, 8
    x = normal(LENGTH, latent)
    q_up = normal(latent, heads, content + rotary, seed=1)
    kv_up = normal(latent, heads, content + value, seed=2)
    k_rotary = normal(LENGTH, rotary, seed=3)

    def logits(q_up, kv_up):
        q = np.einsum("lr,rhd->lhd", x, q_up)
        k = np.einsum("lr,rhd->lhd", x, kv_up)
        parts = np.einsum("qhd,khd->hqk", q[..., :content], k[..., :content])
        return parts + np.einsum("qhd,kd->hqk", q[..., content:], k_rotary)

    new_q, new_kv = clip_mla(
        jnp.asarray(q_up), jnp.asarray(kv_up), jnp.asarray([300.0, 10.0]), content
    )
    gamma = np.array([1 / 3, 1])[:, None, None]
    found, right = logits(new_q, new_kv), gamma * logits(q_up, kv_up)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(new_kv[..., content:], kv_up[..., content:])


def test_scanned_layers():
    layers = 3
    query = jnp.asarray(normal(layers, IN, 2, DIM))
    tree = {"kernel": query, "bias": jnp.asarray(normal(layers, 2, DIM))}
    largest = jnp.asarray([[400.0, 1], [1, 1], [1, 100 * 9]])
    new, _ = clip_qk(tree, tree, largest)
    right = np.array([[0.5, 1], [1, 1], [1, 1 / 3]])
    ratio = np.asarray(new["kernel"] / query)
    np.testing.assert_allclose(ratio.mean(axis=(1, 3)), right, rtol=1e-5)
    ratio = np.asarray(new["bias"] / tree["bias"])
    np.testing.assert_allclose(ratio.mean(axis=2), right, rtol=1e-5)


@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_flax_attention(flax):
    x = jnp.asarray(normal(2, LENGTH, 8))
    if flax == "linen":
        module = linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)
        params = module.init(jax.random.key(0), x)["params"]
    else:
        module = nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=nnx.Rngs(0))
        params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    tree = {"block": {"attention": params, "other": jnp.ones(3)}, "head": jnp.ones(2)}
    largest = jnp.asarray([900.0, 7.0])
    new = clip_attention(tree, {"block": {"attention": largest}})
    assert jax.tree.structure(new) == jax.tree.structure(tree)
    kernel = np.asarray(new["block"]["attention"]["key"]["kernel"])
    old = np.asarray(params["key"]["kernel"])
    np.testing.assert_allclose(kernel[:, 0] / old[:, 0], 1 / 3, rtol=1e-5)
    np.testing.assert_array_equal(kernel[:, 1], old[:, 1])
    for name in ("value", "out"):
        np.testing.assert_array_equal(
            new["block"]["attention"][name]["kernel"], params[name]["kernel"]
        )


def test_bad_input():
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads=2, got 3"):
        clip_qk(weights(3, 0), weights(2, 1), jnp.ones(3))
    with pytest.raises(ValueError, match=r"weights must have shape \[ ..., 4, head_dim"):
        clip_qk(weights(2, 0), weights(2, 1), jnp.ones(4))
    with pytest.raises(ValueError, match=r"params must hold \['key', 'query'\]"):
        clip_attention({"block": {"q": 1}}, {"block": jnp.ones(2)})
