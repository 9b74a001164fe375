"""The shardings of a state, and momentum in host memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon, place_state, plan_owners, state_shardings

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def make_mesh(kind):
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def make_params(mesh):
    """Sharded, replicated (its momentum is spread) and Adam's leaves."""
    rng = np.random.default_rng(0)
    explicit = AxisType.Explicit in mesh.axis_types
    # Specs as jit spells those of results.
    specs = {
        "cut": P("data", "model"),
        "whole": P(None, None) if explicit else P(),
        "vector": P("model"),
        "scalar": P(),
    }
    shapes = {"cut": (8, 12), "whole": (16, 4), "vector": (8,), "scalar": ()}
    return {
        name: jax.device_put(
            jnp.asarray(rng.normal(size=shapes[name]), jnp.float32),
            NamedSharding(mesh, spec),
        )
        for name, spec in specs.items()
    }


def abstract(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def by_path(tree):
    items = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in items}


WRAPPERS = {
    "plain": dmuon,
    "chain": lambda *a, **k: optax.chain(
        optax.clip_by_global_norm(1.0), optax.ema(0.9), dmuon(*a, **k)
    ),
    "accumulated": lambda *a, **k: optax.MultiSteps(dmuon(*a, **k), 2),
    "injected": optax.inject_hyperparams(dmuon),
    "finite": lambda *a, **k: optax.apply_if_finite(dmuon(*a, **k), 3),
}


@KINDS
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_init_under_jit_with_them_equals_eager_init_and_one_program_runs(kind, wrapper):
    mesh = make_mesh(kind)
    params = make_params(mesh)
    plan = plan_owners(abstract(params))
    tx = WRAPPERS[wrapper](optax.constant_schedule(0.02), ns_steps=1, plan=plan)
    shardings = state_shardings(tx, abstract(params), plan)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    eager = place_state(tx.init(params), mesh, params)
    assert by_path(jax.tree.map(lambda x: x.sharding, state)) == by_path(shardings)
    assert by_path(jax.tree.map(lambda x: x.sharding, eager)) == by_path(shardings)
    # On Auto axes the partitioner may choose shardings for buffers of outer transforms.
    out = (None, shardings) if wrapper in ("chain", "accumulated") else None
    step = jax.jit(tx.update, out_shardings=out)
    for _ in range(3):
        _, state = step(params, state, params)
    assert by_path(jax.tree.map(lambda x: x.sharding, state)) == by_path(shardings)
    assert step._cache_size() == 1


@KINDS
def test_each_array_has_the_sharding_of_its_kind(kind):
    mesh = make_mesh(kind)
    params = make_params(mesh)
    plan = plan_owners(params)
    tx = optax.MultiSteps(dmuon(0.02, plan=plan), 2)
    found = by_path(state_shardings(tx, params, plan))
    adam = ".inner_opt_state.inner_states['adam'].inner_state[0]"
    muon = ".inner_opt_state.inner_states['muon'].inner_state[0]"
    want = {
        f"{muon}.mu['cut']": P("data", "model"),
        f"{muon}.mu['whole']": P(("data", "model")),
        f"{muon}.count": P(),
        f"{muon}.ns_coeffs": P(),
        f"{adam}.nu['vector']": P("model"),
        f"{adam}.mu['scalar']": P(),
        ".acc_grads['cut']": P("data", "model"),
        ".acc_grads['whole']": P(),
        ".mini_step": P(),
    }
    for path, spec in want.items():
        ndim = 2 if "cut" in path or "whole" in path else len(spec)
        assert found[path].is_equivalent_to(NamedSharding(mesh, spec), ndim), path


def test_arguments_of_another_kind_are_refused():
    params = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    tx, plan = dmuon(0.1), plan_owners(params)
    with pytest.raises(TypeError, match="params must hold arrays only, got function"):
        state_shardings(params, tx, plan)
    for wrong in (None, plan.to_json(), tx):
        with pytest.raises(TypeError, match=f"plan must be a Plan, got {type(wrong).__name__}"):
            state_shardings(tx, params, wrong)


