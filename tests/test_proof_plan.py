"""The audit against a plan: what dmuon's own update compiles to, and optax's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon, plan_owners
from dmuon_jax.planning.cost import iteration_flops
from dmuon_jax.proof import AuditError, audit
from dmuon_jax.proof.expected import alike, expect
from dmuon_jax.proof.flops import Conditional

# Eleven matrices of one shape on eight owners, eight of another: one bucket is uneven.
SHAPES = {"wide": (11, 64, 256), "deep": (128, 64), "square": (8, 32, 32)}
SPEC = {"wide": P(None, "fsdp"), "deep": P("fsdp"), "square": P(None, "fsdp")}


def rule(params):
    return jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), params
    )


def arrays(mesh):
    return {
        name: jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, SPEC[name])
        )
        for name, shape in SHAPES.items()
    }


def compiled_update(transform, params, shardings, state):
    def update(grads, state, params):
        return transform.update(grads, state, params)

    jitted = jax.jit(update, out_shardings=(shardings, None))
    return jitted.lower(params, state, params).compile()


@pytest.fixture(scope="module")
def updates():
    """Compiled updates of dmuon and optax, and dmuon's plan."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    params = arrays(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    options = {"param_shardings": shardings, "method": "direct"}
    plan = plan_owners(params, mesh, muon_weight_dimension_numbers=rule, **options)
    ours = dmuon(1e-3, muon_weight_dimension_numbers=rule, plan=plan)
    theirs = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=rule)
    found = {}
    for name, transform in (("dmuon", ours), ("optax", theirs)):
        zeros = jax.tree.map(
            lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), params
        )
        found[name] = compiled_update(
            transform, params, shardings, transform.init(zeros)
        )
    return plan, found["dmuon"], found["optax"]


def test_our_update_repeats_nothing(updates):
    plan, ours, _ = updates
    report = audit(ours, plan=plan, device="cpu")
    report.check(redundancy=1.05, collectives_in_loops=0, bytes_ratio=1.0)
    assert report.redundancy >= 1.0
    assert report.plan_bytes == report.scope_bytes > 0
    assert len(report.collectives) == plan.exchange_bytes.collectives
    assert "redundancy" in report.summary() and "bytes over" in report.summary()


def test_optax_does_not_pass(updates):
    plan, _, theirs = updates
    report = audit(theirs, plan=plan)
    with pytest.raises(AuditError, match="redundancy must be at most 1.05, got"):
        report.check(redundancy=1.05, collectives_in_loops=None)


def test_ideal_is_every_matrix_once(updates):
    plan = updates[0]
    useful = sum(
        count * iteration_flops(shape, "direct")
        for count, shape in ((11, (64, 256)), (1, (64, 128)), (8, (32, 32)))
    )
    assert expect(plan).ideal_flops == useful / 8


def test_branches_are_weighted_by_the_devices_that_run_them(updates):
    plan = updates[0]
    flops = iteration_flops((64, 256), "direct")
    buckets = tuple(
        dataclasses.replace(
            bucket, branches=((1,), (2,)), branch_of=(1, 1, 1, *[0] * 5)
        )
        if bucket.shape == (64, 256)
        else dataclasses.replace(
            bucket,
            branches=(tuple(plan.groups[m.group].slots for m in bucket.members),),
            branch_of=(0,) * 8,
        )
        for bucket in plan.buckets
    )
    groups = tuple(
        dataclasses.replace(group, counts=(2, 2, 2, 1, 1, 1, 1, 1))
        if sum(group.counts) == 11
        else group
        for group in plan.groups
    )
    uneven = dataclasses.replace(plan, groups=groups, buckets=buckets)
    expected = expect(uneven)
    assert expected.branch_flops == ((1.0 * flops, 2.0 * flops),)
    assert expected.branch_shares == ((5 / 8, 3 / 8),)
    conditionals = (
        Conditional("other", "", 1, (3.0 * flops, 0.0)),
        Conditional("ours", "", 1, (1.005 * flops, 2.01 * flops)),
        Conditional("again", "", 1, (1.0 * flops, 2.0 * flops)),
    )
    assert expected.weights(conditionals) == {"ours": (5 / 8, 3 / 8)}
    assert not alike((1.0, 2.0), (1.0, 2.0, 3.0))
