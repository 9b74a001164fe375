"""What optax asks of a transformation, of every public one, on one device and on eight."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dmuon_jax.owners
from dmuon_jax import adamuon, dmuon, normuon, place_state, scale_by_dmuon
from dmuon_jax.decay import add_cautious_decayed_weights
from dmuon_jax.variants import normalize_elements, normalize_neurons
from tests.fuzz import QUICK
from tests.references import relative

RATE = optax.linear_schedule(0.1, 0.01, 5)
TRANSFORMS = {
    "dmuon": lambda: dmuon(RATE, weight_decay=0.1, ns_steps=1),
    "normuon": lambda: normuon(RATE, ns_steps=1),
    "adamuon": lambda: adamuon(RATE, ns_steps=1),
    "scale_by_dmuon": lambda: scale_by_dmuon(ns_steps=1, weight_dimension_numbers=None),
    "normalize_neurons": normalize_neurons,
    "normalize_elements": normalize_elements,
    "cautious decay": lambda: add_cautious_decayed_weights(0.1),
}
PLACES_ITSELF = ("dmuon", "normuon", "adamuon")
ONLY_MATRICES = ("scale_by_dmuon", "normalize_neurons", "normalize_elements")
STEPS = 3
TRANSFORM = pytest.mark.parametrize("name", TRANSFORMS)
KIND = pytest.mark.parametrize("kind", ["one device", "Auto", "Explicit"])


def values(seed, name):
    rng = np.random.default_rng(seed)
    shapes = {"in": (8, 24), "out": (24, 8), "bias": (8,)}
    if name in ONLY_MATRICES:
        del shapes["bias"]
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def put(tree, kind):
    """On one device, or on eight with specs as jit spells those of results."""
    if kind == "one device":
        return jax.tree.map(jnp.asarray, tree)
    axis_type = getattr(AxisType, kind)
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(axis_type,))

    def one(x):
        spec = P("x", *(None,) * (x.ndim - 1)) if kind == "Explicit" else P("x")
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)


def types(tree):
    """Type, weak or not, of each array by path."""
    return {
        jax.tree_util.keystr(path): (x.shape, x.dtype, x.weak_type)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def assert_close(a, b, limit=1e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert relative(x, y) <= limit


def context(tree, kind):
    """A program that reads no array must be told of its mesh, where axes are Explicit."""
    if kind != "Explicit":
        return contextlib.nullcontext()
    return jax.set_mesh(jax.tree.leaves(tree)[0].sharding.mesh)


def make_step(tx):
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        for u, p in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
            assert (u.shape, u.dtype) == (p.shape, p.dtype)
        return (optax.apply_updates(params, updates), state), None

    return step


@KIND
@TRANSFORM
def test_init_and_update_keep_types_shardings_and_one_program(name, kind):
    tx = TRANSFORMS[name]()
    start = put(values(0, name), kind)
    grads = [put(values(seed, name), kind) for seed in range(1, 1 + STEPS)]
    state = tx.init(start)
    assert types(jax.eval_shape(tx.init, start)) == types(state)
    with context(start, kind):
        jitted = jax.jit(tx.init, compiler_options=QUICK)(start)
    assert types(jitted) == types(state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    if name not in PLACES_ITSELF and kind != "one device":
        state = place_state(state, jax.tree.leaves(start)[0].sharding.mesh, start)
    before = types(state), shardings(state)
    # A donated state, and parameters of which a copy is donated.
    step = jax.jit(make_step(tx), donate_argnums=0, compiler_options=QUICK)
    carry = (jax.tree.map(lambda x: x + 0, start), state)
    placed = shardings(carry[0])
    for g in grads:
        carry, _ = step(carry, g)
    assert (types(carry[1]), shardings(carry[1])) == before
    assert step._cache_size() == 1
    assert shardings(carry[0]) == placed
    # The same steps in a scan.
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    scanned = jax.jit(
        functools.partial(jax.lax.scan, make_step(tx)), compiler_options=QUICK
    )
    (params, state), _ = scanned((start, tx.init(start)), stacked)
    assert_close((params, state), carry)


@TRANSFORM
def test_a_population_equals_single_runs(name):
    tx = TRANSFORMS[name]()
    step = make_step(tx)
    runs, grads = [], []
    for seed in (0, 1):
        params, gradient = values(seed, name), put(values(seed + 5, name), "one device")
        carry = (params, tx.init(params))
        runs.append(jax.jit(step, compiler_options=QUICK)(carry, gradient)[0])
        grads.append(gradient)
    stack = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    population = stack(values(0, name), values(1, name))
    carry = (population, jax.vmap(tx.init)(population))
    vmapped = jax.jit(jax.vmap(step), compiler_options=QUICK)
    together, _ = vmapped(carry, stack(*grads))
    assert_close(together, stack(*runs))


def test_an_eager_step_equals_a_jitted_one():
    tx = TRANSFORMS["dmuon"]()
    params = put(values(0, "dmuon"), "Auto")
    carry = (params, tx.init(params))
    assert_close(make_step(tx)(carry, params), jax.jit(make_step(tx))(carry, params))


@TRANSFORM
def test_zero_gradients_and_empty_trees(name):
    tx = TRANSFORMS[name]()
    params = put(values(0, name), "one device")
    zeros = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(tx.update, compiler_options=QUICK)
    updates, state = update(zeros, tx.init(zeros), zeros)
    assert not any(x.any() for x in jax.tree.leaves(updates))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))
    updates, _ = tx.update({}, tx.init({}), {})
    assert updates == {}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_values_do_not_depend_on_the_check_of_varying_axes(kind, monkeypatch):
    params = put(values(0, "scale_by_dmuon"), kind)
    found = []
    for check in (True, False):
        shard_map = functools.partial(jax.shard_map, check_vma=check)
        with monkeypatch.context() as patch:
            patch.setattr(dmuon_jax.owners.jax, "shard_map", shard_map)
            tx = dmuon(0.1, ns_steps=1)
            update = jax.jit(tx.update, compiler_options=QUICK)
            found.append(update(params, tx.init(params), params))
    assert_close(*found, limit=0.0)
