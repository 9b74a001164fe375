"""What only a GPU's program shows of the exchange, compiled for GPUs that are not here."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon, plan_owners, state_shardings
from dmuon_jax.proof import audit
from dmuon_jax.proof.topology import compile_devices
from tests.layouts import MESHES, make_case

pytestmark = pytest.mark.cuda_compile
ROWS, COLUMNS, BATCH = 1024, 2048, 4096


@pytest.fixture(scope="module")
def gpus():
    try:
        return np.array(compile_devices("h200", 8))
    except NotImplementedError as error:
        pytest.skip(str(error))


def abstract(shapes, shardings):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def abstract_state(tx, params, plan):
    shardings = state_shardings(tx, params, plan)
    return abstract(jax.eval_shape(tx.init, params), shardings)


def own_collectives(compiled):
    return [x for x in audit(compiled).collectives if "shard_map" in x.op_name]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(n for n, _ in axes))
def test_bytes_in_16_bits_equal_the_plan(gpus, axes, dtype):
    case = make_case(axes, AxisType.Auto, seed=0)
    sizes = tuple(size for _, size in axes)
    mesh = Mesh(gpus[: math.prod(sizes)].reshape(sizes), case.mesh.axis_names)

    def there(tree):
        return {k: NamedSharding(mesh, s.spec) for k, s in tree.items()}

    params = abstract(case.params, there(case.shardings))
    options = dict(
        muon_weight_dimension_numbers=case.dims,
        momentum_shardings=there(case.momentum),
        exchange_dtype=dtype,
    )
    plan = plan_owners(params, **options)
    tx = dmuon(
        0.02,
        ns_steps=1,
        implementation="xla",
        param_shardings=there(case.shardings),
        **options,
    )
    state = abstract_state(tx, params, plan)
    found = own_collectives(jax.jit(tx.update).lower(params, state, params).compile())
    moved = {"all-to-all": 0, "all-gather": 0}
    for item in found:
        moved[item.kind] += item.run_bytes
    expected = plan.exchange_bytes
    assert {group.exchange_dtype for group in plan.groups} == {dtype}
    assert moved == {
        "all-to-all": expected.all_to_all,
        "all-gather": expected.all_gather,
    }


def test_unreduced_gradients_are_scattered_straight_to_the_momentum(gpus):
    mesh = Mesh(gpus, ("data",), axis_types=(AxisType.Explicit,))
    shapes = {
        "replicated": jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        "rows": jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        "bias": jax.ShapeDtypeStruct((COLUMNS,), jnp.float32),
    }
    specs = {"replicated": P(None, None), "rows": P("data", None), "bias": P(None)}
    params = abstract(shapes, {k: NamedSharding(mesh, s) for k, s in specs.items()})
    plan = plan_owners(params)
    tx = dmuon(0.05, plan=plan, implementation="xla")
    sharding = NamedSharding(mesh, P("data", None))
    x = jax.ShapeDtypeStruct((BATCH, ROWS), jnp.bfloat16, sharding=sharding)
    y = jax.ShapeDtypeStruct((BATCH, COLUMNS), jnp.bfloat16, sharding=sharding)

    def step(params, state, x, y):
        def product(x, y):
            into = P(None, None, unreduced={"data"})
            return jnp.einsum(
                "bi,bo->io", x, y, preferred_element_type=jnp.float32, out_sharding=into
            )

        grads = {
            "replicated": product(x, y),
            "rows": product(jnp.sin(x), y),
            "bias": jnp.einsum(
                "bo->o",
                y.astype(jnp.float32),
                out_sharding=P(None, unreduced={"data"}),
            ),
        }
        return tx.update(grads, state, params)

    with jax.set_mesh(mesh):
        state = abstract_state(tx, params, plan)
        report = audit(jax.jit(step).lower(params, state, x, y).compile())
    moved = {}
    for item in report.collectives:
        if "shard_map" not in item.op_name:
            moved[item.kind] = moved.get(item.kind, 0) + item.run_bytes
    # Both matrices are summed into the shards of their momentum; only the bias, whose Adam
    # moments are replicated, is summed whole.
    assert set(moved) == {"reduce-scatter", "all-reduce"}
    assert moved["reduce-scatter"] <= 2 * 4 * ROWS * COLUMNS
    assert moved["all-reduce"] == 4 * COLUMNS


def test_momentum_in_host_memory_is_put_back_there(gpus):
    """An absent device has no memory kinds, so the program itself moves the momentum out."""
    mesh = Mesh(gpus, ("data",))
    rows = NamedSharding(mesh, P("data"))
    params = {"w": jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=rows)}
    tx = dmuon(0.05, param_shardings=rows, implementation="xla")
    state = abstract_state(tx, params, plan_owners(params))

    def step(space, state, params):
        moved = jax.tree.map(
            lambda x: jax.device_put(x, space) if x.ndim == 2 else x, state
        )
        return tx.update(params, moved, params)

    found = {}
    for space in jax.memory.Space.Host, jax.memory.Space.Device:
        compiled = jax.jit(functools.partial(step, space)).lower(state, params).compile()
        found[space] = compiled.memory_analysis().host_output_size_in_bytes
        text = f"f32[{ROWS // 8},{COLUMNS}]{{1,0:S(5)}} copy-done"
        assert (text in compiled.as_text()) == (space == jax.memory.Space.Host)
    assert list(found.values()) == [4 * ROWS * COLUMNS // 8, 0]
