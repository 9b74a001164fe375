"""The exchange on its own: what owners see, what returns, what moves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from dmuon_jax import plan_owners
from dmuon_jax.blocks import collect, spread
from dmuon_jax.layout import check_spec, leaf_layout, wide_dtype
from dmuon_jax.matrices import Leaf, MeshShape
from dmuon_jax.owners import map_owners
from dmuon_jax.proof import audit
from dmuon_jax.scales import power_of_two, restored
from dmuon_jax.shardings import partition_spec
from dmuon_jax.wire import NOTHING, align, encode
from tests import fuzz
from tests.layouts import MESHES, make_case
from tests.references import matrices

MESH = MeshShape(("x", "y"), (4, 2))


def pattern(shape):
    """A power of two for each entry of a matrix; hardly two rows or columns are alike."""
    rng = np.random.default_rng(shape)
    return 2.0 ** rng.integers(0, 3, size=shape).astype(np.float32)


def times_pattern(x, exponent, bucket, operands):
    """Wrong unless matrices come whole, with their rows and columns in order."""
    return restored(x, exponent) * pattern(bucket.shape)


def wanted(x, dims):
    """``times_pattern`` of a leaf, in NumPy."""
    stack, undo = matrices(x, dims)
    fans = stack.shape[1:]
    factor = pattern(tuple(sorted(fans)))
    return undo(stack * (factor.T if fans[0] > fans[1] else factor))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(a for a, _ in axes))
def test_owners_see_whole_matrices_and_as_many_bytes_move_as_planned(axes, dtype):
    case = make_case(axes, AxisType.Auto, seed=0)
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in case.params.items()}
    with fuzz.without_planner():  # uneven counts
        plan = plan_owners(
            shapes,
            case.mesh,
            param_shardings=case.shardings,
            momentum_shardings=case.momentum,
            muon_weight_dimension_numbers=case.dims,
            compute_dtype="float32",
            exchange_dtype=dtype,
        )
    names = {f"['{name}']": name for name in case.params}
    # Integers below 2^11: float16 holds them, also times a power of two.
    host = {
        name: ((np.arange(x.size) + i) % 2039).reshape(x.shape).astype(np.float32)
        for i, (name, x) in enumerate(case.params.items())
    }
    arrays, want = [], []
    for item in plan.layouts:
        name = names[item.leaf.path]
        sharding = NamedSharding(case.mesh, partition_spec(item.leaf.spec_in))
        arrays.append(jax.device_put(host[name], sharding))
        want.append(wanted(host[name], case.dims[name]))

    def body(*arrays):
        return map_owners(times_pattern, arrays, plan, case.mesh)

    compiled = jax.jit(body).lower(*arrays).compile(compiler_options=fuzz.QUICK)
    for item, x, y in zip(plan.layouts, compiled(*arrays), want, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=item.leaf.path)
        spec = partition_spec(item.leaf.spec_out)
        assert x.sharding.is_equivalent_to(NamedSharding(case.mesh, spec), x.ndim)
    moved = {"all-to-all": 0, "all-gather": 0}
    found = audit(compiled).collectives
    for collective in found:
        moved[collective.kind] += collective.run_bytes
    expected = plan.exchange_bytes
    assert len(found) == expected.collectives
    assert moved == {
        "all-to-all": expected.all_to_all,
        "all-gather": expected.all_gather,
    }


def test_counts_may_differ_from_owner_to_owner():
    x = jnp.arange(1, 13.0).reshape(2, 6, 1)
    counts = (0, 3, 1, 1, 1)
    slots = spread(x, counts)
    assert slots.shape == (2, 5, 3, 1)
    np.testing.assert_array_equal(
        slots[0, ..., 0], [[0, 0, 0], [1, 2, 3], [4, 0, 0], [5, 0, 0], [6, 0, 0]]
    )
    np.testing.assert_array_equal(collect(slots, counts), x)


def side_of_two_blocks():
    """The way in of an (8, 4) matrix whose rows are cut in two."""
    leaf = Leaf("w", (8, 4), "float32", (0,), (1,), (("x",), ()), (("x",), ()))
    return leaf_layout(leaf, MeshShape(("x",), (2,)), ("x",)).layout.side("in")


@pytest.mark.parametrize("power", [-110, -100, -20, 0, 20, 100, 124])
def test_blocks_of_any_size_keep_eleven_bits_in_float16(power):
    side = side_of_two_blocks()
    host = np.random.default_rng(0).normal(size=(2, 1, 4, 4)).astype(np.float32)
    host[1] /= 2**9
    x = power_of_two(jnp.asarray(host), jnp.int32(power))
    sent = encode(x, jnp.abs(x), 2)
    assert sent.dtype == jnp.float16 and sent.shape == (2, 1, 17)
    assert bool(jnp.isfinite(sent).all())
    blocks, exponent = align(sent, side)
    largest = float(jnp.abs(blocks).max())
    assert 0.5 <= largest < 1
    back = power_of_two(blocks.astype(jnp.float32), exponent[0])
    # Relative to the whole matrix, which is what the iteration divides by.
    error = jnp.abs(back - x).max() / jnp.abs(x).max()
    assert float(error) <= 2.0**-11


def test_zero_blocks_have_no_say_and_infinite_ones_stay_seen():
    side = side_of_two_blocks()
    x = jnp.zeros((2, 1, 4, 4)).at[1].set(2.0**-30)
    sent = encode(x, jnp.abs(x), 2)
    assert float(sent[0, 0, -1]) == NOTHING
    blocks, exponent = align(sent, side)
    assert exponent.shape == (1, 1, 1) and int(exponent[0, 0, 0]) == -29
    np.testing.assert_array_equal(blocks[1], np.full((1, 4, 4), 0.5))
    zeros = jnp.zeros((2, 1, 4, 4))
    blocks, exponent = align(encode(zeros, zeros, 2), side)
    assert int(exponent[0, 0, 0]) == 0 and not blocks.any()
    for bad in (jnp.inf, jnp.nan):
        spoiled = x.at[0, 0, 1, 2].set(bad)
        blocks, _ = align(encode(spoiled, jnp.abs(spoiled), 2), side)
        assert not math.isfinite(float(blocks[0, 0, 1, 2]))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ((("x",),), "cover every dimension"),
        ((("x",), ("z",)), r"axes of the mesh, not \['z'\]"),
        ((("x",), ("x",)), "each axis once"),
        ((("x",), ("x", "y")), "each axis once"),
        (((), ("x",)), "6 is not a multiple of 4"),
        (((), ("y", "x")), r"6 is not a multiple of 8 \(yxx\)"),
    ],
)
@pytest.mark.parametrize("name", ["momentum", "parameter"])
def test_specs_that_do_not_fit_are_refused(spec, words, name):
    good = ((), ())
    specs = (spec, good) if name == "momentum" else (good, spec)
    leaf = Leaf("the/leaf", (8, 6), "float32", (0,), (1,), *specs)
    with pytest.raises(ValueError, match=f"the {name}'s spec must .*{words}.*the/leaf"):
        leaf_layout(leaf, MESH, ("x", "y"))
    check_spec(leaf, name, good, MESH)


def test_an_axis_cannot_force_the_owner_twice():
    def layout(spec_in, spec_out):
        leaf = Leaf("w", (8, 4, 8, 8), "bfloat16", (2,), (3,), spec_in, spec_out)
        return leaf_layout(leaf, MESH, ("y",))

    # The momentum is brought to the parameter's sharding first.
    none = ()
    for spec_in in (
        (none, ("x",), none, none),
        (("y", "x"), none, none, none),
        (("y",), none, none, none),
    ):
        moved = layout(spec_in, (("x", "y"), none, none, none))
        assert moved.leaf.spec_in == moved.leaf.spec_out
        assert (moved.layout.both, moved.layout.free) == (("x", "y"), ())
        assert moved.core == 4
    kept = layout((("x",), ("y",), none, none), (("x",), none, none, none))
    assert kept.leaf.spec_in != kept.leaf.spec_out
    assert (kept.layout.both, kept.layout.forced_in) == (("x",), ("y",))
    assert kept.layout.num_owners == 1 and kept.core == 4
    assert kept.layout.dtype == "float32" == wide_dtype("float16")
    assert wide_dtype("float64") == "float64"
