"""``dmuon`` in the place of ``optax.contrib.muon``: same arguments, values and state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from dmuon_jax import dmuon
from tests.references import normal, relative

SHAPES = {
    "bias": (8,),
    "heads": (8, 2, 12),
    "kernel": (12, 20),
    "stack": (4, 8, 16),
    "tall": (24, 8),
}
SPECS = {
    "bias": P(),
    "heads": P("x"),
    "kernel": P(None, "x"),
    "stack": P("x"),
    "tall": P("x"),
}
DIMS = {
    "bias": None,
    "heads": Dims(0, (1, -1)),
    "kernel": Dims(),
    "stack": Dims(-2, -1),
    "tall": Dims(0, 1),
}
RATE = optax.linear_schedule(0.1, 0.02, 4)
OPTIONS = {
    "defaults": {},
    "triple": {"ns_coeffs": (3.0, -3.2, 1.2), "ns_steps": 4},
    "table": {"ns_coeffs": ((4.0, -6.5, 2.7), (3.0, -3.2, 1.2)), "ns_steps": 3},
    "preset": {"ns_coeffs": "dion"},
    "momentum": {"beta": 0.8, "eps": 1e-3, "nesterov": False},
    "mu_dtype": {"mu_dtype": jnp.bfloat16},
    "adaptive": {"adaptive": True, "learning_rate": 1e-3},
    "spectral": {"preconditioning": "spectral"},
    "aol": {"preconditioning": "aol"},
    "schatten": {"preconditioning": "schatten"},
    "decay": {
        "consistent_rms": 0.2,
        "weight_decay": 0.1,
        "weight_decay_mask": {name: name != "kernel" for name in SHAPES},
    },
    "adam": {
        "adam_b1": 0.7,
        "adam_b2": 0.9,
        "adam_eps_root": 1e-3,
        "adam_weight_decay": 0.2,
        "adam_learning_rate": optax.constant_schedule(0.3),
    },
    "callable": {
        "muon_weight_dimension_numbers": lambda params: jax.tree.map(
            lambda x: Dims(0, -1) if x.ndim == 2 else None, params
        ),
    },
    "default rule": {"muon_weight_dimension_numbers": None},
}


def make(module, name):
    options = {"learning_rate": RATE, "muon_weight_dimension_numbers": DIMS}
    options |= OPTIONS[name]
    if module is dmuon:
        options |= {"method": "direct", "exchange_dtype": "float32"}
        options |= {"compute_dtype": "float32"}
    return module(**options)


def tree(seed, mesh=None, dtype=jnp.float32):
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        x = jnp.asarray(normal(*shape, seed=10 * seed + index), dtype)
        if mesh is not None:
            x = jax.device_put(x, NamedSharding(mesh, SPECS[name]))
        found[name] = x
    return found


def run(tx, mesh=None, steps=2):
    """Every update and the last state."""
    params = tree(7, mesh)
    state = tx.init(params)

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return updates, state, optax.apply_updates(params, updates)

    found = []
    for t in range(steps):
        updates, state, params = step(tree(t, mesh), state, params)
        found.append(updates)
    return found, state


@functools.cache
def four_devices(kind):
    axis_types = (getattr(AxisType, kind),)
    return Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=axis_types)


# On the mesh, only what looks at whole leaves or matrices could differ.
CASES = [(name, "one") for name in OPTIONS]
CASES += [("defaults", "Auto"), ("adaptive", "Auto"), ("adaptive", "Explicit")]
CASES += [("aol", "Auto"), ("decay", "Explicit")]


@pytest.mark.parametrize("name, kind", CASES)
def test_same_updates_and_state(name, kind):
    mesh = None if kind == "one" else four_devices(kind)
    found, state = run(make(dmuon, name), mesh)
    right, optax_state = run(make(optax.contrib.muon, name))
    assert jax.tree.structure(state) == jax.tree.structure(optax_state)
    for ours, theirs in zip(
        jax.tree.leaves(state), jax.tree.leaves(optax_state), strict=True
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert relative(ours, theirs) < 1e-5
    # A bfloat16 momentum moves by a rounding where one sum was ordered differently.
    limit = 2e-3 if name == "mu_dtype" else 2e-5
    for ours, theirs in zip(found, right, strict=True):
        for leaf in SHAPES:
            assert relative(ours[leaf], theirs[leaf]) < limit, leaf


def test_complex_parameters():
    shapes = {"wide": (6, 10), "tall": (9, 4)}

    def complex_tree(seed):
        return {
            name: jnp.asarray(
                normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 1)
            )
            for name, shape in shapes.items()
        }

    params, grads = complex_tree(0), complex_tree(2)
    results = []
    for tx in (optax.contrib.muon(0.1), dmuon(0.1), dmuon(0.1, method="gram")):
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        results.append(updates)
    for name in shapes:
        assert results[1][name].dtype == jnp.complex64
        assert relative(results[1][name], results[0][name]) < 1e-5
        assert relative(results[2][name], results[0][name]) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_zero_gradients_give_zero_updates(dtype):
    params = tree(0, dtype=dtype)
    grads = tree(1, dtype=dtype)
    grads["kernel"] = jnp.zeros_like(grads["kernel"])
    grads["stack"] = grads["stack"].at[2].set(0)
    tx = dmuon(0.1, consistent_rms=0.2, muon_weight_dimension_numbers=DIMS)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert np.all(np.asarray(updates["kernel"], np.float32) == 0)
    assert np.all(np.asarray(updates["stack"][2], np.float32) == 0)
    for x in jax.tree.leaves((updates, state)):
        assert np.isfinite(np.asarray(x, np.float32)).all()
    assert {name: x.dtype for name, x in updates.items()} == {
        name: jnp.dtype(dtype) for name in SHAPES
    }


def test_a_bad_leaf_poisons_no_other():
    mesh = four_devices("Auto")
    params = tree(7, mesh)
    tx = dmuon(0.1, muon_weight_dimension_numbers=DIMS, method="direct")
    state = tx.init(params)
    bad = tree(1, mesh)
    bad["kernel"] = bad["kernel"].at[0, 19].set(jnp.nan)
    step = jax.jit(tx.update)
    right, _ = step(tree(1, mesh), state, params)
    found, _ = step(bad, state, params)
    assert not np.isfinite(found["kernel"]).all()
    for name in set(SHAPES) - {"kernel"}:
        np.testing.assert_array_equal(found[name], right[name])


def test_trains_after_private_aggregation():
    """Per-example gradients, clipped and noised by optax, then Muon on their mean."""
    inputs = jnp.asarray(normal(16, 12))
    params = {"kernel": jnp.asarray(0.1 * normal(12, 20)), "bias": jnp.zeros(20)}
    targets = inputs @ jnp.asarray(normal(12, 20, seed=3))

    def loss(params, x, y):
        return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)

    tx = optax.chain(
        optax.contrib.differentially_private_aggregate(
            l2_norm_clip=1.0, noise_multiplier=0.1, key=jax.random.key(0)
        ),
        dmuon(0.05),
    )

    @jax.jit
    def step(params, state):
        each = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, inputs, targets)
        updates, state = tx.update(each, state, params)
        return optax.apply_updates(params, updates), state

    state, before = tx.init(params), loss(params, inputs, targets)
    for _ in range(40):
        params, state = step(params, state)
    assert loss(params, inputs, targets) < 0.5 * before
