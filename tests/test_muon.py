"""``dmuon`` as a drop-in for ``optax.contrib.muon``: contract, wrappers, bad input."""

import inspect
import math
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

import dmuon_jax
from dmuon_jax import (
    Measured,
    Plan,
    dmuon,
    orthogonalize,
    place_state,
    plan_owners,
    scale_by_dmuon,
)
from tests.references import relative


def rng_tree(seed, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {
        "kernel": (16, 24),
        "other": (24, 16),
        "bias": (24,),
        "head": {"w": (16, 8)},
    }
    return jax.tree.map(
        lambda s: (scale * rng.normal(size=s)).astype(dtype),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def mesh8(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()), ("x",), axis_types=(kind,))


def put(tree, mesh):
    """Arrays on a mesh, matrices cut by rows; specs spelled as jit spells its results."""
    explicit = AxisType.Explicit in mesh.axis_types

    def one(x):
        full = P("x", None) if x.ndim == 2 else P(*(None,) * x.ndim)
        short = P("x") if x.ndim == 2 else P()
        return jax.device_put(x, NamedSharding(mesh, full if explicit else short))

    return jax.tree.map(one, tree)


def train(tx, params, grads, donate=False):
    """Jitted steps; returns parameters, state and the number of compilations."""
    state = tx.init(params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    for g in grads:
        params, state = step(params, state, g)
    return params, state, step._cache_size()


def trees_close(a, b, limit):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        assert x.shape == y.shape and x.dtype == y.dtype, path
        assert relative(x, y) <= limit, (jax.tree_util.keystr(path), relative(x, y))


def test_arguments_are_a_superset_of_optax():
    for ours, theirs in (
        (dmuon, optax.contrib.muon),
        (scale_by_dmuon, optax.contrib.scale_by_muon),
    ):
        mine = list(inspect.signature(ours).parameters.values())
        want = list(inspect.signature(theirs).parameters.values())
        for a, b in zip(mine, want, strict=False):
            assert (a.name, a.kind, a.default) == (b.name, b.kind, b.default)
        assert all(p.kind == p.KEYWORD_ONLY for p in mine[len(want) :])


MASK = {"kernel": True, "other": False, "bias": True, "head": False}
PREFIX = {"kernel": Dims(1, 0), "other": None, "bias": None, "head": Dims()}


def only_kernel(params):
    return jax.tree.map(lambda x: Dims() if x.shape == (16, 24) else None, params)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weight_decay": 0.1, "nesterov": False, "beta": 0.9, "consistent_rms": 0.2},
        {"adam_learning_rate": 1e-3, "adam_weight_decay": 0.1, "adam_b1": 0.8},
        {"ns_coeffs": "dion", "weight_decay": 0.1, "weight_decay_mask": MASK},
        {"adaptive": True, "mu_dtype": jnp.bfloat16},
        {"preconditioning": "aol", "ns_steps": 4},
        {"muon_weight_dimension_numbers": PREFIX},
        {"muon_weight_dimension_numbers": only_kernel},
    ],
    ids=lambda a: ",".join(a) or "defaults",
)
def test_equals_optax_on_a_mesh_with_the_same_state(arguments):
    params = rng_tree(0)
    grads = [rng_tree(s) for s in (1, 2)]
    rate = optax.linear_schedule(0.02, 0.01, 2)
    # The references run each Newton-Schulz iteration whole, on one device.
    want, want_state, _ = train(optax.contrib.muon(rate, **arguments), params, grads)
    mesh = mesh8()
    tx = dmuon(rate, method="direct", **arguments)
    got, state, compilations = train(
        tx, put(params, mesh), [put(g, mesh) for g in grads], donate=True
    )
    limit = 5e-2 if "mu_dtype" in arguments else 1e-5
    trees_close(got, want, limit)
    trees_close(state, want_state, limit)
    assert compilations == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_one_compilation_and_constant_state_over_five_steps(kind):
    mesh = mesh8(kind)
    params = put(rng_tree(0), mesh)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        dmuon(optax.cosine_decay_schedule(0.02, 10), weight_decay=0.1, ns_steps=2),
    )
    # Transforms around `dmuon` are placed by `place_state`.
    init = tx.init
    tx = optax.GradientTransformation(
        lambda p: place_state(init(p), mesh, p), tx.update
    )
    before = jax.tree.map(lambda x: (x.aval, x.sharding), tx.init(params))
    _, state, compilations = train(tx, params, [params] * 5)
    assert compilations == 1
    after = jax.tree.map(lambda x: (x.aval, x.sharding), state)
    assert jax.tree.leaves(before) == jax.tree.leaves(after)


