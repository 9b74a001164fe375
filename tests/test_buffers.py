"""Groups that share a buffer: who may, what it saves, and that owners move for it."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from dmuon_jax import plan_owners
from dmuon_jax.matrices import MeshShape
from dmuon_jax.owners import map_owners
from dmuon_jax.planning.buffers import Sharing, share_buffers, shared_bound_us
from dmuon_jax.planning.build import make_plan
from dmuon_jax.planning.clusters import Placement, cluster_settings, model_leaves
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.model import TICKS_PER_US, build_model
from dmuon_jax.planning.problem import Problem, Task
from dmuon_jax.planning.solver import solve
from dmuon_jax.planning.workloads import load_workload
from dmuon_jax.proof import audit
from dmuon_jax.scales import restored
from tests.layouts import make_mesh
from tests.planning_cases import RandomCost, compositions

ROUTE, OTHER = ("a",), ("b",)


def random_problem(seed, owners=4):
    rng = np.random.default_rng(seed)
    tasks = tuple(
        Task(
            name=f"{number}",
            num_parcels=int(rng.integers(1, 4)),
            free_axes=("x",),
            matrices=((2 + number, 8),),
            slot_bytes=((("x",), int(rng.integers(1, 40))),),
        )
        for number in range(3)
    )
    return Problem((("x", owners),), tasks, RandomCost(seed), bandwidths=(("x", 1.0),))


def cost_us(problem, counts, methods, routes):
    """The least makespan plus exchange of ``counts``, over all ways to share buffers."""
    tasks = range(len(problem.tasks))
    load = [
        sum(
            problem.cost.time_us(shape, row[owner], methods[shape])
            for row, task in zip(counts, problem.tasks, strict=True)
            for shape in task.matrices
            if row[owner]
        )
        for owner in range(len(counts[0]))
    ]
    rows = [max(row) * problem.slot_us(t) for row, t in zip(counts, problem.tasks, strict=True)]
    totals = []
    for buffers in itertools.product(tasks, repeat=len(counts)):
        together = [[i for i in tasks if buffers[i] == b] for b in set(buffers)]
        if all(
            routes[i] == routes[j] and not any(map(min, counts[i], counts[j]))
            for some in together
            for i, j in itertools.combinations(some, 2)
        ):
            totals.append(sum(max(rows[i] for i in some) for some in together))
    return max(load) + min(totals)


def test_against_every_plan_of_small_problems():
    ratios = []
    for seed in range(24):
        problem = random_problem(seed)
        routes = [ROUTE, ROUTE, OTHER if seed % 3 == 0 else ROUTE]
        solution = solve(problem)
        methods = dict(solution.methods)
        sharing = share_buffers(problem, solution, routes)
        counts, buffers = [row.tolist() for row in sharing.counts], sharing.buffers
        for row, task in zip(counts, problem.tasks, strict=True):
            assert sum(row) == task.num_parcels
        for i, j in itertools.combinations(range(3), 2):
            if buffers[i] == buffers[j]:
                assert routes[i] == routes[j] and not any(map(min, counts[i], counts[j]))
        found = cost_us(problem, counts, methods, routes)
        assert found <= cost_us(problem, solution.counts, methods, routes) + 1e-9
        every = itertools.product(*(compositions(t.num_parcels, 4) for t in problem.tasks))
        least = min(cost_us(problem, plan, methods, routes) for plan in every)
        assert shared_bound_us(problem, sharing.model) <= least * (1 + 1e-6)
        ratios.append(found / least)
    assert max(ratios) <= 1.35 and np.mean(ratios) <= 1.08, ratios


def test_objective_is_that_of_the_buffers():
    problem = random_problem(3)
    solution, model = solve(problem), build_model(problem)
    found = share_buffers(problem, solution, [ROUTE] * 3)
    counts = tuple(tuple(row.tolist()) for row in found.counts)
    table = model.table(tuple(method for _, method in solution.methods))
    sharing = Sharing(model, table, (ROUTE,) * 3, tuple(map(np.array, counts)))
    assert sharing.buffers == found.buffers
    want = cost_us(problem, counts, dict(solution.methods), [ROUTE] * 3)
    assert sharing.objective() / TICKS_PER_US == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "llama-3.1-8b", "pi0", "wall-x"])
def test_public_models_on_many_owners_send_half(name):
    mesh = MeshShape(("fsdp",), (128,))
    where = Placement(mesh, fsdp_axes=("fsdp",), scan=True)
    settings = cluster_settings(DEVICES["h200"], mesh)
    leaves = model_leaves(load_workload(name), where)
    plan = make_plan(leaves, mesh, settings)
    alone = dataclasses.replace(
        plan,
        groups=tuple(
            dataclasses.replace(group, buffer=number)
            for number, group in enumerate(plan.groups)
        ),
    )
    useful = plan.exchange_bytes.total - plan.exchange_bytes.empty
    assert useful == pytest.approx(alone.exchange_bytes.total - alone.exchange_bytes.empty)
    assert plan.exchange_bytes.total <= 0.6 * alone.exchange_bytes.total
    assert plan.lower_bound_us <= plan.objective_us
    assert "sharing buffers saves" in plan.status and "(weak where" in plan.summary()


def as_they_are(x, exponent, bucket, operands):
    return restored(x, exponent)


def trees():
    """Leaves that share buffers on every kind of way: all axes, one axis, replicas."""
    mesh = make_mesh((("x", 4), ("y", 2)), AxisType.Auto)
    specs = [P(None, ("x", "y")), P(None, "x", "y"), P(None, None, "x"), P(None), P("y")]
    shapes = [(3, 16, 24), (2, 8, 48), (4, 24, 40)]
    host, places = {}, {}
    for i, spec in enumerate(specs):
        for j, shape in enumerate(shapes):
            stack = (4, *shape[1:]) if spec == P("y") else shape
            x = np.arange(np.prod(stack)) % 2039 + i + j
            host[f"{i}{j}"] = x.reshape(stack).astype(np.float32)
            places[f"{i}{j}"] = NamedSharding(mesh, spec)
    return mesh, host, places


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_shares_a_buffer_arrives_and_returns(dtype):
    mesh, host, places = trees()
    if dtype == "bfloat16":
        host = {name: x % 128 for name, x in host.items()}
    params = jax.device_put(host, places)
    plan = plan_owners(
        params,
        muon_weight_dimension_numbers=dict.fromkeys(params, MuonDimensionNumbers(1, 2)),
        exchange_dtype=dtype,
    )
    shared = len(plan.groups) - len({group.buffer for group in plan.groups})
    assert shared >= 4
    arrays = [params[leaf.path[2:-2]] for leaf in plan.leaves]
    moved = jax.jit(lambda *x: map_owners(as_they_are, x, plan, mesh))
    program = moved.lower(*arrays).compile()
    for leaf, x in zip(plan.leaves, program(*arrays), strict=True):
        np.testing.assert_array_equal(x, host[leaf.path[2:-2]], err_msg=leaf.path)
    found = audit(program).collectives
    assert len(found) == plan.exchange_bytes.collectives
    if dtype != "bfloat16":  # which XLA:CPU sends as float32
        assert sum(x.run_bytes for x in found) == plan.exchange_bytes.total


def with_buffers(plan, numbers):
    groups = [
        dataclasses.replace(group, buffer=number)
        for group, number in zip(plan.groups, numbers, strict=True)
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def test_buffers_that_cannot_be_are_refused():
    mesh = make_mesh((("x", 4),), AxisType.Auto)
    shapes = {"a": ((2, 16, 24), P(None, "x")), "b": ((2, 24, 16), P(None, "x"))}
    shapes["c"] = ((64, 16, 40), P(None, "x"))
    shapes["d"] = ((2, 8, 24), P(None, None, "x"))
    params = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()
    }
    rules = dict.fromkeys(params, MuonDimensionNumbers(1, 2))
    plan = plan_owners(params, muon_weight_dimension_numbers=rules)
    at = {plan.leaves[g.leaves[0]].path[2:-2]: i for i, g in enumerate(plan.groups)}

    def numbered(**buffers):
        return with_buffers(plan, [buffers[name] for name in sorted(at, key=at.get)])

    assert numbered(a=0, b=1, c=2, d=3).exchange_bytes.collectives == 8
    with pytest.raises(ValueError, match=r"numbered from 0, got \[0, 1, 3\]"):
        numbered(a=0, b=1, c=3, d=3)
    with pytest.raises(ValueError, match=r"no owner in common.*in buffer 0 of .*'a'.*'c'"):
        numbered(a=0, b=1, c=0, d=2)
