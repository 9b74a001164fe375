"""Faults that Muon has had elsewhere, and the tests that would see them here."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon
from tests import fault_table
from tests.fault_table import FAULTS, Test, all_tests
from tests.references import orthogonalized, relative


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tests_of_each_fault_exist(fault):
    found = {f"{test.module}.{test.name}" for test in all_tests()}
    assert FAULTS[fault] and set(FAULTS[fault]) <= found


def test_the_page_of_faults_is_today_s():
    page = pathlib.Path(__file__).parents[1] / "notebooks/faults.md"
    assert page.read_text() == fault_table.page()  # else: -m tests.fault_table --write


def test_every_injected_fault_says_what_happens_and_what_is_kept():
    rows = fault_table.rows()
    assert len(rows) >= 20
    assert len({row.fault for row in rows}) == len(rows)
    with pytest.raises(ValueError, match="Kept"):
        fault_table.read_row(Test("m", "t", "Says.\n\nFault: a\nHappens: b"))


def test_every_test_checks_something():
    for test in all_tests():
        assert test.checks > 0, f"{test.module}.{test.name} checks nothing"


def mesh4(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(kind,))


def first_step(params, grads, **options):
    tx = dmuon(1.0, ns_steps=1, **options)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    return updates


def test_each_matrix_of_a_stack_has_its_own_norm():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 8, 8)).astype(np.float32)
    x[1, 2] *= 100
    dims = optax.contrib.MuonDimensionNumbers(-2, -1)
    arrays = jax.device_put(x, NamedSharding(mesh4(), P(None, "x")))
    got = first_step(arrays, arrays, muon_weight_dimension_numbers=dims)
    want = orthogonalized(x, dims, ((3.4445, -4.7750, 2.0315),))
    for index in np.ndindex(2, 4):
        assert relative(got[index], -want[index]) <= 1e-4


def test_any_number_of_matrices_of_any_shape():
    rng = np.random.default_rng(0)
    numbers = {(72, 40): 1, (10, 64): 3, (7, 5): 5, (3, 3): 19, (1, 1): 2}
    host = {
        f"{shape} {i}": rng.normal(size=shape).astype(np.float32)
        for shape, count in numbers.items()
        for i in range(count)
    }
    arrays = jax.device_put(host, NamedSharding(mesh4(), P()))
    got = first_step(arrays, arrays)
    for name, x in host.items():
        factor = max(1.0, x.shape[1] / x.shape[0]) ** 0.5
        want = -factor * orthogonalized(x, (0, 1), ((3.4445, -4.7750, 2.0315),))
        assert relative(got[name], want) <= 1e-4, name


def test_any_container_holds_the_parameters():
    rng = np.random.default_rng(0)
    host = [rng.normal(size=s).astype(np.float32) for s in ((8, 12), (12, 4), (4,))]
    a, b, c = jax.device_put(host, NamedSharding(mesh4(), P()))
    want = first_step({"a": a, "b": b, "c": c}, {"a": a, "b": b, "c": c})
    trees = [
        [a, (b, c)],
        (a, {"b": [b], "c": None, "d": c}),
        FrozenDict({"a": a, "deep": {"b": b, "c": c}}),
        optax.EmaState(a, {"b": b, "c": c}),
    ]
    for tree in trees:
        got = first_step(tree, tree)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        for x, name in zip(jax.tree.leaves(got), "abc", strict=True):
            np.testing.assert_array_equal(x, want[name])
        state = jax.tree.leaves(dmuon(1.0).init(tree))
        assert all(isinstance(x, jax.Array) for x in state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_device_s_own_gradients_are_refused(kind):
    """Seen in the types that shard_map checks.

    Fault: inside a `shard_map`, each device passes its own gradients instead of their
      sum
    Happens: NotImplementedError names the leaf
    Kept: nothing has run
    """
    mesh = mesh4(kind)
    whole = NamedSharding(mesh, P(None, None))
    tx = dmuon(1.0, ns_steps=1, momentum_shardings=whole)
    params = jax.device_put({"w": jnp.ones((8, 8))}, whole)
    state = tx.init(params)

    def device_step(params, state, grads):
        return tx.update(grads, state, params)[0]

    step = jax.shard_map(
        device_step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P()
    )
    grads = jax.device_put({"w": jnp.ones((32, 8))}, NamedSharding(mesh, P("x", None)))
    with pytest.raises(NotImplementedError, match=r"outside shard_map.*\['w'\]"):
        jax.eval_shape(step, params, state, grads)


def test_a_step_that_runs_out_of_memory():
    """Whether the state survives is up to donation: a failed call has its buffers already.

    Fault: the device runs out of memory in a step
    Happens: jax raises RESOURCE_EXHAUSTED when results are waited for
    Kept: parameters and state, unless they were donated to the step: then they are gone,
      and the run must go on from its last checkpoint
    """
    tx = dmuon(0.1, ns_steps=1)
    params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh4(), P("x")))}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def greedy_step(params, state, grads):
        rows = jnp.arange(2.0**23)[:, None]
        huge = rows * jnp.arange(2.0**24) * params["w"].sum()  # more than can be addressed
        return *step(params, state, grads), jnp.sort(huge, axis=0)[0, 0]

    def copies():
        return jax.tree.map(lambda x: x + 0, (params, tx.init(params)))

    for donated in ((), (0, 1)):
        arrays = copies()
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            failing = jax.jit(greedy_step, donate_argnums=donated)
            jax.block_until_ready(failing(*arrays, params))
        gone = [x.is_deleted() for x in jax.tree.leaves(arrays)]
        assert gone == [bool(donated)] * len(gone)
        if not donated:
            got, want = jax.jit(step)(*arrays, params), jax.jit(step)(*copies(), params)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(x, y)


def test_no_tracer_leaks():
    mesh = mesh4()
    params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x")))}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    made = []

    @jax.jit
    def init(params):
        made.append(dmuon(0.1, ns_steps=1, param_shardings=shardings))
        return made[0].init(params)

    with jax.checking_leaks():
        state = init(params)
        updates, _ = jax.jit(made[0].update)(params, state, params)
    fresh = dmuon(0.1, ns_steps=1)
    want, _ = jax.jit(fresh.update)(params, fresh.init(params), params)
    np.testing.assert_array_equal(updates["w"], want["w"])