def test_init_under_jit_and_eval_shape_gives_the_same_state():
    mesh = mesh8()
    params = put(rng_tree(0), mesh)
    # Results of a program share no buffers; those of device_put may, on a CPU.
    params = jax.jit(lambda x: jax.tree.map(lambda a: a + 0, x))(params)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    tx = dmuon(0.02, param_shardings=shardings)
    eager = tx.init(params)
    shapes = jax.eval_shape(tx.init, params)
    jitted = jax.jit(tx.init)(params)
    for a, b, c in zip(*map(jax.tree.leaves, (eager, shapes, jitted)), strict=True):
        assert a.shape == b.shape == c.shape and a.dtype == b.dtype == c.dtype
        assert a.sharding.is_equivalent_to(c.sharding, a.ndim)
    buffers = [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(eager)
        for shard in x.addressable_shards
    ]
    assert len(set(buffers)) == len(buffers)  # else donation would fail


def test_learning_rate_can_be_injected():
    mesh = mesh8()
    params, grads = put(rng_tree(0), mesh), put(rng_tree(1), mesh)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    tx = optax.inject_hyperparams(dmuon)(
        learning_rate=1e-2,
        param_shardings=shardings,
        weight_decay=optax.constant_schedule(0.0),
    )
    state = place_state(tx.init(params), mesh, params)
    update = jax.jit(tx.update)
    first, _ = update(grads, state, params)
    state.hyperparams["learning_rate"] = place_state(jnp.float32(2e-2), mesh)
    second, _ = update(grads, state, params)
    want, _ = optax.contrib.muon(1e-2).update(
        rng_tree(1), optax.contrib.muon(1e-2).init(rng_tree(0)), rng_tree(0)
    )
    trees_close(first, want, 1e-3)
    trees_close(second, jax.tree.map(lambda x: 2 * x, first), 1e-6)
    assert update._cache_size() == 1


def test_accumulation_equals_the_mean_gradient():
    mesh = mesh8()
    params = put(rng_tree(0), mesh)
    grads = [put(rng_tree(s), mesh) for s in range(4)]
    mean = jax.tree.map(lambda *x: sum(x) / 4, *grads)
    tx = optax.MultiSteps(dmuon(0.05, ns_steps=2), 4)
    got, _, _ = train(tx, params, grads)
    want, _, _ = train(dmuon(0.05, ns_steps=2), params, [mean])
    trees_close(got, want, 1e-5)


def test_a_skipped_step_leaves_no_trace():
    """With `optax.apply_if_finite`.

    Fault: a gradient holds NaN on one shard of one leaf
    Happens: `optax.apply_if_finite` skips the step, alike on all devices
    Kept: parameters and state of the step before
    """
    mesh = mesh8()
    params = put(rng_tree(0), mesh)
    good, bad, last = (rng_tree(s) for s in (1, 2, 3))
    bad["kernel"][3, 4] = np.nan
    tx = optax.apply_if_finite(dmuon(0.05, ns_steps=2), 5)
    with_bad, state, _ = train(tx, params, [put(g, mesh) for g in (good, bad, last)])
    without, _, _ = train(
        dmuon(0.05, ns_steps=2), params, [put(g, mesh) for g in (good, last)]
    )
    trees_close(with_bad, without, 1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_partition_hands_it_a_part_of_the_tree():
    mesh = mesh8()
    params, grads = put(rng_tree(0), mesh), put(rng_tree(1), mesh)
    labels = {"kernel": "muon", "other": "sgd", "bias": "sgd", "head": "muon"}
    both = optax.partition({"muon": dmuon(0.05, ns_steps=2), "sgd": optax.sgd(0.1)}, labels)
    got, _, _ = train(both, params, [grads])
    want, _, _ = train(dmuon(0.05, ns_steps=2), params, [grads])
    for name in ("kernel", "head"):
        trees_close(got[name], want[name], 1e-6)
    assert relative(got["other"], params["other"] - 0.1 * grads["other"]) < 1e-6


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [
        ("cuda", "Tesla T4", "float16"),
        ("rocm", "AMD Instinct MI300X", "float16"),
        ("tpu", "TPU v5 lite", "bfloat16"),
        ("tpu", "TPU v99", "bfloat16"),
        ("METAL", "Apple M3", "float32"),
    ],
)
def test_devices_of_any_name_have_defaults(platform, kind, expected):
    device = jax.sharding.AbstractDevice(kind, num_cores=None, platform=platform)
    mesh = jax.sharding.AbstractMesh((4,), ("x",), abstract_device=device)
    rows = NamedSharding(mesh, P("x"))
    params = {"w": jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=rows)}
    (bucket,) = plan_owners(params).buckets
    assert bucket.compute_dtype == expected


