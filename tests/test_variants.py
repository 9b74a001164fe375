"""NorMuon, AdaMuon, cautious decay and plain-sum momentum, against their equations."""

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
from dmuon_jax.decay import add_cautious_decayed_weights
from dmuon_jax.split import Split
from dmuon_jax.variants import (
    SecondMomentState,
    adamuon,
    normalize_elements,
    normalize_neurons,
    normuon,
)
from tests.references import normal, orthogonalized, relative, second_moment_updates

SHAPES = {
    "bias": (8,),
    "down": (24, 16),
    "experts": (4, 8, 16),
    "heads": (2, 6, 16),
    "up": (16, 40),
}
DIMS = {
    "bias": None,
    "down": Dims(0, 1),
    "experts": Dims(1, 2),
    "heads": Dims((0, 1), 2),
    "up": Dims(0, 1),
}
SPECS = {
    "bias": P(),
    "down": P("x"),
    "experts": P("x"),
    "heads": P(None, None, "x"),
    "up": P(None, "x"),
}
MATRICES = [name for name, dims in DIMS.items() if dims is not None]
RATE, STEPS = 0.1, 3
VARIANTS = {
    "normuon": (normuon, {"per_neuron": True, "sign": False}),
    "adamuon": (adamuon, {"per_neuron": False, "sign": True}),
}
OPTIONS = {
    "muon_weight_dimension_numbers": DIMS,
    "nesterov": False,
    "compute_dtype": "float32",
    "exchange_dtype": "float32",
    "method": "direct",
}


def tree(seed, mesh=None):
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        x = jnp.asarray(normal(*shape, seed=100 * seed + index))
        if mesh is not None:
            x = jax.device_put(x, NamedSharding(mesh, SPECS[name]))
        found[name] = x
    return found


def make_mesh(kind):
    if kind == "one":
        return None
    return Mesh(
        np.array(jax.devices()[:4]), ("x",), axis_types=(getattr(AxisType, kind),)
    )


def second_moment(state):
    """The one ``SecondMomentState`` in an optimizer state."""

    def is_state(x):
        return isinstance(x, SecondMomentState)

    found = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    assert len(found) == 1
    return found[0].nu


@functools.cache
def right_updates(variant):
    """For each matrix, -RATE times the paper's direction at every step."""
    _, how = VARIANTS[variant]
    grads = [tree(seed) for seed in range(STEPS)]
    return {
        name: [
            -RATE * x
            for x in second_moment_updates([g[name] for g in grads], DIMS[name], **how)
        ]
        for name in MATRICES
    }


