"""``max_wave_bytes``: less memory, same values."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon, plan_owners
from dmuon_jax.plan_checks import owner_bytes, wave_bytes
from dmuon_jax.proof import audit
from tests.layouts import make_mesh
from tests.references import relative

SIDE, NUMBER = 64, 32
SHARE = 4 * SIDE * SIDE  # bytes of one matrix: what one leaf puts on one device


def setup():
    mesh = make_mesh((("x", 4),), AxisType.Auto)
    rng = np.random.default_rng(0)
    tree = {
        f"w{i:02}": rng.normal(size=(SIDE, SIDE)).astype(np.float32) for i in range(NUMBER)
    }
    return jax.device_put(tree, NamedSharding(mesh, P("x")))


def compiled(params, limit):
    tx = dmuon(0.1, ns_steps=2, method="direct", max_wave_bytes=limit)
    state = tx.init(params)
    program = jax.jit(tx.update).lower(params, state, params).compile()
    return program, program(params, state, params)[0]


def test_waves_bound_memory_and_change_nothing():
    params = setup()
    whole, want = compiled(params, None)
    # Four leaves fill a wave: one whole matrix on each of the four devices.
    waves, got = compiled(params, SHARE)
    for name in params:
        assert relative(got[name], want[name]) <= 1e-6
    plan = plan_owners(params, max_wave_bytes=SHARE)
    assert plan.num_waves == NUMBER // 4
    most = waves.memory_analysis().temp_size_in_bytes
    least = whole.memory_analysis().temp_size_in_bytes
    owned = NUMBER // 4 * SHARE
    assert least >= 2 * owned
    # Two waves under way, each with its matrices, a product or two, and blocks.
    assert most <= 0.6 * least
    assert len(audit(waves).collectives) == plan.exchange_bytes.collectives


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_every_wave_is_as_large_as_the_limit_allows(limit):
    mesh = make_mesh((("x", 4),), AxisType.Auto)
    specs = {"w": P("x"), "v": P(None, "x")}
    params = {
        f"{name}{i:02}": jax.ShapeDtypeStruct(
            (SIDE, SIDE), np.float32, sharding=NamedSharding(mesh, spec)
        )
        for name, spec in specs.items()
        for i in range(18)
    }
    plan = plan_owners(params, max_wave_bytes=limit * SHARE)
    held = [
        sum(plan.groups[group].parts[part].slots for x in wave for group, part in x)
        for wave in plan.waves
    ]
    # 18 matrices of a layout take 5 slots of each of 4 owners.
    assert max(held) <= limit and plan.num_waves == -(-10 // limit)


def test_memory_does_not_grow_with_steps():
    params = setup()
    sizes = []
    for steps in (5, 20):
        tx = dmuon(0.1, ns_steps=steps, method="direct")
        state = tx.init(params)
        program = jax.jit(tx.update).lower(params, state, params).compile()
        sizes.append(program.memory_analysis().temp_size_in_bytes)
    assert sizes[1] <= 1.02 * sizes[0]


def test_no_device_holds_a_whole_bucket():
    params = setup()
    program, _ = compiled(params, None)
    bucket = NUMBER * SHARE
    local = bucket // 4
    # Momentum, its bias-corrected form, packed blocks, and four arrays of owned matrices.
    assert program.memory_analysis().temp_size_in_bytes <= 8 * local


def test_a_limit_below_one_leaf_is_refused():
    """At init.

    Fault: `max_wave_bytes` is too small for some leaf
    Happens: `init` raises ValueError with the bytes needed and the leaf
    Kept: nothing has run
    """
    params = setup()
    with pytest.raises(ValueError, match=rf"{SHARE} bytes, got {SHARE - 1} at \['w00'\]"):
        dmuon(0.1, max_wave_bytes=SHARE - 1).init(params)
    with pytest.raises(ValueError, match="max_wave_bytes must be positive"):
        dmuon(0.1, max_wave_bytes=0)


def small_params(sizes):
    mesh = make_mesh(tuple(zip("xyz", sizes, strict=False)), AxisType.Auto)
    shapes = [(16, 8)] * 5 + [(8, 24)] * 3 + [(3, 8, 8)]
    return {
        f"w{i}": jax.ShapeDtypeStruct(
            shape, np.float32, sharding=NamedSharding(mesh, P(*(None,) * (len(shape) - 2), "x"))
        )
        for i, shape in enumerate(shapes)
    } | {"c": jax.ShapeDtypeStruct((8, 8), np.complex64, sharding=NamedSharding(mesh, P("x")))}


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (1,)], ids=str)
@pytest.mark.parametrize("name", ["max_wave_bytes", "max_owner_bytes"])
def test_a_limit_that_the_given_plan_breaks_is_refused(sizes, name):
    """A limit is kept or refused, never dropped; a plan that was made with it is taken.

    Fault: `plan=` takes more memory than `max_wave_bytes` or `max_owner_bytes` allow
    Happens: `init` raises ValueError with the limit and what the plan takes
    Kept: nothing has run
    """
    params = small_params(sizes)
    dims = {p: optax.contrib.MuonDimensionNumbers(-2, -1) for p in params}
    rule = {"muon_weight_dimension_numbers": dims}

    def init(plan, limit):
        tx = dmuon(0.1, plan=plan, **{name: limit}, **rule)
        return jax.eval_shape(tx.init, params)

    held = wave_bytes if name == "max_wave_bytes" else owner_bytes
    free = plan_owners(params, **rule)
    for dtype in ("float32", "float16"):
        for limit in (1500, 3000, held(free) - 1, held(free), 10**6):
            try:
                plan = plan_owners(params, **{name: limit}, exchange_dtype=dtype, **rule)
            except ValueError as error:
                assert f"{name} must hold" in str(error)
                continue
            assert held(plan) <= limit
            init(plan, limit)
            init(plan, held(plan))
            for less in (held(plan) - 1, 1):
                words = f"{name}={less} but the plan's .* takes {held(plan)} bytes"
                with pytest.raises(ValueError, match=words):
                    init(plan, less)


def test_what_a_limit_counts():
    """By hand: 9 matrices on 8 owners are 2 slots of each, whether or not an owner has 2."""
    mesh = make_mesh((("x", 8),), AxisType.Auto)
    leaf = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=NamedSharding(mesh, P("x")))
    params = {f"w{i}": leaf for i in range(9)}
    plan = plan_owners(params, exchange_dtype="float16")
    assert (owner_bytes(plan), wave_bytes(plan)) == (2 * 128 * 2, 2 * 128 * 4)
    waves = plan_owners(params, exchange_dtype="float16", max_wave_bytes=128 * 4)
    assert (owner_bytes(waves), wave_bytes(waves)) == (2 * 128 * 2, 128 * 4)
    # What a clock divides to hide exchanges is no bound: its waves overlap.
    unbound = dataclasses.replace(waves, bounded=False)
    assert wave_bytes(unbound) == 2 * 128 * 4


def test_one_device_works_in_waves_too():
    tree = {f"w{i}": np.full((4, 4), i + 1.0, np.float32) for i in range(4)}
    got = dmuon(0.1, max_wave_bytes=64)
    want = optax.contrib.muon(0.1)
    a, _ = got.update(tree, got.init(tree), tree)
    b, _ = want.update(tree, want.init(tree), tree)
    for name in tree:
        assert relative(a[name], b[name]) <= 1e-3
