"""The audit against a plan: what dmuon's own update compiles to, and optax's."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon, plan_owners
from dmuon_jax.planning.cost import iteration_flops
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.groups import Part
from dmuon_jax.proof import AuditError, audit, parse, simulate_streams
from dmuon_jax.proof.expected import (
    device_branches,
    expect,
    halved_buckets,
    told_branches,
    weights,
)
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


def in_two_parts(plan):
    """The plan with the two slots of the eleven matrices in waves of their own."""
    number, group = next(
        (i, x) for i, x in enumerate(plan.groups) if sum(x.counts) == 11
    )
    groups = list(plan.groups)
    groups[number] = dataclasses.replace(group, parts=(Part(1), Part(1, wave=1)))
    kept = [x for x in plan.buckets if x.members[0].group != number]
    (bucket,) = (x for x in plan.buckets if x.members[0].group == number)
    first = dataclasses.replace(bucket, branches=((1,),), branch_of=(0,) * 8)
    second = dataclasses.replace(
        bucket,
        members=(dataclasses.replace(bucket.members[0], part=1),),
        branches=((0,), (1,)),
        branch_of=tuple(count - 1 for count in group.counts),
    )
    buckets = (*kept, first, second)
    return dataclasses.replace(plan, groups=tuple(groups), buckets=buckets)


@pytest.mark.parametrize("parted", [False, True])
def test_ideal_is_every_matrix_once(updates, parted):
    plan = in_two_parts(updates[0]) if parted else updates[0]
    useful = sum(
        count * iteration_flops(shape, "direct")
        for count, shape in ((11, (64, 256)), (1, (64, 128)), (8, (32, 32)))
    )
    assert expect(plan).ideal_flops == pytest.approx(useful / 8)


def test_ideal_counts_half_where_kernels_do(updates):
    plan, ours, _ = updates
    assert halved_buckets(parse(ours.as_text())) == frozenset()
    line = (
        "  %k{0} = f16[8,8] custom-call(), custom_call_target=\"mosaic_gpu_v2\", "
        'metadata={{op_name="jit(f)/shard_map/{1}/mpmd_map"}}'
    )
    paths = (
        "newton_schulz/bucket0/cond/branch_1_fun/jit(_product)/gram",
        "newton_schulz/bucket11/symmetric_matmul",
        "newton_schulz/bucket2/polynomial_kernel",
        "bucket3/gram",
    )
    lines = [line.format(i, path) for i, path in enumerate(paths)]
    text = "\n".join(["HloModule m", "ENTRY %main () -> f16[8,8] {", *lines, "}"])
    assert halved_buckets(parse(text)) == {0, 11}
    shapes = [bucket.shape for bucket in plan.buckets]
    number = shapes.index((64, 256))
    saved = 11 * (iteration_flops((64, 256), "direct") - (15 * 64**2 * 256 + 5 * 64**3))
    less = expect(plan).ideal_flops - expect(plan, halved={number}).ideal_flops
    assert less == pytest.approx(saved / 8)


def alone(text, plan):
    """The timeline of each device, as if all ran what it runs.

    Each conditional is made a call of the branch that the device runs.
    """

    def choose(match, device):
        bucket = plan.buckets[int(match["bucket"])]
        owner = device if len(bucket.branch_of) == 8 else device % 4
        number = bucket.branch_of[owner]
        operand = match["operands"].split(", ")[1 + number]
        branch = match["branches"].split(", ")[number]
        return f"call({operand}), to_apply={branch}, {match['rest']}"

    for device in range(8):
        chosen, count = CONDITIONAL.subn(lambda m, d=device: choose(m, d), text)
        assert count == sum(len(bucket.branches) > 1 for bucket in plan.buckets)
        yield simulate_streams(parse(chosen), DEVICES["cpu"])


CONDITIONAL = re.compile(
    r"conditional\((?P<operands>[^)]*)\), branch_computations=\{(?P<branches>[^}]*)\}, "
    r"(?P<rest>metadata=\{op_name=\"[^\"]*/newton_schulz/bucket(?P<bucket>\d+)/cond)"
)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 4}], ids=str)
def test_the_clock_is_that_of_the_devices(axes, updates):
    """Collectives are synchronous on CPU: between two of them the slowest device counts."""
    plan, compiled, _ = updates if len(axes) == 1 else local_update(axes)
    text = compiled.as_text()
    report = audit(compiled, plan=plan, device="cpu")
    timelines = list(alone(text, plan))
    parts = []
    for timeline in timelines:
        sums = [0.0]
        for event in timeline.events:
            if event.lane == "compute":
                sums[-1] += event.duration_us * event.times
            else:
                assert event.times == 1
                sums.append(0.0)
        parts.append(sums)
    talk_us = timelines[0].total_us("communication")
    step_us = talk_us + sum(map(max, zip(*parts, strict=True)))
    busy_us = [timeline.total_us("compute") for timeline in timelines]
    assert len(set(busy_us)) > 1
    assert report.step_us == pytest.approx(step_us)
    assert report.exposed_us == pytest.approx(talk_us)
    assert report.timeline.total_us("compute") == pytest.approx(max(busy_us))
    assert report.imbalance_us == pytest.approx(step_us - talk_us - max(busy_us))
    slowest = audit(compiled, device="cpu")
    assert slowest.step_us >= report.step_us
    flops = [
        sum(event.flops * event.times for event in timeline.events)
        for timeline in timelines
    ]
    assert report.scope_mean_flops == pytest.approx(sum(flops) / 8)


def local_update(axes):
    """An update whose owners are spread over fsdp alone: replicas repeat their work."""
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    params = arrays(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    plan = plan_owners(
        params,
        muon_weight_dimension_numbers=rule,
        method="direct",
        owner_axes=("fsdp",),
    )
    tx = dmuon(1e-3, muon_weight_dimension_numbers=rule, plan=plan)
    zeros = jax.tree.map(
        lambda x: jax.device_put(jnp.zeros(x.shape), x.sharding), params
    )
    return plan, compiled_update(tx, params, shardings, tx.init(zeros)), None


def test_branches_of_devices_are_those_that_run():
    """As `axis_index` numbers the devices on a mesh of three axes, whichever vary."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    place = NamedSharding(mesh, P(None, ("c", "a")))
    params = {"w": jax.ShapeDtypeStruct((3, 64, 256), jnp.float32, sharding=place)}
    for owner_axes in (None, ("a", "c"), ("c",)):
        plan = plan_owners(
            params, muon_weight_dimension_numbers=rule, owner_axes=owner_axes
        )
        (bucket,) = plan.buckets
        assert len(bucket.branches) == 2
        varying = plan.group_layout(plan.groups[0]).varying
        run = jax.shard_map(
            lambda branch_of: branch_of[jax.lax.axis_index(varying)][None],  # noqa: B023
            mesh=mesh,
            in_specs=P(),
            out_specs=P(("a", "b", "c")),
            check_vma=False,
        )(jnp.asarray(bucket.branch_of))
        assert device_branches(plan, bucket) == tuple(run.tolist())