@pytest.mark.parametrize("kind", ["one", "Auto", "Explicit"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_is_its_paper(variant, kind):
    make, _ = VARIANTS[variant]
    mesh = make_mesh(kind)
    tx = make(RATE, **OPTIONS)
    params = tree(9, mesh)
    state = tx.init(params)
    step = jax.jit(tx.update)
    right = right_updates(variant)
    for t in range(STEPS):
        updates, new = step(tree(t, mesh), state, params)
        for name in MATRICES:
            # A sign that rounding flips near zero changes AdaMuon's input; none does here.
            assert relative(updates[name], right[name][t]) < 1e-4, (name, t)
            assert updates[name].sharding.is_equivalent_to(
                params[name].sharding, params[name].ndim
            )
        for old, x in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            assert x.sharding.is_equivalent_to(old.sharding, x.ndim)
        state = new
    assert step._cache_size() == 1
    if kind == "one":
        adam = optax.adamw(RATE, weight_decay=0.0)
        adam_state = adam.init(params["bias"])
        for t in range(STEPS):
            theirs, adam_state = adam.update(
                tree(t)["bias"], adam_state, params["bias"]
            )
        np.testing.assert_allclose(updates["bias"], theirs, rtol=1e-5)


@pytest.mark.parametrize("kind, spec", [("Auto", P("x")), ("Explicit", P(None, "x"))])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_split_leaf_are_matrices_of_their_own(variant, kind, spec):
    make, how = VARIANTS[variant]
    sharding = NamedSharding(make_mesh(kind), spec)
    grads = [normal(16, 40, seed=seed) for seed in range(2)]
    for grad in grads:
        grad[:, 20:32] *= 10
    options = OPTIONS | {"muon_weight_dimension_numbers": {"qkv": Split((20, 12, 8))}}
    tx = make(RATE, **options)

    def put(x):
        return {"qkv": jax.device_put(x, sharding)}

    params = put(normal(16, 40, seed=9))
    state = tx.init(params)
    step = jax.jit(tx.update)
    parts = [(0, 20), (20, 32), (32, 40)]
    right = zip(
        *(
            second_moment_updates([g[:, a:b] for g in grads], Dims(), **how)
            for a, b in parts
        ),
        strict=True,
    )
    for grad, directions in zip(grads, right, strict=True):
        updates, state = step(put(grad), state, params)
        assert relative(updates["qkv"], -RATE * np.concatenate(directions, axis=1)) < 1e-4


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_state_is_sharded_like_the_parameters(kind):
    mesh = make_mesh(kind)
    params = tree(0, mesh)
    neurons = second_moment(normuon(RATE, **OPTIONS).init(params))
    elements = second_moment(adamuon(RATE, **OPTIONS).init(params))
    right = {
        "down": ((1, 16), P()),
        "experts": ((4, 1, 16), P("x")),
        "heads": ((1, 1, 16), P(None, None, "x")),
        "up": ((1, 40), P(None, "x")),
    }
    for name in MATRICES:
        shape, spec = right[name]
        assert neurons[name].shape == shape
        assert neurons[name].dtype == jnp.float32
        expected = NamedSharding(mesh, spec)
        assert neurons[name].sharding.is_equivalent_to(expected, len(shape)), name
        assert elements[name].shape == params[name].shape
        assert elements[name].sharding.is_equivalent_to(params[name].sharding, len(shape))


def test_state_is_elastic():
    """Two steps on four devices, the third on one."""
    mesh = make_mesh("Auto")
    params = tree(9, mesh)
    tx = normuon(RATE, **OPTIONS)
    state = tx.init(params)
    for t in range(2):
        _, state = jax.jit(tx.update)(tree(t, mesh), state, params)
    state = jax.tree.map(jnp.asarray, jax.device_get(state))
    one = normuon(RATE, **OPTIONS)
    fresh = one.init(tree(9))
    assert jax.tree.structure(fresh) == jax.tree.structure(state)
    updates, _ = jax.jit(one.update)(tree(2), state, tree(9))
    for name in MATRICES:
        assert relative(updates[name], right_updates("normuon")[name][2]) < 1e-4


@pytest.mark.parametrize("make", [normalize_neurons, normalize_elements])
def test_zeros_and_half_precision(make):
    tx = make()
    x = {"a": jnp.zeros((4, 6), jnp.bfloat16), "b": jnp.ones((4, 6), jnp.bfloat16)}
    state = tx.init(x)
    updates, state = tx.update(x, state)
    assert np.all(np.asarray(updates["a"], np.float32) == 0)
    assert updates["b"].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.linalg.norm(np.asarray(updates["b"], np.float32)), 2.0, rtol=1e-2
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("make", [normalize_neurons, normalize_elements])
def test_wrong_rates_are_refused(make):
    with pytest.raises(ValueError, match="b2 must be at least 0.0 and below 1.0, got 1"):
        make(b2=1)
    with pytest.raises(ValueError, match="eps must be at least 0.0, got -1"):
        make(eps=-1)


def test_cautious_decay():
    params = {"w": jnp.asarray(normal(6, 9)), "v": jnp.asarray(normal(6, 9, seed=1))}
    updates = {"w": jnp.asarray(normal(6, 9, seed=2)), "v": jnp.ones((6, 9))}
    tx = add_cautious_decayed_weights(0.1)
    found, _ = tx.update(updates, tx.init(params), params)
    u, p = np.asarray(updates["w"]), np.asarray(params["w"])
    agrees = u * p >= 0
    assert 0 < agrees.sum() < agrees.size
    np.testing.assert_allclose(found["w"], u + 0.1 * p * agrees, rtol=1e-6)
    masked = add_cautious_decayed_weights(0.1, {"w": True, "v": False})
    found, _ = masked.update(updates, masked.init(params), params)
    np.testing.assert_array_equal(found["v"], updates["v"])
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(updates, tx.init(params))


def test_cautious_decay_in_dmuon():
    params = {"w": jnp.asarray(normal(6, 9))}
    grads = {"w": jnp.asarray(normal(6, 9, seed=1))}
    results = {}
    for name, options in {
        "none": {},
        "plain": {"weight_decay": 0.1},
        "cautious": {"weight_decay": 0.1, "cautious_weight_decay": True},
    }.items():
        tx = dmuon(1.0, **options)
        state = tx.init(params)
        results[name] = np.asarray(tx.update(grads, state, params)[0]["w"])
    agrees = results["none"] * np.asarray(params["w"]) <= 0  # updates carry the minus
    right = np.where(agrees, results["plain"], results["none"])
    assert 0 < agrees.sum() < agrees.size
    np.testing.assert_allclose(results["cautious"], right, rtol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_as_a_plain_sum(nesterov):
    """Without bias correction the update is that of ``M <- beta M + g``."""
    grads = [{"w": jnp.asarray(normal(8, 8, seed=seed))} for seed in range(3)]
    tx = dmuon(1.0, bias_correction=False, nesterov=nesterov, eps=0.0)
    state = tx.init(grads[0])
    step = jax.jit(tx.update)
    total = 0.0
    for grad in grads:
        updates, state = step(grad, state, grad)
        g = np.asarray(grad["w"], np.float64)
        total = 0.95 * total + g
        source = g + 0.95 * total if nesterov else total
        right = -orthogonalized(source, Dims())
        assert relative(updates["w"], right) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_rates_can_be_injected(variant):
    make, _ = VARIANTS[variant]
    params, grads = {"w": tree(0)["up"]}, {"w": tree(1)["up"]}
    tx = optax.inject_hyperparams(lambda learning_rate, b2: make(learning_rate, b2=b2))(
        learning_rate=0.1, b2=0.9
    )
    step = jax.jit(tx.update)
    first, _ = step(grads, tx.init(params), params)
    fresh = tx.init(params)
    fresh.hyperparams["learning_rate"] = jnp.asarray(0.2, jnp.float32)
    doubled, _ = step(grads, fresh, params)
    np.testing.assert_allclose(doubled["w"], 2 * first["w"], rtol=1e-5)
    assert step._cache_size() == 1
