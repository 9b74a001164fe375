"""The entry of the planner: bound, greedy, MILP, and the best of them as a plan."""

import dataclasses
import itertools
import math

import numpy as np

from dmuon_jax.planning.bounds import lower_bound, pigeonhole_bound
from dmuon_jax.planning.greedy import balance, even_counts, search, walk_slots
from dmuon_jax.planning.model import TICKS_PER_US, Counts, Model, build_model
from dmuon_jax.planning.packing import Packing, family_packing, relaxed_packing
from dmuon_jax.planning.problem import Limits, Method, Problem, Solution, Solver
from dmuon_jax.planning.rounding import plan_from_patterns, tidy

METHOD_ROUNDS = 3
MAX_CHOICES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The best plan so far."""

    counts: Counts
    methods: tuple[Method, ...]
    bound: int
    solver: Solver
    notes: tuple[str, ...] = ()


def solve(
    problem: Problem, *, solver: Solver = "milp", limits: Limits | None = None
) -> Solution:
    """Finds owners for the parcels of *problem*.

    Args:
      problem: What to plan.
      solver: ``"milp"`` searches greedily, then by mixed-integer programs, and is
        never worse than ``"greedy"``; ``"even"`` spreads every task evenly.
      limits: Where the programs stop.

    Returns:
      The best plan found, with a bound that no plan of this problem beats.

    Raises:
      ValueError: A cost is not positive and finite, *solver* is unknown, or an even
        spread is above ``problem.max_owner_bytes``.
    """
    if solver not in ("milp", "greedy", "even"):
        raise ValueError(f"solver must be 'milp', 'greedy' or 'even', got {solver!r}")
    limits = limits or Limits()
    model = build_model(problem)
    found = _start(model, lower_bound(model))
    if solver != "even":
        found = _greedy(model, found, limits)
    if solver == "milp" and not _is_good(model, found, limits):
        found = _improve(model, found, limits)
    table = model.table(found.methods)
    if solver != "even":
        found = dataclasses.replace(found, counts=tidy(model, table, found.counts))
    return _solution(model, problem, found)


def _start(model: Model, bound: int) -> Found:
    pieces = model.pieces + model.padding
    means = [
        max(1, round(float((pieces[:, b] * model.num_parcels / model.owners).sum())))
        for b in range(len(model.shapes))
    ]
    methods = tuple(
        min(model.costs, key=lambda m, b=b, k=k: (_cost_at(model, m, b, k), m))
        for b, k in enumerate(means)
    )
    return Found(even_counts(model), methods, bound, "even")


def _cost_at(model: Model, method: Method, bucket: int, count: int) -> int:
    row = model.costs[method][bucket]
    return int(row[min(count, len(row) - 1)])


def _objective(model: Model, found: Found) -> int:
    return model.objective(found.counts, model.table(found.methods))


def _is_good(model: Model, found: Found, limits: Limits) -> bool:
    objective = _objective(model, found)
    return objective - found.bound <= limits.rel_gap * objective


def _greedy(model: Model, found: Found, limits: Limits) -> Found:
    """Searches under the methods chosen; changes a method where its loads ask for it."""
    for _ in range(METHOD_ROUNDS):
        if _is_good(model, found, limits):
            break
        table = model.table(found.methods)
        target = int(found.bound * (1 + limits.rel_gap))
        counts = search(model, table, target)
        better = dataclasses.replace(found, counts=counts, solver="greedy")
        better = _refit_methods(model, better)
        if _objective(model, better) >= _objective(model, found):
            break
        changed = better.methods != found.methods
        found = better
        if not changed:
            break
    return found


def _refit_methods(model: Model, found: Found) -> Found:
    """Chooses the methods anew for the counts as they are.

    All choices are tried where they are few, else one bucket at a time.
    """
    options = [_useful_methods(model, b) for b in range(len(model.shapes))]
    if math.prod(len(option) for option in options) <= MAX_CHOICES:
        choices = itertools.product(*options)
    else:
        choices = (
            (*found.methods[:b], method, *found.methods[b + 1 :])
            for b, option in enumerate(options)
            for method in option
        )
    trials = [dataclasses.replace(found, methods=choice) for choice in choices]
    return min([found, *trials], key=lambda trial: _objective(model, trial))


def _useful_methods(model: Model, bucket: int) -> tuple[Method, ...]:
    """Returns the methods that are the fastest for some number of matrices."""
    fastest = model.best_table()[bucket][1:]
    useful: list[Method] = []
    for method in model.costs:
        own = model.costs[method][bucket][1:]
        if (own == fastest).all():
            return (method,)
        if (own == fastest).any():
            useful.append(method)
    return tuple(useful)


def _improve(model: Model, found: Found, limits: Limits) -> Found:
    """Raises the bound and lowers the objective by mixed-integer programs."""
    try:
        from dmuon_jax.planning import milp
    except ImportError as error:
        note = f"highspy cannot be imported ({error}), so no program was solved"
        return dataclasses.replace(found, notes=(note,))
    floor = pigeonhole_bound(model)

    best = model.best_table()
    slack = _slack(model, found)
    packing = relaxed_packing(model, best, slack, limits.patterns)
    outcome = milp.solve_packing(
        model, packing, _objective(model, found), floor, limits
    )
    found = dataclasses.replace(
        found,
        bound=max(found.bound, outcome.bound_ticks),
        notes=(outcome.trouble,) if outcome.trouble else (),
    )
    if len(model.members) == 1 and outcome.num is not None:
        fixed = tuple(np.zeros_like(row) for row in found.counts)
        chosen = (outcome.num, outcome.slots)
        found = _take(model, found, packing, chosen, fixed, limits)
    for family in range(len(model.members)):
        table = model.table(found.methods)
        same = all(np.array_equal(a, b) for a, b in zip(table, best, strict=True))
        if _is_good(model, found, limits) or (same and len(model.members) == 1):
            break
        packing = family_packing(
            model, table, found.counts, family, _slack(model, found), limits.patterns
        )
        outcome = milp.solve_packing(
            model, packing, _objective(model, found), floor, limits
        )
        if outcome.num is not None:
            fixed = tuple(
                row * (model.family_of[t] != family)
                for t, row in enumerate(found.counts)
            )
            chosen = (outcome.num, outcome.slots)
            found = _take(model, found, packing, chosen, fixed, limits)
    return found


def _slack(model: Model, found: Found) -> tuple[int, int]:
    """Returns what a better plan may take: makespan, and price of more slots."""
    objective = _objective(model, found)
    return objective - 1 - model.least_fixed_ticks(), objective - found.bound


def _take(
    model: Model,
    found: Found,
    packing: Packing,
    chosen: tuple[tuple[np.ndarray, ...], np.ndarray],
    fixed: Counts,
    limits: Limits,
) -> Found:
    """Makes a plan of a program's answer and keeps it if it is better."""
    table = model.table(found.methods)
    counts = plan_from_patterns(model, table, packing, chosen, fixed)
    if counts is None:
        return found
    trial = dataclasses.replace(found, counts=counts, solver="milp")
    trial = _refit_methods(model, trial)
    table = model.table(trial.methods)
    counts = balance(model, table, trial.counts, model.slots(trial.counts))
    target = int(found.bound * (1 + limits.rel_gap))
    counts = walk_slots(model, table, counts, target)
    trial = _refit_methods(model, dataclasses.replace(trial, counts=counts))
    better = _objective(model, trial) < _objective(model, found)
    return trial if better and model.fits(model.slots(trial.counts)) else found


