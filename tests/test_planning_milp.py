"""HiGHS: what it proves, and what happens when it does not answer."""

import sys

import highspy
import numpy as np
import pytest

from dmuon_jax.planning import milp
from dmuon_jax.planning.bounds import envelope, lower_bound, pigeonhole_bound
from dmuon_jax.planning.greedy import even_counts
from dmuon_jax.planning.model import TICKS_PER_US, build_model
from dmuon_jax.planning.packing import relaxed_packing
from dmuon_jax.planning.problem import Limits, Problem, Task
from dmuon_jax.planning.solver import solve
from tests import planning_cases as cases

# A case in which the greedy plan cannot be proven good without a program.
HARD = ("llama-3.2-3b", 64)


def test_programs_close_the_gap():
    problem = cases.single_axis(*HARD)
    greedy, proven = solve(problem, solver="greedy"), solve(problem)
    assert greedy.gap > 0.05
    assert proven.gap < 1e-3
    assert proven.lower_bound_us > greedy.lower_bound_us


@pytest.mark.parametrize(
    ("name", "devices", "full"), [("pi0", 16, False), ("llama-3.2-3b", 128, True)]
)
def test_fewer_patterns_only_weaken_the_bound(name, devices, full):
    problem = cases.single_axis(name, devices)
    model, optimal = build_model(problem), solve(problem)
    assert optimal.gap < 2e-3
    table, bounds = model.best_table(), []
    # An even spread is known; its objective is far above the optimum.
    known = model.objective(even_counts(model), table)
    slack = (known - 1 - model.least_fixed_ticks(), known - lower_bound(model))
    for limit in (1, 10, 300):
        packing = relaxed_packing(model, table, slack, limit)
        assert len(packing.loads[0]) <= limit
        floor = 0 if limit == 1 else pigeonhole_bound(model)
        outcome = milp.solve_packing(model, packing, known, floor, Limits())
        assert not outcome.trouble
        bounds.append(outcome.bound_ticks / TICKS_PER_US)
    assert (len(packing.tasks) == model.num_tasks) == full
    assert bounds[0] <= bounds[2]
    assert max(bounds) <= optimal.objective_us * (1 + 1e-4)
    if full:
        assert bounds[2] >= optimal.objective_us * (1 - 2e-3)


def test_no_program_is_solved_for_less_than_it_is_worth(monkeypatch):
    problem = cases.single_axis(*HARD)
    greedy = solve(problem, solver="greedy")
    excess_us = greedy.objective_us - greedy.lower_bound_us
    assert solve(problem, limits=Limits(gap_us=0.99 * excess_us)).gap < 1e-3
    monkeypatch.setitem(sys.modules, "dmuon_jax.planning.improve", None)
    assert solve(problem, limits=Limits(gap_us=1.01 * excess_us)) == greedy


def test_a_pool_of_other_threads_does_no_harm():
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.addVar(0.0, 4.0)
    assert other.run() == highspy.HighsStatus.kOk
    solution = solve(cases.single_axis(*HARD))
    assert solution.gap < 1e-3
    assert "HiGHS" not in solution.status


def test_trap_is_there():
    """Without a reset the other pool makes a one-thread solve fail, as HiGHS documents."""
    highspy.Highs.resetGlobalScheduler(True)
    codes = []
    for threads in (2, 1):
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", threads)
        highs.addVar(0.0, 4.0)
        codes.append(highs.run())
    assert codes == [highspy.HighsStatus.kOk, highspy.HighsStatus.kError]


def error_status(self):
    return highspy.HighsStatus.kError


def out_of_memory(self):
    raise MemoryError("std::bad_alloc")


def unknown_option(self, name, value):
    return highspy.HighsStatus.kError


@pytest.mark.parametrize(
    ("method", "failing"),
    [
        ("run", error_status),
        ("run", out_of_memory),
        ("setOptionValue", unknown_option),
    ],
)
def test_failure_of_highs_is_said(monkeypatch, method, failing):
    """Whatever way HiGHS fails.

    Fault: HiGHS returns an error, raises, or is of a version that lacks an option
    Happens: the greedy plan is used, and its status says that HiGHS failed and how
    Kept: training goes on, with a valid plan and its proven gap
    """
    monkeypatch.setattr(milp.Quiet, method, failing)
    problem = cases.single_axis(*HARD)
    solution = solve(problem)
    assert "HiGHS failed" in solution.status
    assert solution.solver != "milp"
    greedy = solve(problem, solver="greedy")
    assert solution.counts == greedy.counts


@pytest.mark.parametrize("factor", [0, 3, -1])
def test_nonsense_from_highs_is_not_used(monkeypatch, factor):
    """A solution that places other numbers of parcels.

    Fault: HiGHS returns a solution that breaks its own constraints
    Happens: the solution is dropped; the best plan known is used
    Kept: every parcel has exactly one owner
    """
    problem = cases.single_axis(*HARD)
    honest = milp.Quiet.getSolution

    def lying(self):
        solution = honest(self)
        solution.col_value = [factor * x for x in solution.col_value]
        return solution

    monkeypatch.setattr(milp.Quiet, "getSolution", lying)
    found = solve(problem)
    for task, row in zip(problem.tasks, found.counts, strict=True):
        assert sum(row) == task.num_parcels and min(row) >= 0
    assert found.objective_us <= solve(problem, solver="greedy").objective_us


def test_missing_highspy_is_said(monkeypatch):
    """Planning needs no solver to be right.

    Fault: highspy is not installed, or cannot be loaded
    Happens: the greedy plan is used, and its status says so
    Kept: training goes on, with a valid plan and its proven gap
    """
    monkeypatch.setitem(sys.modules, "dmuon_jax.planning.improve", None)
    solution = solve(cases.single_axis(*HARD))
    assert "highspy cannot be imported" in solution.status
    assert solution.counts == solve(cases.single_axis(*HARD), solver="greedy").counts


def test_nothing_is_printed(capfd):
    solve(cases.single_axis(*HARD))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("power", [0.3, 1.0, 2.0])
def test_bound_without_a_solver(power):
    for seed in range(12):
        problem = cases.random_problem(seed, power, (("x",), ("x", "y")))
        bound = lower_bound(build_model(problem)) / TICKS_PER_US
        assert bound <= cases.brute_force(problem) + 1e-5


def test_bound_is_exact_where_counts_divide():
    times = (((4, 8), 3.0), ((4, 4), 5.0))
    tasks = tuple(
        Task(str(shape), 8, ("x",), (shape,), ((("x",), 2),)) for shape, _ in times
    )
    problem = Problem(
        (("x", 4),), tasks, cases.PowerCost(times), bandwidths=(("x", 1.0),)
    )
    assert lower_bound(build_model(problem)) == pytest.approx(24 * TICKS_PER_US)


@pytest.mark.parametrize("seed", range(5))
def test_envelope_is_the_lower_hull(seed):
    rng = np.random.default_rng(seed)
    cost = np.concatenate([[0], rng.integers(1, 100, size=9)])
    for at in np.linspace(0, 9, 28):
        lines = [
            cost[i] + (cost[j] - cost[i]) * (at - i) / (j - i)
            for i in range(10)
            for j in range(i + 1, 10)
            if i <= at <= j
        ]
        assert envelope(cost, at) == pytest.approx(min(lines))
