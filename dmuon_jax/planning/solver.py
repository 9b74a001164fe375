"""The entry of the planner: bound, greedy, MILP, and the better of them as a plan."""

from dmuon_jax.planning.greedy import even_counts, search
from dmuon_jax.planning.model import TICKS_PER_US, Counts, Model, build_model
from dmuon_jax.planning.problem import Method, Problem, Solution, Solver


def solve(problem: Problem, *, solver: Solver = "milp") -> Solution:
    """Finds owners for the parcels of *problem*."""
    model = build_model(problem)
    methods = tuple(
        min(model.costs, key=lambda m, b=b: (model.costs[m][b][-1], m))
        for b in range(len(model.shapes))
    )
    table = model.table(methods)
    counts = even_counts(model) if solver == "even" else search(model, table)
    return _solution(model, problem, counts, methods, solver, "Stub.", 0)


def _solution(
    model: Model,
    problem: Problem,
    counts: Counts,
    methods: tuple[Method, ...],
    solver: Solver,
    status: str,
    bound: int,
) -> Solution:
    table = model.table(methods)
    makespan = int(model.loads(counts, table).max(initial=0))
    objective = model.objective(counts, table)
    slots = model.slots(counts)
    exchange_us = sum(
        int(num) * problem.slot_us(task)
        for num, task in zip(slots, problem.tasks, strict=True)
    )
    return Solution(
        counts=tuple(tuple(row.tolist()) for row in counts),
        methods=tuple(zip(model.shapes, methods, strict=True)),
        makespan_us=makespan / TICKS_PER_US,
        exchange_us=exchange_us,
        objective_us=objective / TICKS_PER_US,
        lower_bound_us=bound / TICKS_PER_US,
        gap=(objective - bound) / objective if objective else 0.0,
        status=status,
        solver=solver,
    )
