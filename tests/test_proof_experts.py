"""The simulated layer of routed experts: its values, its FLOPs, what it moves."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmuon_jax.proof.experts import mixture, routes
from dmuon_jax.proof.models import Model, Tower
from dmuon_jax.proof.simulate import simulate

EXPERTS, TOP_K, WIDTH, HIDDEN, TOKENS, LAYERS = 8, 2, 64, 32, 16, 2
STACK = (EXPERTS, WIDTH, HIDDEN)
ATTENTION = {"wq": (WIDTH, 192), "wkv_a": (WIDTH, 80), "wkv_b": (16, 128)}
ATTENTION |= {"wo": (64, WIDTH)}
ROUTED = {"experts_gate": STACK, "experts_up": STACK}
ROUTED |= {"experts_down": (EXPERTS, HIDDEN, WIDTH)}
SHARED = {"shared_gate": (WIDTH, 48), "shared_up": (WIDTH, 48), "shared_down": (48, WIDTH)}
DENSE = {"gate": (WIDTH, 96), "up": (WIDTH, 96), "down": (96, WIDTH)}
VOCABULARY = 256
TINY = Model(
    name="tiny-experts",
    towers=(
        Tower("dense", 1, ATTENTION | DENSE, {}),
        Tower("layers", LAYERS, ATTENTION | ROUTED | SHARED, {}, follows=True),
    ),
    vocabulary=VOCABULARY,
    tied=False,
    head_size=32,
    top_k=TOP_K,
)


def elements(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


def silu(x):
    return x / (1 + np.exp(-x))


def slow_mixture(weights, x, slots):
    """Token after token, each choice as long as its expert has slots left."""
    y = np.zeros_like(x)
    for sequence, out in zip(x, y, strict=True):
        used = np.zeros(EXPERTS, int)
        for token, row in enumerate(sequence):
            logits = row @ weights["router"]
            chosen = np.argsort(-logits)[:TOP_K]
            share = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
            for expert, part in zip(chosen, share, strict=True):
                used[expert] += 1
                if used[expert] > slots:
                    continue
                gate, up, down = (
                    weights[f"experts_{role}"][expert] for role in ("gate", "up", "down")
                )
                out[token] += part * (silu(row @ gate) * (row @ up)) @ down
    return y


def test_values_are_those_of_a_loop_over_tokens():
    rng = np.random.default_rng(0)
    weights = {role: rng.normal(size=shape) / 8 for role, shape in ROUTED.items()}
    weights["router"] = rng.normal(size=(WIDTH, EXPERTS))
    x = rng.normal(size=(3, TOKENS, WIDTH))
    same = functools.partial(jnp.multiply, 1)
    cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights)
    found = mixture(cast, jnp.asarray(x, jnp.float32), TOP_K, same, same)
    slots = TOKENS * TOP_K // EXPERTS
    np.testing.assert_allclose(found, slow_mixture(weights, x, slots), atol=2e-5)
    assert np.abs(slow_mixture(weights, x, slots) - slow_mixture(weights, x, 99)).max() > 0.01


def test_slots_that_no_token_fills_and_tokens_that_find_none():
    chosen = jnp.array([[0, 1], [0, 1], [0, 1], [0, 1]])
    route = routes(chosen, jnp.ones((4, 2)), 4)
    np.testing.assert_array_equal(route.filled, [[1, 1], [1, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(route.source[:2], [[0, 1], [0, 1]])
    np.testing.assert_array_equal(route.share, [[1, 1], [1, 1], [0, 0], [0, 0]])


@pytest.fixture(scope="module")
def simulation():
    return simulate(
        TINY,
        {"fsdp": 4, "expert": 2},
        "cpu",
        sequence=TOKENS,
        optimizers=("adamw", "dmuon"),
    )


def test_flops_are_those_of_the_experts_that_tokens_chose(simulation):
    """Forward, forward again but for what only the output needs, twice that backward."""
    router = WIDTH * EXPERTS
    routed = TOP_K * elements(ROUTED) // EXPERTS
    mixer = 2 * TOKENS * elements(ATTENTION) + 2 * 2 * TOKENS**2 * 192
    sparse = mixer + 2 * TOKENS * (router + routed + elements(SHARED))
    dense = mixer + 2 * TOKENS * elements(DENSE)
    head = 3 * 2 * TOKENS * WIDTH * VOCABULARY
    last = 2 * TOKENS * 48 * WIDTH, 2 * TOKENS * 96 * WIDTH
    wanted = LAYERS * (4 * sparse - last[0]) + 4 * dense - last[1] + head
    adamw = simulation.runs[0].audit
    assert adamw.dot_flops == wanted
    assert adamw.flops.unknown_loops == ()


def test_tokens_travel_between_experts_and_weights_only_over_fsdp(simulation):
    audit = simulation.runs[0].audit
    loops = [item for item in audit.collectives if item.in_loop]
    sent = [item for item in loops if item.kind == "all-to-all"]
    slots = TOKENS * TOP_K // EXPERTS
    # Out, back; again in the backward pass; both gradients. Widened to 4 bytes on CPU.
    assert sum(item.run_bytes for item in sent) >= LAYERS * 4 * 4 * (
        EXPERTS * slots * WIDTH
    )
    assert {item.group_size for item in sent} == {2}
    stacks = [item for item in loops if item.kind == "all-gather" and item.group_size == 4]
    assert sum(item.run_bytes for item in stacks) >= 2 * LAYERS * 4 * elements(ROUTED) // 2


def test_experts_are_orthogonalized_where_they_are(simulation):
    adamw, ours = (run.audit for run in simulation.runs)
    assert len(ours.collectives_in_loops) == len(adamw.collectives_in_loops)
    assert ours.dot_flops > adamw.dot_flops
    exchanged = [item for item in ours.collectives if "owners" in item.op_name]
    assert exchanged and all(item.group_size in (4, 8) for item in exchanged)
