"""Who owns what: costs, bounds, and the plan. No arrays on devices, no jax."""

from dmuon_jax.planning.problem import (
    CostModel,
    Limits,
    Method,
    Problem,
    Shape,
    Solution,
    Solver,
    Task,
)
from dmuon_jax.planning.solver import solve

__all__ = [
    "CostModel",
    "Limits",
    "Method",
    "Problem",
    "Shape",
    "Solution",
    "Solver",
    "Task",
    "solve",
]
