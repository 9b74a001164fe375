"""Patterns, sand and rounding, against lists made by brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

from dmuon_jax.planning.bounds import lower_bound
from dmuon_jax.planning.greedy import even_counts, greedy_counts
from dmuon_jax.planning.model import build_model
from dmuon_jax.planning.packing import family_packing, relaxed_packing
from dmuon_jax.planning.problem import Problem, Task
from dmuon_jax.planning.rounding import (
    even_by_load,
    owners_sorted,
    plan_from_patterns,
    tidy,
)
from dmuon_jax.planning.solver import solve
from tests import planning_cases as cases

SEEDS = range(16)
TWO_FAMILIES = (("x",), ("x", "y"))
SHAPES = ((4, 8), (4, 4))
COST = cases.PowerCost(times=(((4, 8), 4.0), ((4, 4), 1.0)))


def affordable(model, task, spare):
    """Slots of a task whose price beyond the fewest is within ``spare``."""
    fewest, price = int(model.min_slots[task]), int(model.slot_ticks[task])
    most = int(model.max_slots[task])
    return max(k for k in range(fewest, most + 1) if price * (k - fewest) <= spare)


def load(table, held, matrices):
    """Ticks of the busiest of some devices that hold something already."""
    return max(
        sum(
            int(table[b][h + n])
            for b, (h, n) in enumerate(zip(row, matrices, strict=True))
        )
        for row in held
    )


def slack_of(model, table, seed):
    """A makespan and a spare price that leave some patterns out."""
    even = even_counts(model)
    rng = np.random.default_rng(seed)
    makespan = int(model.loads(even, table).max() * rng.uniform(0.7, 1.3))
    return makespan, int(rng.integers(0, 8_000_000))


def check_patterns(model, table, packing, slack, most):
    """The packing lists each pattern within the limits once, with its load."""
    assert sum(len(patterns) for patterns in packing.patterns) <= most
    tasks = packing.tasks.tolist()
    ranges = [range(affordable(model, t, slack[1]) + 1) for t in tasks]
    for (_, held), patterns, loads in zip(
        packing.kinds, packing.patterns, packing.loads, strict=True
    ):
        wanted = {}
        for pattern in itertools.product(*ranges):
            matrices = np.array(pattern, np.int64) @ model.pieces[tasks]
            ticks = load(table, held, matrices)
            if ticks <= slack[0]:
                wanted[pattern] = ticks
        found = dict(zip(map(tuple, patterns.tolist()), loads.tolist(), strict=True))
        assert len(found) == len(patterns)
        assert found == wanted


@pytest.mark.parametrize("most", [1, 2, 4, 9, 30, 1000])
def test_patterns_are_all_that_can_matter(most):
    listed, left = 0, 0
    for seed in SEEDS:
        model = build_model(cases.random_problem(seed, 1.0, TWO_FAMILIES))
        table = model.best_table()
        slack = slack_of(model, table, seed)
        packing = relaxed_packing(model, table, slack, most)
        check_patterns(model, table, packing, slack, most)
        repeats = model.num_devices // model.owners
        demand = (model.num_parcels * repeats)[packing.tasks]
        np.testing.assert_array_equal(packing.demand, demand)
        assert packing.num_owners == model.num_devices
        listed += len(packing.tasks)
        left += int((model.num_parcels > 0).sum()) - len(packing.tasks)
    assert listed > 0 or most == 1
    assert left > 0 or most >= 30


@pytest.mark.parametrize("most", [3, 1000])
def test_a_family_is_packed_around_what_devices_hold(most):
    kinds = 0
    for seed in SEEDS:
        model = build_model(cases.random_problem(seed, 1.0, TWO_FAMILIES))
        table = model.best_table()
        slack = slack_of(model, table, seed)
        counts = greedy_counts(model, table, model.max_slots)
        for family, members in enumerate(model.members):
            packing = family_packing(model, table, counts, family, slack, most)
            check_patterns(model, table, packing, slack, most)
            assert {model.family_of[t] for t in packing.tasks} <= {family}
            demand = model.num_parcels[packing.tasks]
            np.testing.assert_array_equal(packing.demand, demand)
            others = tuple(
                row * (model.family_of[t] != family) for t, row in enumerate(counts)
            )
            on_device = model.bucket_counts(others).T
            owners = []
            for own, held in packing.kinds:
                for owner in own.tolist():
                    behind = {tuple(on_device[d]) for d in members[owner]}
                    assert behind == set(map(tuple, held.tolist()))
                owners += own.tolist()
            assert sorted(owners) == list(range(len(members)))
            kinds = max(kinds, len(packing.kinds))
    assert kinds > 1


@pytest.mark.parametrize("power", [0.4, 1.0])
def test_sand_never_weighs_more_than_any_plan_has(power):
    gains = 0
    for seed in SEEDS:
        model = build_model(cases.random_problem(seed, power))
        table = model.best_table()
        spare = int(2e7)
        packing = relaxed_packing(model, table, (0, spare), 0)
        assert not len(packing.tasks)
        rows = [
            list(cases.compositions(int(n), int(m)))
            for n, m in zip(model.num_parcels, model.owners, strict=True)
        ]
        lightest = np.inf
        for counts in itertools.product(*rows):
            counts = tuple(np.array(row, np.int64) for row in counts)
            slots = model.slots(counts)
            if any(
                slots[t] > affordable(model, t, spare) for t in range(model.num_tasks)
            ):
                continue
            mean = model.loads(counts, table).mean()
            saved = sum(g for t, k, g in packing.sand.gains if k <= slots[t])
            assert packing.sand.mean_ticks - saved <= mean * (1 + 1e-9)
            lightest = min(lightest, mean)
        gains += sum(g > 0 for _, _, g in packing.sand.gains)
        assert all(g >= 0 for _, _, g in packing.sand.gains)
        if power == 1.0:  # nearly linear: nearly reached
            assert packing.sand.mean_ticks >= 0.6 * lightest
    assert gains > 0


def test_memory_limits_hold_in_every_family():
    binding = 0
    for seed in SEEDS:
        problem = cases.random_problem(seed, 0.4, TWO_FAMILIES)
        rng = np.random.default_rng(seed)
        tasks = tuple(
            dataclasses.replace(t, parcel_bytes=int(rng.integers(1, 4)))
            for t in problem.tasks
        )
        even = sum(
            -(-t.num_parcels // problem.num_owners(t)) * t.parcel_bytes for t in tasks
        )
        problem = dataclasses.replace(problem, tasks=tasks)
        limited = dataclasses.replace(problem, max_owner_bytes=even + 1)
        found, free = solve(limited), solve(problem)

        def taken(solution, tasks=tasks):
            return sum(
                max(row) * t.parcel_bytes
                for row, t in zip(solution.counts, tasks, strict=True)
            )

        assert taken(found) <= even + 1
        assert found.objective_us >= free.objective_us * (1 - 2e-3) - 1e-5
        binding += taken(free) > even + 1
    assert binding > 0


def small_model(*nums, owners=3, price=0):
    tasks = tuple(
        Task(f"t{i}", num, ("x",), (SHAPES[i],), ((("x",), price),) if price else ())
        for i, num in enumerate(nums)
    )
    return build_model(
        Problem((("x", owners),), tasks, COST, ("direct",), (("x", 1.0),))
    )


def counts_of(*rows):
    return tuple(np.array(row, np.int64) for row in rows)


def test_patterns_become_a_plan_only_if_their_numbers_add_up():
    model = small_model(3, 4)
    table = model.best_table()
    packing = relaxed_packing(model, table, (10**9, 10**9), 1000)
    assert packing.tasks.tolist() == [0, 1]
    (patterns,), fixed = packing.patterns, counts_of((0, 0, 0), (0, 0, 0))
    index = {tuple(p): i for i, p in enumerate(patterns.tolist())}

    def plan(times, slots=(1, 4)):
        num = np.zeros(len(patterns), np.int64)
        for pattern, count in times.items():
            num[index[pattern]] = count
        chosen = ((num,), np.array(slots, np.int64))
        return plan_from_patterns(model, table, packing, chosen, fixed)

    owners = list(zip(*plan({(1, 1): 2, (1, 2): 1}), strict=True))
    assert sorted(owners) == [(1, 1), (1, 1), (1, 2)]
    assert plan({(1, 1): 2}) is None  # two owners
    assert plan({(1, 1): 4}) is None
    assert plan({(1, 1): 3}) is None  # three parcels of the second task
    assert plan({(1, 1): 2, (1, 3): 1}) is None
    assert plan({(1, 1): 2, (1, 2): 2, (0, 0): -1}) is None
    # Slots paid for may be too few: what owners hold counts as well.
    assert plan({(1, 1): 2, (1, 2): 1}, slots=(0, 0)) is not None


def test_sand_is_spread_over_owners_with_patterns():
    model = small_model(3, 4)
    table = model.best_table()
    alone = relaxed_packing(model, table, (5_000_000, 0), 2)
    assert alone.tasks.tolist() == [0]
    num = (alone.patterns[0][:, 0] == 1).astype(np.int64) * 3
    chosen = ((num,), np.array([1, 2], np.int64))
    nothing = counts_of((0,) * 3, (0,) * 3)
    plan = plan_from_patterns(model, table, alone, chosen, nothing)
    assert plan[0].tolist() == [1, 1, 1] and sorted(plan[1].tolist()) == [1, 1, 2]
    limited = dataclasses.replace(
        model, parcel_bytes=np.array([1, 1]), max_owner_bytes=2
    )
    assert plan_from_patterns(limited, table, alone, chosen, nothing) is None


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        # The first task becomes even, which helps; the second would make it worse.
        (((2, 0, 0), (0, 0, 5)), ((1, 1, 0), (0, 0, 5))),
        (((1, 1, 1), (0, 1, 3)), ((1, 1, 1), (2, 1, 1))),
        # Nothing is won or lost by making the second even.
        (((1, 1, 1), (2, 0, 0)), ((1, 1, 1), (1, 1, 0))),
        (((2, 2, 1), (0, 0, 2)), ((2, 2, 1), (0, 0, 2))),
    ],
)
def test_counts_become_even_where_that_costs_nothing(counts, wanted):
    # 4 and 1 microseconds a matrix; the slots of the first task have no price.
    model = small_model(*(sum(row) for row in counts))
    plan = tidy(model, model.best_table(), counts_of(*counts))
    assert tuple(tuple(row.tolist()) for row in plan) == wanted


def test_what_is_left_over_goes_where_the_other_loads_are_smallest():
    model = small_model(2, 5)
    counts = counts_of((1, 1, 0), (0, 0, 5))
    table = model.best_table()
    assert even_by_load(model, table, counts, 1).tolist() == [2, 1, 2]
    assert even_by_load(model, table, counts, 0).tolist() == [1, 1, 0]


def test_owners_are_sorted_by_what_they_take():
    model = small_model(4, 4)
    plan = owners_sorted(model, counts_of((1, 2, 1), (0, 1, 3)))
    assert [row.tolist() for row in plan] == [[2, 1, 1], [1, 3, 0]]
    two = build_model(cases.random_problem(0, 1.0, TWO_FAMILIES))
    counts = greedy_counts(two, two.best_table(), two.max_slots)
    if len(two.members) > 1:
        assert owners_sorted(two, counts) is counts


def test_nothing_to_do_takes_no_time():
    model = small_model(0, 0)
    assert lower_bound(model) == 0
    assert small_model(3, 0).min_slots.tolist() == [1, 0]
