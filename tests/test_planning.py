"""The planner as a whole: valid plans, true bounds, never worse than simpler plans."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from dmuon_jax.planning.model import build_model
from dmuon_jax.planning.problem import Limits, Problem, Task
from dmuon_jax.planning.solver import solve
from tests import planning_cases as cases
from tests.planning_cases import PowerCost, RandomCost

SHAPE = (4, 8)
UNIT = PowerCost(times=((SHAPE, 1.0), ((4, 4), 0.5)))


def tasks_of(*nums, axes=("x",), price=0):
    return tuple(
        Task(f"t{i}", num, axes, (SHAPE,), ((axes, price),) if price else ())
        for i, num in enumerate(nums)
    )


def check_valid(problem, solution):
    for task, row in zip(problem.tasks, solution.counts, strict=True):
        assert len(row) == problem.num_owners(task)
        assert sum(row) == task.num_parcels
        assert min(row) >= 0
    again = cases.plain_objective(problem, solution.counts, dict(solution.methods))
    assert solution.objective_us == pytest.approx(again, rel=1e-5, abs=1e-5)
    assert solution.lower_bound_us <= solution.objective_us
    assert 0 <= solution.gap < 1
    assert solution.status.endswith(".")


@pytest.mark.parametrize("power", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    ("axes", "slack"),
    [
        ((("x",),), 2e-3),
        ((("x",), ("x", "y")), 2e-3),
        ((("x",), ("y",), ("x", "y")), 0.6),
    ],
)
def test_agrees_with_brute_force(power, axes, slack):
    for seed in range(12):
        problem = cases.random_problem(seed, power, axes)
        best = cases.brute_force(problem)
        solution = solve(problem)
        check_valid(problem, solution)
        assert solution.lower_bound_us <= best * (1 + 1e-6) + 1e-5
        assert solution.objective_us <= best * (1 + slack) + 1e-5
        greedy, lpt, even = (
            solve(problem, solver=name) for name in ("greedy", "lpt", "even")
        )
        check_valid(problem, lpt)
        assert solution.objective_us <= greedy.objective_us
        assert greedy.objective_us <= min(lpt.objective_us, even.objective_us)


def test_methods_are_chosen_with_the_counts():
    shapes = ((2, 3), (4, 4))
    problem = Problem(
        mesh=(("x", 2),),
        tasks=tuple(Task(f"t{s}", 3, ("x",), (s,)) for s in shapes),
        cost=RandomCost(7),
    )
    solution = solve(problem)
    check_valid(problem, solution)
    assert solution.objective_us == pytest.approx(cases.brute_force(problem), rel=2e-3)
    forced = dataclasses.replace(problem, methods=("gram",))
    assert dict(solve(forced).methods) == {shape: "gram" for shape in shapes}


@pytest.mark.parametrize("devices", [16, 32, 64])
def test_fixture_never_worse_than_greedy_or_even(devices):
    for seed in range(2):
        cost = cases.FixtureCost(noise=0.2 if seed else 0.0, seed=seed)
        problem = cases.single_axis("wall-x", devices, cost)
        even, lpt, milp = (
            solve(problem, solver=name) for name in ("even", "lpt", "milp")
        )
        check_valid(problem, milp)
        assert milp.objective_us <= min(lpt.objective_us, even.objective_us)
        assert milp.objective_us < 0.95 * even.objective_us


@pytest.mark.parametrize(
    ("model", "devices"),
    [("llama-3.1-8b", 8), ("llama-3.2-3b", 64), ("pi0", 128), ("grug-moe-h100", 128)],
)
def test_gap_of_real_models(model, devices):
    problem = cases.single_axis(model, devices)
    solution = solve(problem)
    check_valid(problem, solution)
    assert solution.gap <= 0.02


def test_even_spread_that_divides_is_proven_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "dmuon_jax.planning.improve", None)
    problem = Problem((("x", 8),), tasks_of(16, 8), UNIT)
    solution = solve(problem)
    assert solution.counts == ((2,) * 8, (1,) * 8)
    assert solution.solver == "even"
    assert solution.gap <= 1e-9
    assert "optimal" in solution.status


@pytest.mark.parametrize("nums", [(), (0,), (1,), (3,), (0, 2)])
def test_fewer_matrices_than_devices(nums):
    problem = Problem((("x", 8),), tasks_of(*nums), UNIT)
    solution = solve(problem)
    check_valid(problem, solution)
    assert solution.makespan_us == pytest.approx(1.0 if sum(nums) else 0.0)
    assert solution.gap <= 1e-9


def test_one_device_and_no_axes():
    problem = Problem((), (Task("a", 5, (), (SHAPE, (4, 4))),), UNIT)
    solution = solve(problem)
    check_valid(problem, solution)
    assert solution.counts == ((5,),)
    assert solution.makespan_us == pytest.approx(7.5)


def test_owners_with_more_come_first_and_counts_are_even_where_free():
    problem = Problem((("x", 4),), tasks_of(6, price=4), UNIT)
    assert solve(problem).counts == ((2, 2, 1, 1),)


def test_priced_slots_keep_counts_even():
    cost = PowerCost(times=((SHAPE, 1.0), ((4, 4), 1.0)), power=0.1)
    shapes = (SHAPE, (4, 4))
    tasks = tuple(
        Task(f"t{i}", 2, ("x",), (s,), ((("x",), 10),)) for i, s in enumerate(shapes)
    )
    cheap = Problem((("x", 2),), tasks, cost)
    assert sorted(solve(cheap).counts) == [(0, 2), (2, 0)]
    dear = dataclasses.replace(cheap, bandwidths=(("x", 1.0),))
    assert solve(dear).counts == ((1, 1), (1, 1))
    hidden = dataclasses.replace(dear, exposed=0.0)
    assert solve(hidden).objective_us == solve(cheap).objective_us


def test_tasks_with_different_free_axes_share_devices():
    mesh = (("data", 2), ("expert", 3))
    tasks = (
        Task("experts", 3, ("data",), (SHAPE,)),
        Task("dense", 9, ("data", "expert"), (SHAPE,)),
    )
    solution = solve(Problem(mesh, tasks, UNIT))
    check_valid(Problem(mesh, tasks, UNIT), solution)
    # 3 experts on each of 3 devices behind an owner, and 9: 18 matrices on 6 devices.
    assert solution.makespan_us == pytest.approx(3.0)
    assert solution.gap <= 1e-9


def test_memory_limit():
    tasks = tuple(
        Task(f"t{i}", 4, ("x",), (shape,), (), 10)
        for i, shape in enumerate((SHAPE, (4, 4)))
    )
    cost = PowerCost(times=((SHAPE, 1.0), ((4, 4), 1.0)), power=0.1)
    problem = Problem((("x", 2),), tasks, cost)
    assert solve(problem).counts != ((2, 2), (2, 2))
    limited = solve(dataclasses.replace(problem, max_owner_bytes=40))
    assert limited.counts == ((2, 2), (2, 2))
    with pytest.raises(ValueError, match="max_owner_bytes must hold"):
        solve(dataclasses.replace(problem, max_owner_bytes=39))


def test_padded_shapes_are_computed_by_slots():
    tasks = (*tasks_of(3), Task("small", 5, ("x",), ((4, 4),)))
    problem = Problem((("x", 2),), tasks, UNIT, pad_below_us=0.9)
    solution = solve(problem)
    check_valid(problem, solution)
    assert solution.padded == ((4, 4),)
    assert solution.makespan_us == pytest.approx(2 + 3 * 0.5)
    assert solution.gap <= 1e-9


@pytest.mark.parametrize("time_us", [0.0, -1.0, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("solver", ["milp", "even"])
def test_impossible_costs(time_us, solver):
    """Before anything is planned.

    Fault: a cost is zero, negative, infinite or NaN
    Happens: ValueError names the shape and the batch
    Kept: nothing has run
    """
    cost = PowerCost(times=((SHAPE, time_us),))
    with pytest.raises(ValueError, match=r"time_us must .* \(4, 8\), batch 1"):
        solve(Problem((("x", 2),), tasks_of(3), cost), solver=solver)


@pytest.mark.parametrize("limits", [Limits(nodes=0), Limits(patterns=0)])
def test_stopped_at_once(limits):
    """Limits are nodes and patterns, never the clock.

    Fault: the solver stops at its limits before it has found anything
    Happens: the best plan known is used, the same on every process
    Kept: a valid plan, never worse than the greedy one
    """
    problem = cases.single_axis("llama-3.2-3b", 32)
    solution = solve(problem, limits=limits)
    check_valid(problem, solution)
    assert solution.objective_us <= solve(problem, solver="greedy").objective_us


def test_slot_price_follows_the_slowest_link_crossed():
    task = Task("a", 1, ("x", "y"), (SHAPE,), ((("x", "y"), 70),))
    problem = Problem((("x", 2), ("y", 4)), (task,), UNIT)
    assert problem.slot_us(task) == 0
    inner = dataclasses.replace(problem, bandwidths=(("x", 1.0), ("y", 10.0)))
    # Of 7 other devices 4 are across x; the 3 others are reached along y.
    assert inner.slot_us(task) == pytest.approx(max(40 / 1.0, 30 / 10.0))
    slow_y = dataclasses.replace(problem, bandwidths=(("x", 10.0), ("y", 1.0)))
    assert slow_y.slot_us(task) == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mesh": (("x", 0),)}, "mesh must"),
        ({"methods": ()}, "methods must"),
        ({"methods": ("fast",)}, "methods must"),
        ({"exposed": 1.5}, "exposed must"),
        ({"bandwidths": (("x", 0.0),)}, "bandwidths must"),
        ({"mesh": (("y", 2),)}, "free_axes and slot_bytes must"),
        ({"tasks": tasks_of(1) * 2}, "distinct names"),
    ],
)
def test_bad_problems(change, match):
    problem = Problem((("x", 2),), tasks_of(1), UNIT)
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(problem, **change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_parcels": -1}, "num_parcels must"),
        ({"matrices": ()}, "matrices must"),
        ({"matrices": ((8, 4),)}, "matrices must be oriented"),
        ({"slot_bytes": ((("x",), -1),)}, "slot_bytes must"),
    ],
)
def test_bad_tasks(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(tasks_of(1)[0], **change)


def test_unknown_solver():
    with pytest.raises(ValueError, match="solver must"):
        solve(Problem((("x", 2),), tasks_of(1), UNIT), solver="best")


def test_costs_are_asked_only_for_counts_that_can_occur():
    asked = []

    class Spy:
        def time_us(self, shape, batch, method):
            asked.append(batch)
            return float(batch)

    build_model(Problem((("x", 8),), tasks_of(8000), Spy()))
    assert max(asked) < 2000


SCRIPT = """
from dmuon_jax.planning.solver import solve
from tests import planning_cases as cases
for name, devices in (("wall-x", 16), ("qwen3-1.7b", 32)):
    print(solve(cases.single_axis(name, devices)))
"""


def test_same_plan_in_two_processes():
    texts = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    # Nothing else writes to the output, HiGHS's banner in particular.
    assert texts[0].count("\n") == 2
    assert np.all([line.startswith("Solution") for line in texts[0].splitlines()])
