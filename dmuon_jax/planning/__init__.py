"""Who owns what: costs, bounds, and the plan. No arrays on devices, no jax."""

from dmuon_jax.planning.problem import (
    CostModel,
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
    "Method",
    "Problem",
    "Shape",
    "Solution",
    "Solver",
    "Task",
    "solve",
]