def test_what_is_no_state_is_not_placed():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    for tx in (dmuon(0.1), optax.with_extra_args_support(optax.sgd(0.1))):
        with pytest.raises(TypeError, match="state must be what init returned, got the trans"):
            place_state(tx, mesh)
    for wrong in ("state", tx.init, {"w": "state"}, [object()]):
        with pytest.raises(TypeError, match="state must hold arrays only, got"):
            place_state(wrong, mesh)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_keys_in_a_state_are_placed_too(kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",), axis_types=(kind,))
    for impl in ("threefry2x32", "rbg"):
        key = jax.random.key(3, impl=impl)
        state = optax.add_noise(0.1, 0.5, key).init({"w": jnp.ones((4, 4))})
        for _ in range(2):  # there the second time already
            state = place_state(state, mesh)
            assert state.rng_key.sharding == NamedSharding(mesh, P())
            np.testing.assert_array_equal(
                jax.random.key_data(state.rng_key), jax.random.key_data(key)
            )


def test_params_off_the_plans_mesh_and_foreign_plans_are_refused():
    mesh = make_mesh(AxisType.Auto)
    params = make_params(mesh)
    plan = plan_owners(params)
    tx = dmuon(0.02, plan=plan)
    with pytest.raises(ValueError, match="params must lie on the plan's mesh"):
        state_shardings(tx, jax.tree.map(np.asarray, params), plan)
    smaller = plan_owners({"cut": params["cut"]})
    with pytest.raises(ValueError, match=r"no leaf for the momentum at \['whole'\]"):
        state_shardings(tx, params, smaller)
    with pytest.raises(ValueError, match="param_shardings="):
        state_shardings(dmuon(0.02), params, plan)


@KINDS
@pytest.mark.parametrize("wrapper", ["plain", "accumulated", "finite"])
def test_momentum_in_host_memory_stays_there(kind, wrapper):
    mesh = make_mesh(kind)
    params = make_params(mesh)
    host = NamedSharding(mesh, P("data", "model"), memory_kind="pinned_host")
    options = dict(param_shardings=jax.tree.map(lambda x: x.sharding, params))
    make = functools.partial(WRAPPERS[wrapper], 0.02, ns_steps=1, **options)
    tx = make(momentum_shardings={"cut": host})
    plan = plan_owners(params)
    shardings = state_shardings(tx, params, plan)
    out = (None, shardings) if wrapper == "accumulated" else None
    update = jax.jit(tx.update, out_shardings=out)
    states = {
        "eager": place_state(tx.init(params), mesh, params),
        "jitted": jax.jit(tx.init, out_shardings=shardings)(params),
        "moved": move(place_state(make().init(params), mesh, params), host),
    }
    for name, state in states.items():
        assert host_paths(state) == ["cut"], name
    want = jax.jit(make().update)
    plain = place_state(make().init(params), mesh, params)
    state = states["eager"]
    for _ in range(2):
        updates, state = update(params, state, params)
        plain_updates, plain = want(params, plain, params)
        assert host_paths(state) == ["cut"]
        for path, x in by_path((updates, state)).items():
            other = by_path((plain_updates, plain))[path]
            np.testing.assert_array_equal(x, other, err_msg=path)
    assert update._cache_size() == 1


def move(state, sharding):
    """``state`` with the momentum of "cut" moved by its user."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jax.device_put(x, sharding)
            if jax.tree_util.keystr(path).endswith(".mu['cut']")
            else x
        ),
        state,
    )


def host_paths(state):
    """Names of the arrays of a state that are in host memory."""
    return [
        path.split("'")[-2]
        for path, x in by_path(state).items()
        if x.sharding.memory_kind == "pinned_host"
    ]


def test_memory_kinds_that_a_trace_cannot_tell_are_refused():
    mesh = make_mesh(AxisType.Auto)
    sharding = NamedSharding(mesh, P(), memory_kind="unpinned_host")
    with pytest.raises(NotImplementedError, match=r"unpinned_host.* at \['cut'\]"):
        dmuon(0.02, momentum_shardings={"cut": sharding})


@pytest.mark.parametrize("spec", [P(), P("data")], ids=str)
def test_named_shardings_of_a_momentum_hold_on_one_device(spec):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    host = NamedSharding(mesh, spec, memory_kind="pinned_host")
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(8, 12)), jnp.float32)
    want = jax.jit(dmuon(0.02).update)
    for params in ({"cut": weights}, jax.device_put({"cut": weights}, host)):
        params = jax.device_put(params, jax.memory.Space.Device)
        tx = dmuon(0.02, momentum_shardings={"cut": host})
        plain, state = dmuon(0.02).init(params), tx.init(params)
        assert host_paths(state) == host_paths(jax.jit(tx.init)(params)) == ["cut"]
        for _ in range(2):
            expected, plain = want(params, plain, params)
            updates, state = jax.jit(tx.update)(params, state, params)
            np.testing.assert_array_equal(updates["cut"], expected["cut"])
            assert host_paths(state) == ["cut"]


def test_a_momentum_on_another_mesh_than_its_parameter_is_refused():
    mesh = make_mesh(AxisType.Auto)
    params = make_params(mesh)
    other = Mesh(np.array(jax.devices()[:4]), ("data",))
    tx = dmuon(0.02, momentum_shardings=NamedSharding(other, P("data")))
    words = r"on the mesh of the parameters, .*'model'.* at \['cut'\]"
    with pytest.raises(ValueError, match=words):
        tx.init(params)
    with pytest.raises(ValueError, match="on the mesh of the parameters"):
        tx.init(jax.tree.map(np.asarray, params))