def _solution(model: Model, problem: Problem, found: Found) -> Solution:
    table = model.table(found.methods)
    makespan = model.makespan(found.counts, table)
    objective = _objective(model, found)
    bound = min(found.bound, objective)
    gap = (objective - bound) / objective if objective else 0.0
    slots = model.slots(found.counts).tolist()
    exchange_us = sum(
        num * problem.slot_us(task)
        for num, task in zip(slots, problem.tasks, strict=True)
    )
    return Solution(
        counts=tuple(tuple(row.tolist()) for row in found.counts),
        methods=tuple(zip(model.shapes, found.methods, strict=True)),
        padded=tuple(
            shape
            for shape, used in zip(model.shapes, model.padding.any(axis=0), strict=True)
            if used
        ),
        makespan_us=makespan / TICKS_PER_US,
        exchange_us=exchange_us,
        objective_us=objective / TICKS_PER_US,
        lower_bound_us=bound / TICKS_PER_US,
        gap=gap,
        status=_status(model, found, gap),
        solver=found.solver,
    )


def _status(model: Model, found: Found, gap: float) -> str:
    if not model.num_parcels.any():
        return "Nothing to plan: there are no parcels."
    how = {
        "even": "An even spread",
        "greedy": "The greedy plan",
        "milp": "The plan of the mixed-integer program",
    }[found.solver]
    near = "is optimal" if gap <= 1e-9 else f"is within {gap:.2%} of the optimum"
    notes = "".join(f"; {note}" for note in found.notes)
    return f"{how} {near}{notes}."
