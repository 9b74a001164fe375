"""Every layout: values, shardings, one compilation, collectives and bytes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from dmuon_jax import dmuon, plan_owners
from dmuon_jax.matrices import oriented
from dmuon_jax.proof import audit
from tests.layouts import MESHES, make_case
from tests.references import muon_updates, relative

RATE, DECAY, STEPS = 0.02, 0.1, 2


@dataclasses.dataclass(frozen=True)
class Run:
    """Two jitted steps of one case, and what they were compiled to."""

    case: object
    plan: object
    audit: object
    params: dict
    updates: list
    state: object
    compilations: int


@functools.cache
def run(axes, kind, method):
    case = make_case(axes, kind, seed=0)
    options = dict(momentum_shardings=case.momentum, method=method)
    tx = dmuon(
        RATE,
        weight_decay=DECAY,
        ns_steps=STEPS,
        muon_weight_dimension_numbers=case.dims,
        **options,
    )
    params = jax.device_put(case.params, case.shardings)
    params = jax.jit(lambda x: jax.tree.map(lambda a: a + 0, x))(params)
    state = tx.init(params)
    plan = plan_owners(params, muon_weight_dimension_numbers=case.dims, **options)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, u: p + u, params, updates), updates, state

    seen = []
    for grads in gradients(case):
        grads = jax.device_put(grads, jax.tree.map(lambda x: x.sharding, params))
        params, updates, state = step(params, state, grads)
        seen.append(updates)
    text = step.lower(params, state, grads).compile()
    return Run(case, plan, audit(text), params, seen, state, step._cache_size())


def gradients(case):
    rng = np.random.default_rng(1)
    return [
        {k: rng.normal(size=v.shape).astype(np.float32) for k, v in case.params.items()}
        for _ in range(2)
    ]


CASES = [
    pytest.param(
        axes, kind, method, id=f"{'x'.join(a for a, _ in axes)}-{kind}-{method}"
    )
    for axes in MESHES
    for kind, method in (
        (AxisType.Auto, "direct"),
        (AxisType.Explicit, "gram"),
    )
]


@pytest.mark.parametrize(("axes", "kind", "method"), CASES)
def test_updates_equal_the_reference(axes, kind, method):
    done = run(axes, kind, method)
    limit = 1e-5 if method == "direct" else 1e-3
    wanted = gradients(done.case)
    for name, start in done.case.params.items():
        dims = done.case.dims[name]
        grads = [g[name] for g in wanted]
        wanted_updates = list(
            muon_updates(start, grads, dims, rate=RATE, decay=DECAY, steps=STEPS)
        )
        for got, (update, _) in zip(done.updates, wanted_updates, strict=True):
            assert relative(got[name], update) <= limit, name
        mu = done.state.inner_states["muon"].inner_state[0].mu[name]
        assert relative(mu, wanted_updates[-1][1]) <= 1e-6, name


@pytest.mark.parametrize(("axes", "kind", "method"), CASES)
def test_shardings_are_kept_and_one_program_compiled(axes, kind, method):
    done = run(axes, kind, method)
    assert done.compilations == 1
    mu = done.state.inner_states["muon"].inner_state[0].mu
    for name, x in done.params.items():
        want = done.case.shardings[name]
        assert x.sharding.is_equivalent_to(want, x.ndim), name
        assert done.updates[-1][name].sharding.is_equivalent_to(want, x.ndim), name
        if name in done.case.momentum and "moved" not in name:
            want = done.case.momentum[name]
            assert mu[name].sharding.is_equivalent_to(want, x.ndim), name


@pytest.mark.parametrize(("axes", "kind", "method"), CASES)
def test_collectives_and_bytes_equal_the_plan(axes, kind, method):
    done = run(axes, kind, method)
    expected = done.plan.exchange_bytes
    found = {"all-to-all": 0, "all-gather": 0}
    # Outside `shard_map` only gradients move: to the sharding of a momentum that is cut
    # otherwise than the parameter.
    exchange = [x for x in done.audit.collectives if "shard_map" in x.op_name]
    for item in exchange:
        assert not item.in_loop
        found[item.kind] += item.run_bytes
    assert found == {
        "all-to-all": expected.all_to_all,
        "all-gather": expected.all_gather,
    }
    assert len(exchange) == expected.collectives
    others = [x for x in done.audit.collectives if "shard_map" not in x.op_name]
    assert not others or done.case.momentum


@pytest.mark.parametrize(("axes", "kind", "method"), CASES)
def test_no_work_is_repeated(axes, kind, method):
    done = run(axes, kind, method)
    total, largest = 0.0, 0.0
    for leaf in done.plan.leaves:
        for shape in leaf.matrix_shapes:
            flops = matrix_flops(oriented(shape), method)
            total += flops * leaf.num_parcels
            largest = max(largest, flops)
    ideal = max(total / done.plan.mesh.num_devices, largest)
    busiest = max(device_flops(done.plan, method))
    assert done.audit.dot_flops >= busiest
    assert busiest >= ideal * 0.999


def matrix_flops(shape, method):
    """Two steps without a restart: 2 of gram, square and apply; or 1 gram, 5 small."""
    s, long = shape
    if method == "direct":
        return STEPS * (4 * s * s * long + 2 * s**3)
    return 4 * s * s * long + 5 * 2 * s**3


def device_flops(plan, method):
    for device in range(plan.mesh.num_devices):
        place, total = plan.mesh.coordinates(device), 0.0
        for bucket in plan.buckets:
            layout = plan.group_layout(plan.groups[bucket.members[0].group])
            branch = bucket.branch_of[plan.mesh.index(place, layout.varying)]
            total += sum(bucket.branches[branch]) * matrix_flops(bucket.shape, method)
        yield total
