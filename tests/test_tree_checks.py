"""Trees that do not belong together are refused in a sentence that names the place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax import (
    dmuon,
    hidden_matrices,
    orthogonalize,
    plan_owners,
    routing_report,
    scale_by_dmuon,
)


def tree():
    return {"layer": {"w": jnp.ones((16, 8)), "bias": jnp.ones(8)}}


def on_mesh(number):
    mesh = Mesh(np.array(jax.devices()[:number]), ("fsdp",))
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))), tree()
    )


@pytest.mark.parametrize(
    "call",
    [
        dmuon(0.1).init,
        dmuon(0.1, muon_weight_dimension_numbers=hidden_matrices).init,
        plan_owners,
    ],
    ids=["init", "hidden", "plan"],
)
def test_a_leaf_that_is_no_array_is_named(call):
    params = {"layer": {"w": jnp.ones((16, 8)), "name": "tower"}}
    with pytest.raises(TypeError, match=r"got str 'tower' at \['layer'\]\['name'\]"):
        call(params)


@pytest.mark.parametrize("shape", [(), (4,), (4, 4)], ids=str)
def test_keys_among_the_parameters_are_named(shape):
    key = jax.random.key(0)
    keys = jax.random.split(key, shape) if shape else key
    params = {"w": jnp.ones((16, 8)), "rng": {"k": keys}}
    for call in (dmuon(0.1).init, plan_owners, jax.jit(dmuon(0.1).init), routing_report):
        with pytest.raises(TypeError, match=r"got a key of jax.random at \['rng'\]\['k'\]"):
            call(params)


RULE = optax.contrib.MuonDimensionNumbers()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"layer": {"v": RULE, "bias": None}}, r"params at .*\['v'\]; none for .*\['w'\]"),
        ({"layer": {"w": RULE}}, r"none for \['layer'\]\['bias'\]"),
        ({}, r"none for \['layer'\]\['bias'\], \['layer'\]\['w'\]"),
        ({"layer": RULE, "more": None}, r"no leaf of params at \['more'\]"),
        ({"layer": {"w": [RULE], "bias": None}}, r"at \['layer'\]\['w'\]\[0\]; none for"),
        ([RULE, None], r"no leaf of params at \[0\], \[1\]; none for"),
        (lambda params: {"layer": {"w": RULE}}, r"none for \['layer'\]\['bias'\]"),
    ],
    ids=["other", "one", "none", "prefix", "deeper", "list", "function"],
)
def test_dimension_numbers_of_another_tree_are_named(rule, words):
    calls = (
        dmuon(0.1, muon_weight_dimension_numbers=rule).init,
        lambda tree: plan_owners(tree, muon_weight_dimension_numbers=rule),
        lambda tree: orthogonalize(tree, weight_dimension_numbers=rule),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"must have the structure of params.*: .*{words}"):
            call(tree())


def test_dimension_numbers_in_another_container_are_told():
    with pytest.raises(ValueError, match="(?s)structure of params.*(list|tuple)"):
        dmuon(0.1, muon_weight_dimension_numbers=(RULE,)).init([jnp.ones((4, 8))])


@pytest.mark.parametrize("shape", [None, (), (3,), (2, 4, 8)], ids=str)
def test_scale_by_dmuon_takes_matrices_only(shape):
    leaf = 1.0 if shape is None else jnp.ones(shape)
    params = {"w": jnp.ones((4, 8)), "more": {"x": leaf}}
    with pytest.raises(ValueError, match=r"dimension numbers .* none at \['more'\]\['x'\]"):
        scale_by_dmuon().init(params)


@pytest.mark.parametrize("leaf", [1.0, "text", np.ones(3)], ids=str)
def test_what_has_no_axes_is_no_matrix(leaf):
    params = {"w": jnp.ones((4, 8)), "x": leaf}
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got \d at \['x'\]"):
        orthogonalize(params, weight_dimension_numbers=RULE)


def test_numbers_and_empty_places_are_no_strings():
    tx, params = dmuon(0.1), {"w": jnp.ones((4, 8)), "scale": 1.0, "none": None}
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize(
    "other",
    [
        optax.adamw(0.1),
        optax.sgd(0.1),
        optax.chain(optax.clip(1.0), dmuon(0.1)),
    ],
    ids=["adamw", "sgd", "chain"],
)
def test_the_state_of_another_optimizer_is_refused(other):
    params = tree()
    with pytest.raises(TypeError, match="what this dmuon's init returned.*got tuple"):
        dmuon(0.1).update(params, other.init(params), params)


def test_the_state_of_another_transform_is_refused():
    grads = {"w": jnp.ones((4, 8))}
    with pytest.raises(TypeError, match="must be a MuonState, got ScaleByAdamState"):
        scale_by_dmuon().update(grads, optax.scale_by_adam().init(grads))


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ({"v": jnp.ones((16, 8))}, r"leaf for each gradient, got none at \['w'\]"),
        (
            {"w": jnp.ones((16, 8)), "v": jnp.ones((4, 4))},
            r"no leaf without a gradient, got one at \['v'\]",
        ),
        ({"w": jnp.ones((8, 16))}, r"\(8, 16\) for a gradient.*\(16, 8\) at \['w'\]"),
    ],
    ids=["name", "one more", "shape"],
)
def test_the_state_of_other_parameters_is_refused(before, words):
    tx, params = dmuon(0.1), {"w": jnp.ones((16, 8))}
    with pytest.raises(ValueError, match=words):
        tx.update(params, tx.init(before), params)


NUMBERS = [np.int8, np.int32, np.uint8, bool, jax.dtypes.float0]


def wrong_like(x, dtype):
    return np.zeros(x.shape, dtype)


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda x: np.dtype(x).name)
def test_gradients_of_whole_numbers_are_refused_for_matrices_only(dtype):
    """Their momentum would be rounded, or NaN, without a word.

    Fault: the gradient of a matrix that Muon updates has whole numbers
    Happens: TypeError names its dtype and the leaf, and every other such leaf
    Kept: nothing has run
    """
    params = on_mesh(8) | {"v": on_mesh(8)["layer"]["w"]}
    own = {"w": wrong_like(params["layer"]["w"], dtype), "bias": jnp.ones(8)}
    first = params | {"layer": own}
    both = first | {"v": wrong_like(params["v"], dtype)}
    words = r"(?m)gradients of matrices .* be floating point, got \w+ at \['layer'\]\['w'\]"
    for plan in (None, plan_owners(params)):
        tx = dmuon(0.1, plan=plan)
        state = tx.init(params)
        for update in (tx.update, functools.partial(jax.eval_shape, tx.update)):
            with pytest.raises(TypeError, match=words + "$"):
                update(first, state, params)
            with pytest.raises(TypeError, match=words + r", \w+ at \['v'\]$"):
                update(both, state, params)
    scale, arrays = scale_by_dmuon(), {"v": jnp.ones((4, 4))}
    for params in (None, arrays):
        with pytest.raises(TypeError, match=r"floating point, got \w+ at \['v'\]"):
            grads = {"v": wrong_like(arrays["v"], dtype)}
            scale.update(grads, scale.init(arrays), params)


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda x: np.dtype(x).name)
def test_whole_numbers_that_muon_does_not_update_are_left_alone(dtype):
    params = {"w": jnp.ones((4, 4)), "step": jnp.ones(3, jnp.int32)}
    grads = params | {"step": wrong_like(params["step"], dtype)}
    tx = optax.partition(
        {"muon": scale_by_dmuon(), "rest": optax.identity()}, {"w": "muon", "step": "rest"}
    )
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["step"] is grads["step"] and np.isfinite(updates["w"]).all()


def test_whole_numbers_do_not_fit_a_plan():
    params = {"w": np.ones((4, 8), np.float32), "v": np.ones((4, 8), np.float16)}
    plan = plan_owners(params)
    with pytest.raises(ValueError, match=r"the tree has int32, no floating .* at \['w'\]"):
        orthogonalize(params | {"w": np.ones((4, 8), np.int32)}, plan=plan)


@pytest.mark.parametrize("missing", ["w", "bias"])
def test_a_gradient_that_is_missing_is_named(missing):
    tx, params = dmuon(0.1), tree()
    grads = {"layer": {k: x for k, x in params["layer"].items() if k != missing}}
    with pytest.raises(ValueError, match=rf"got none at \['layer'\]\['{missing}'\]"):
        tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize(("first", "then"), [(1, 8), (8, 1), (8, 4)])
def test_arrays_on_different_devices_are_named(first, then):
    tx, params = dmuon(0.1), on_mesh(then)
    state = tx.init(on_mesh(first))
    words = rf"same devices, got {then} of gradients at .* and {first} of the state at"
    with pytest.raises(ValueError, match=words):
        tx.update(params, state, params)


def test_a_trace_on_another_mesh_than_init_s_says_so():
    tx = dmuon(0.1)
    state = tx.init(on_mesh(8))
    words = r"Auto axes .*sizes=\(4,\).*\['layer'\]\['w'\]; init saw them on .*sizes=\(8,\)"
    with pytest.raises(ValueError, match=words):
        jax.jit(tx.update)(on_mesh(4), jax.tree.map(np.asarray, state), on_mesh(4))


def test_arrays_that_are_bound_to_no_device_join_any():
    tx, params = dmuon(0.1), on_mesh(8)
    updates, _ = tx.update(params, tx.init(tree()), params)
    straight, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(
        updates["layer"]["w"], straight["layer"]["w"], rtol=1e-5, atol=1e-7
    )


def test_cautious_decay_takes_no_schedule():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    with pytest.raises(NotImplementedError, match="must be a number where it is cautious"):
        dmuon(0.1, weight_decay=schedule, cautious_weight_decay=True)
    dmuon(0.1, weight_decay=schedule)
