"""The entry of the planner: bound, greedy, MILP, and the best of them as a plan."""

from dmuon_jax.planning.bounds import lower_bound
from dmuon_jax.planning.branches import with_few_branches
from dmuon_jax.planning.greedy import even_counts, greedy_counts, search
from dmuon_jax.planning.incumbent import Incumbent, first_methods
from dmuon_jax.planning.model import TICKS_PER_US, build_model
from dmuon_jax.planning.problem import SOLVERS, Limits, Problem, Solution, Solver
from dmuon_jax.planning.rounding import owners_sorted, tidy

METHOD_ROUNDS = 3


def solve(
    problem: Problem, *, solver: Solver = "milp", limits: Limits | None = None
) -> Solution:
    """Finds owners for the parcels of *problem*.

    Args:
      problem: What to plan.
      solver: ``"milp"`` searches greedily, then by mixed-integer programs, and is
        never worse than ``"greedy"``. That one starts from ``"even"``, which spreads
        every task evenly, and from ``"lpt"``, which places the longest parcels first
        and looks at nothing but loads.
      limits: Where the search stops.

    Returns:
      The best plan found, with a bound that no plan of this problem beats.

    Raises:
      ValueError: A cost is not positive and finite, *solver* is unknown, or an even
        spread is above ``problem.max_owner_bytes``.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {SOLVERS}, got {solver!r}")
    limits = limits or Limits()
    model = build_model(problem)
    found = Incumbent(
        model, even_counts(model), first_methods(model), lower_bound(model), "even"
    )
    if solver == "lpt":
        counts = greedy_counts(model, found.table, model.max_slots)
        found = found.replace(counts=counts, solver="lpt")
    if solver in ("greedy", "milp"):
        found = _search(found, limits)
    excess_us = (found.objective - found.bound) / TICKS_PER_US
    if solver == "milp" and found.gap > limits.rel_gap and excess_us > limits.gap_us:
        found = _improve(found, limits)
    if solver in ("greedy", "milp"):
        found = found.replace(counts=tidy(model, found.table, found.counts))
        if problem.max_branches:
            found = with_few_branches(found, problem.max_branches)
        found = found.replace(counts=owners_sorted(model, found.counts))
    return _solution(problem, found)


def _search(found: Incumbent, limits: Limits) -> Incumbent:
    """Searches under the methods chosen; changes a method where its loads ask for it."""
    for _ in range(METHOD_ROUNDS):
        if found.objective <= found.bound:
            break
        target = int(found.bound * (1 + limits.rel_gap))
        counts = search(found.model, found.table, target)
        before, methods = found, found.methods
        trial = found.replace(counts=counts, solver="greedy").refitted()
        found = found.better(trial)
        if found is before or found.methods == methods:
            break
    return found


def _improve(found: Incumbent, limits: Limits) -> Incumbent:
    try:
        from dmuon_jax.planning.improve import improve
    except ImportError as error:
        note = f"no program was solved, as highspy cannot be imported ({error})"
        return found.replace(notes=(note,))
    return improve(found, limits)


def _solution(problem: Problem, found: Incumbent) -> Solution:
    model = found.model
    slots = model.slots(found.counts).tolist()
    exchange_us = sum(
        num * problem.slot_us(task)
        for num, task in zip(slots, problem.tasks, strict=True)
    )
    padded = [bool(row.any()) for row in model.padding.T]
    return Solution(
        counts=tuple(tuple(row.tolist()) for row in found.counts),
        methods=tuple(zip(model.shapes, found.methods, strict=True)),
        padded=tuple(s for s, yes in zip(model.shapes, padded, strict=True) if yes),
        makespan_us=model.makespan(found.counts, found.table) / TICKS_PER_US,
        exchange_us=exchange_us,
        objective_us=found.objective / TICKS_PER_US,
        lower_bound_us=min(found.bound, found.objective) / TICKS_PER_US,
        gap=found.gap,
        status=_status(found),
        solver=found.solver,
    )


def _status(found: Incumbent) -> str:
    if not found.model.num_parcels.any():
        return "Nothing to plan: there are no parcels."
    plan = {
        "even": "An even spread",
        "lpt": "The longest-first plan",
        "greedy": "The greedy plan",
        "milp": "The plan of the mixed-integer program",
    }[found.solver]
    near = f"is within {found.gap:.2%} of the optimum"
    if found.gap < 5e-5:
        near = "is optimal"
    return "; ".join((f"{plan} {near}", *found.notes)) + "."