def dtypes(tree):
    return [x.dtype for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=str)
def test_updates_keep_the_gradients_dtype(dtype):
    mesh = mesh8()
    params = put(jax.tree.map(lambda x: jnp.asarray(x, dtype), rng_tree(0)), mesh)
    rates = (0.1, jnp.float32(0.1), optax.constant_schedule(jnp.float32(0.1)))
    for rate in rates:
        tx = optax.MultiSteps(dmuon(rate, ns_steps=1, mu_dtype=jnp.float32), 2)
        state = tx.init(params)
        updates, new = tx.update(params, state, params)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
        assert dtypes(state) == dtypes(new)


def test_updates_are_as_wide_as_gradient_or_parameter():
    wide, narrow = rng_tree(0), jax.tree.map(lambda x: x.astype(jnp.bfloat16), rng_tree(1))
    tx = dmuon(0.1, ns_steps=1)
    for params, grads in ((wide, narrow), (narrow, wide)):
        updates, _ = tx.update(grads, tx.init(params), params)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


def test_gradients_of_other_shapes_are_all_named():
    """All at once.

    Fault: gradients have other shapes than the parameters
    Happens: `update` raises ValueError that names each of them
    Kept: nothing has run
    """
    params = rng_tree(0)
    tx = dmuon(0.1, ns_steps=1)
    grads = dict(params, kernel=params["other"], head={"w": params["kernel"]})
    with pytest.raises(ValueError, match=r"(?s)\['head'\]\['w'\].*\['kernel'\]"):
        tx.update(grads, tx.init(params), params)
    for axis in (0, -1):  # one dimension more, which could make matrices of biases
        grads = jax.tree.map(lambda x, axis=axis: jnp.expand_dims(x, axis), params)
        for update in (tx.update, jax.jit(tx.update)):
            with pytest.raises(ValueError, match="shaped as parameters") as caught:
                update(grads, tx.init(params), params)
            paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(params)]
            assert all(f" at {path}" in str(caught.value) for path in paths)


def test_zero_gradients_give_zero_updates():
    """No division by zero.

    Fault: the gradient of a layer is zero
    Happens: its update is exactly zero
    Kept: the state stays finite
    """
    mesh = mesh8()
    params = put(rng_tree(0), mesh)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for dtype in ("float32", "float16", "bfloat16"):
        tx = dmuon(
            0.1,
            ns_steps=2,
            compute_dtype=dtype,
            exchange_dtype=dtype,
            consistent_rms=0.2,
        )
        updates, state = jax.jit(tx.update)(zeros, tx.init(params), params)
        assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(updates))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"method": "gram"}, 1e-3),
        ({"compute_dtype": "float16", "exchange_dtype": "float16"}, 3e-2),
        ({"compute_dtype": "float16", "method": "gram"}, 3e-2),
        ({"compute_dtype": "bfloat16", "method": "direct"}, 3e-2),
        ({"exchange_dtype": "bfloat16"}, 3e-2),
    ],
    ids=str,
)
def test_named_methods_and_dtypes_run_and_stay_close(options, limit):
    mesh = mesh8()
    params, grads = put(rng_tree(0), mesh), put(rng_tree(1, scale=1e4), mesh)
    plan = plan_owners(params, **options)
    for name in ("method", "compute_dtype"):
        for bucket in plan.buckets if name in options else ():
            used = {"method": bucket.method, "compute_dtype": bucket.compute_dtype}
            assert used[name] == options[name]
    tx = dmuon(0.1, **options)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    theirs = optax.contrib.muon(0.1)
    want, _ = theirs.update(
        rng_tree(1, scale=1e4), theirs.init(rng_tree(0)), rng_tree(0)
    )
    for name in ("kernel", "other"):
        assert relative(updates[name], want[name]) <= limit


