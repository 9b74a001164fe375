"""Plans with few branches per bucket."""

import dataclasses

import numpy as np
import pytest

from dmuon_jax.planning.branches import num_branches, relabelled, surplus
from dmuon_jax.planning.model import build_model
from dmuon_jax.planning.problem import Problem, Task
from dmuon_jax.planning.solver import solve
from tests import planning_cases as cases


def arrays(counts):
    return tuple(np.array(row, np.int64) for row in counts)


@pytest.mark.parametrize(("model", "devices"), [("llama-3.2-3b", 64), ("wall-x", 8)])
def test_limit_is_kept(model, devices):
    free = cases.single_axis(model, devices, bytes_per_us=1e9)
    limited = dataclasses.replace(free, max_branches=3)
    planning = build_model(free)
    without, plan = solve(free), solve(limited)
    even = solve(free, solver="even")
    assert surplus(planning, arrays(without.counts), 3) > 0
    assert surplus(planning, arrays(plan.counts), 3) == 0
    assert without.objective_us <= plan.objective_us < even.objective_us
    again = cases.plain_objective(free, plan.counts, dict(plan.methods))
    assert plan.objective_us == pytest.approx(again, rel=1e-5)
    assert plan.lower_bound_us <= without.objective_us


def test_relabelling_keeps_every_load():
    shape = (4, 8)
    tasks = tuple(Task(f"t{i}", 6, ("x",), (shape,)) for i in range(2))
    cost = cases.PowerCost(times=((shape, 1.0),))
    model = build_model(Problem((("x", 4),), tasks, cost))
    counts = arrays([(3, 0, 1, 2), (0, 3, 2, 1)])
    assert num_branches(model, counts, 0) == 4
    plain = relabelled(model, counts)
    assert num_branches(model, plain, 0) == 2
    assert [row.sum() for row in plain] == [6, 6]
    np.testing.assert_array_equal(sum(plain), sum(counts))


def test_a_bucket_that_stays_does_not_keep_the_next_from_relabelling():
    shapes = ((2, 3), (4, 8), (4, 8))
    tasks = tuple(Task(f"t{i}", 6, ("x",), (s,)) for i, s in enumerate(shapes))
    cost = cases.PowerCost(times=tuple((shape, 1.0) for shape in shapes[:2]))
    model = build_model(Problem((("x", 4),), tasks, cost))
    counts = arrays([(3, 0, 1, 2), (3, 0, 1, 2), (0, 3, 2, 1)])
    plain = relabelled(model, counts)
    np.testing.assert_array_equal(plain[0], counts[0])
    assert num_branches(model, counts, 1) == 4 and num_branches(model, plain, 1) == 2