def switches(*names):
    """Text of a program with conditionals of two branches without matmuls, by op_name."""
    lines = [
        f"  %c{number} = f32[] conditional(%i, %x, %x), branch_computations={{%b0, %b1}}, "
        f'metadata={{op_name="{name}"}}'
        for number, name in enumerate(names)
    ]
    branches = [f"%b{i} (x: f32[]) -> f32[] {{\n}}\n" for i in range(2)]
    head = "HloModule test, is_scheduled=true, num_partitions=8"
    return "\n".join([head, *branches, "ENTRY %main () -> f32[] {", *lines, "}"])


def test_switches_are_known_by_the_names_of_their_buckets(updates):
    """Whatever their branches cost: kernels may do half of a product."""
    plan = updates[0]
    number = next(i for i, x in enumerate(plan.buckets) if len(x.branches) == 2)
    bucket, path = plan.buckets[number], "jit(step)/shard_map/newton_schulz/bucket"
    text = switches(
        "jit(step)/cond",
        f"{path}{number}/cond/branch_1_fun/cond",
        f"{path}{number}/cond",
    )
    assert told_branches(parse(text), plan) == {"c2": bucket.branch_of}
    one = next((i for i, x in enumerate(plan.buckets) if len(x.branches) == 1), 8)
    text = switches(f"{path}{one}/cond", f"{path}9/cond")
    with pytest.raises(
        ValueError, match=r"bucket \d has \d.*at c0; bucket 9 has 0.*c1"
    ):
        audit(text, plan=plan)


def test_branches_are_weighted_by_the_devices_that_run_them():
    conditionals = (
        Conditional("other", "", 1, (3.0, 0.0)),
        Conditional("ours", "", 1, (1.0, 2.0, 4.0)),
    )
    told = {"ours": (1, 1, 1, *[0] * 5), "no matmuls": (0,) * 8}
    assert weights(conditionals, told) == {"ours": (5 / 8, 3 / 8, 0.0)}