def test_bfloat16_gram_is_never_chosen():
    mesh = mesh8()
    plan = plan_owners(put(rng_tree(0), mesh), compute_dtype="bfloat16")
    assert {bucket.method for bucket in plan.buckets} == {"direct"}


def test_orthogonalize_takes_a_tree_and_gives_one():
    mesh = mesh8()
    tree = put(rng_tree(0), mesh)
    got = jax.jit(lambda x: orthogonalize(x, plan=plan_owners(tree)))(tree)
    values = np.linalg.svd(np.asarray(got["kernel"]), compute_uv=False)
    assert values.min() > 0.3 and values.max() < 1.3
    assert got["kernel"].sharding.is_equivalent_to(tree["kernel"].sharding, 2)
    np.testing.assert_array_equal(got["bias"], tree["bias"])


def test_any_matrix_function_runs_on_owners():
    def polar(x):
        u, _, vt = jnp.linalg.svd(x, full_matrices=False)
        return u @ vt

    mesh = mesh8()
    tree = {"a": rng_tree(0)["kernel"], "b": rng_tree(0)["other"]}
    placed = put(tree, mesh)
    plan = plan_owners(placed)
    got = jax.jit(lambda x: dmuon_jax.map_matrices(polar, x, plan))(placed)
    for name, x in tree.items():
        u, _, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
        assert relative(got[name], u @ vt) <= 1e-4


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(16)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def test_linen_train_state():
    module, x = Linen(), jnp.ones((4, 8))
    params = put(module.init(jax.random.key(0), x)["params"], mesh8())
    state = TrainState.create(apply_fn=module.apply, params=params, tx=dmuon(0.02))

    @jax.jit
    def step(state):
        grads = jax.grad(lambda p: jnp.sum(state.apply_fn({"params": p}, x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads)

    after = step(step(state))
    moved = jax.tree.map(lambda a, b: relative(a, b), after.params, params)
    assert all(0 < m < 10 for m in jax.tree.leaves(moved))


def test_nnx_optimizer_equals_the_plain_tree():
    mesh = mesh8()
    model = Nnx(nnx.Rngs(0))
    nnx.update(model, put(nnx.state(model, nnx.Param), mesh))
    plain = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, dmuon(0.02), wrt=nnx.Param)
    x = jnp.ones((4, 8))

    def loss(model):
        return jnp.sum(model(x) ** 2)

    grads = nnx.to_pure_dict(nnx.grad(loss)(model))

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model))

    step(model, optimizer)
    tx = dmuon(0.02)
    updates, _ = jax.jit(tx.update)(grads, tx.init(plain), plain)
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    trees_close(got, optax.apply_updates(plain, updates), 1e-5)


def test_plan_is_hashable_and_survives_json():
    plan = plan_owners(put(rng_tree(0), mesh8()))
    again = Plan.from_json(plan.to_json())
    assert (
        again == plan and hash(again) == hash(plan) and again.digest() == plan.digest()
    )
    assert "24" in plan.summary() and "per owner" in plan.summary()


def test_summary_counts_what_one_owner_holds():
    mesh = mesh8()
    # Two groups feed one bucket; no owner has more than one of its eight matrices.
    rows = {f"a{i}": np.zeros((16, 24), np.float32) for i in range(4)}
    columns = {f"b{i}": np.zeros((24, 16), np.float32) for i in range(4)}
    plan = plan_owners(put(rows | columns, mesh))
    assert len(plan.groups) == 2 and len(plan.buckets) == 1
    row = next(x for x in plan.summary().splitlines() if "16x24" in x)
    assert row.split()[1:3] == ["8", "1"]


def test_a_given_plan_is_used():
    mesh = mesh8()
    params = put(rng_tree(0), mesh)
    plan = plan_owners(params, method="gram")
    tx = dmuon(0.02, plan=plan)
    state = tx.init(params)
    fresh = dmuon(0.02, plan=plan)  # has seen no arrays: the trace shows the mesh
    a, _ = jax.jit(tx.update)(params, state, params)
    b, _ = jax.jit(fresh.update)(params, state, params)
    trees_close(a, b, 0.0)


def test_unknown_shardings_are_refused_not_guessed():
    """No sharding is guessed.

    Fault: a trace cannot tell how parameters are sharded
    Happens: ValueError names the argument to pass and the leaves
    Kept: nothing has run
    """
    mesh = mesh8()
    params = put(rng_tree(0), mesh)
    state = dmuon(0.02).init(params)
    with pytest.raises(ValueError, match=r"param_shardings=.*\['kernel'\]"):
        jax.jit(dmuon(0.02).update)(params, state, params)
    with pytest.raises(ValueError, match="param_shardings="):
        jax.eval_shape(dmuon(0.02).init, params)


def test_a_plan_for_something_else_is_refused_at_init():
    """All differences at once.

    Fault: a plan was made for another tree, mesh or other options
    Happens: `init` raises ValueError that lists every difference
    Kept: nothing has run
    """
    mesh = mesh8()
    params = put(rng_tree(0), mesh)
    plan = plan_owners(params)
    other = dict(params, kernel=put(np.zeros((8, 24), np.float32), mesh))
    with pytest.raises(
        ValueError, match=r"shape \(16, 24\), the tree \(8, 24\), at \['kernel'\]"
    ):
        dmuon(0.02, plan=plan).init(other)
    small = Mesh(np.array(jax.devices()[:4]), ("x",))
    with pytest.raises(ValueError, match="mesh"):
        dmuon(0.02, plan=plan).init(put(rng_tree(0), small))
    del other["kernel"]
    with pytest.raises(ValueError, match=r"the tree lacks or gives Adam, at \['kernel'\]"):
        dmuon(0.02, plan=plan).init(other)
    with pytest.raises(ValueError, match="method='gram'"):
        dmuon(0.02, plan=plan_owners(params, method="direct"), method="gram").init(
            params
        )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ns_steps": 0}, ValueError, "ns_steps must be at least 1, got 0"),
        ({"ns_steps": 2.5}, TypeError, "ns_steps must be an integer"),
        ({"beta": 1.0}, ValueError, "beta must be at least 0.0 and below 1.0, got 1.0"),
        ({"beta": "high"}, TypeError, "beta must be a number"),
        ({"adam_learning_rate": math.nan}, ValueError, "must not be NaN"),
        ({"max_wave_bytes": "1G"}, TypeError, "whole number of bytes, got '1G'"),
        ({"max_owner_bytes": 2.5}, TypeError, "whole number of bytes, got 2.5"),
        ({"owner_axes": ("x", "x")}, ValueError, "each axis once"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"adam_b1": 2.0}, ValueError, "adam_b1"),
        ({"ns_coeffs": "nobody"}, ValueError, "nobody"),
        ({"ns_coeffs": (1.0, 2.0)}, ValueError, r"shape \(3,\)"),
        ({"ns_coeffs": ((1.0, 2.0, 3.0),) * 6}, ValueError, "at most ns_steps=5 rows, got 6"),
        ({"preconditioning": "none"}, ValueError, "preconditioning"),
        ({"method": "fast"}, ValueError, "method must be None, 'direct' or 'gram', got 'fast'"),
        ({"implementation": "cuda"}, ValueError, "implementation"),
        ({"compute_dtype": "int8"}, ValueError, "compute_dtype"),
        ({"compute_dtype": "floaty"}, ValueError, "compute_dtype must be one of"),
        ({"exchange_dtype": "float8_e4m3fn"}, ValueError, "exchange_dtype"),
        ({"plan": {"owners": 3}}, TypeError, "plan must be a Plan, got dict"),
        ({"param_shardings": {"a": P("x")}}, TypeError, "NamedSharding"),
        ({"mu_dtype": "bfloat61"}, ValueError, "mu_dtype must be .* got 'bfloat61'"),
        ({"mu_dtype": "int32"}, ValueError, "mu_dtype must be .* got 'int32'"),
        ({"mu_dtype": 3}, ValueError, "mu_dtype must be .* got 3"),
        ({"nesterov": "yes"}, TypeError, "nesterov must be True or False, got 'yes'"),
        ({"nesterov": None}, TypeError, "nesterov must be True or False, got None"),
        ({"adaptive": "no"}, TypeError, "adaptive must be True or False"),
        ({"bias_correction": 2}, TypeError, "bias_correction must be True or False, got 2"),
        ({"sign_momentum": (True,)}, TypeError, "sign_momentum must be True or False"),
        ({"cautious_weight_decay": "w"}, TypeError, "cautious_weight_decay must be True or"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_refused_at_construction(arguments, error, words):
    with pytest.raises(error, match=words):
        dmuon(0.02, **arguments)


@pytest.mark.parametrize("method", [None, "direct", "gram"])
@pytest.mark.parametrize(
    ("restarts", "error"),
    [
        *[(x, TypeError) for x in ("2", "ab", "", 2, 2.5, True, {2}, {}, np.array([2]))],
        *[(x, TypeError) for x in ((1.5,), (1.0,), (True,), (None,), ("2",), ((1,),))],
        *[(x, ValueError) for x in ((0,), (5,), (-1,), (1, 9))],
    ],
    ids=str,
)
def test_restarts_are_integers_between_two_steps(restarts, error, method):
    given = {"restarts": restarts, "method": method}
    for call in (lambda: dmuon(0.02, **given), lambda: orthogonalize(rng_tree(0), **given)):
        with pytest.raises(error, match=r"restarts must (be None or a tuple of|lie in 1\.\.4)"):
            call()


def test_restarts_of_any_sequence_and_integer_type():
    params = {"w": jnp.ones((4, 8))}
    want = None
    for restarts in ((1, 3), [1, 3], (np.int64(1), np.int32(3)), range(1, 4, 2)):
        tx = dmuon(0.02, restarts=restarts, method="gram")
        got, _ = tx.update(params, tx.init(params), params)
        want = got if want is None else want
        trees_close(got, want, 0.0)


@pytest.mark.parametrize(
    "name", ["learning_rate", "adam_learning_rate", "weight_decay", "adam_weight_decay"]
)
def test_a_schedule_that_gives_no_number_is_named(name):
    params = rng_tree(0)
    for value in (None, "0.1", (0.1,), jnp.ones(1), np.ones((1, 1))):
        tx = dmuon(**{"learning_rate": 0.1, name: lambda _, value=value: value})
        state = tx.init(params)
        for update in (tx.update, jax.jit(tx.update)):
            with pytest.raises(TypeError, match=f"schedule {name} must give a number, got"):
                update(params, state, params)
    for value in (0.1, np.float32(0.1), jnp.float32(0.1), 1):
        tx = dmuon(**{"learning_rate": 0.1, name: lambda _, value=value: value})
        jax.eval_shape(tx.update, params, tx.init(params), params)


def test_leaves_that_cannot_be_matrices_are_all_named_at_init():
    dims = Dims()
    tree = {"int": jnp.ones((4, 4), jnp.int32), "fine": jnp.ones((4, 4))}
    with pytest.raises(TypeError, match=r"floating point, got int32 at \['int'\]"):
        dmuon(0.02).init(tree)
    tree = {"a": jnp.ones(4), "b": jnp.ones(())}
    with pytest.raises(ValueError, match=r"(?s)\['a'\].*\['b'\]"):
        dmuon(0.02, muon_weight_dimension_numbers=dims).init(tree)
    wrong = Dims(0, 0)
    with pytest.raises(ValueError, match="distinct"):
        dmuon(0.02, muon_weight_dimension_numbers=wrong).init({"a": jnp.ones((4, 4))})
    far = Dims(0, 5)
    with pytest.raises(ValueError, match="output_axis"):
        dmuon(0.02, muon_weight_dimension_numbers=far).init({"a": jnp.ones((4, 4))})


def test_one_device_is_needed_no_more_than_a_mesh():
    params, grads = rng_tree(0), [rng_tree(1)]
    got, state, _ = train(dmuon(0.02, method="direct"), params, grads)
    want, want_state, _ = train(optax.contrib.muon(0.02), params, grads)
    trees_close(got, want, 1e-5)
    trees_close(state, want_state, 1e-5)


def test_import_and_construction_touch_no_device():
    code = (
        "import pkgutil, importlib, dmuon_jax\n"
        "skip = ('demo.__main__',)\n"
        "for m in pkgutil.walk_packages(dmuon_jax.__path__, 'dmuon_jax.'):\n"
        "    if not m.name.endswith('__main__') and 'pallas' not in m.name:\n"
        "        importlib.import_module(m.name)\n"
        "dmuon_jax.dmuon(1e-3)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_options_and_meshes_are_named():
    params = rng_tree(0)
    with pytest.raises(TypeError, match=r"options of plan_owners .* got \['owners_axes'\]"):
        plan_owners(params, owners_axes=("x",))
    with pytest.raises(TypeError, match="options of orthogonalize"):
        orthogonalize(params, ns_stepz=3)
    with pytest.raises(TypeError, match="mesh must be a Mesh, got str"):
        place_state(dmuon(0.1).init(params), "x", params)
    with pytest.raises(TypeError, match="budget_s must be a number, got '5'"):
        Measured(budget_s="5")
