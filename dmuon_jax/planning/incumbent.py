"""The best plan so far, with its methods and the bound proven so far."""

import dataclasses
import functools
import itertools
import math

import numpy as np

from dmuon_jax.planning.model import Counts, Model
from dmuon_jax.planning.problem import Method, Solver

MAX_CHOICES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Incumbent:
    """A plan of *model*, and a bound on all of its plans in ticks.

    Attributes:
      model: The problem.
      counts: The plan.
      methods: The method of each bucket.
      bound: Ticks that no plan's objective is below.
      solver: What found the plan.
      notes: What went wrong on the way, in words.
    """

    model: Model
    counts: Counts
    methods: tuple[Method, ...]
    bound: int
    solver: Solver
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def table(self) -> tuple[np.ndarray, ...]:
        """Cost of each bucket by count under the methods."""
        return self.model.table(self.methods)

    @functools.cached_property
    def objective(self) -> int:
        """Makespan plus priced exchange, in ticks."""
        return self.model.objective(self.counts, self.table)

    @property
    def gap(self) -> float:
        """How far the objective may be above the optimum, relative to it."""
        excess = max(self.objective - self.bound, 0)
        return excess / self.objective if self.objective else 0.0

    @property
    def slack(self) -> tuple[int, int]:
        """What a better plan may take: makespan, and price of more slots, in ticks."""
        fixed = self.model.least_fixed_ticks()
        return self.objective - 1 - fixed, self.objective - self.bound

    def replace(self, **changes) -> "Incumbent":
        """Returns a copy with *changes*."""
        return dataclasses.replace(self, **changes)

    def better(self, other: "Incumbent") -> "Incumbent":
        """Returns *other* if it has the smaller objective and fits, else this one."""
        fits = self.model.fits(self.model.slots(other.counts))
        return other if fits and other.objective < self.objective else self

    def refitted(self) -> "Incumbent":
        """Chooses the methods anew for the counts as they are.

        All choices are tried where they are few, else one bucket at a time.
        """
        options = [useful_methods(self.model, b) for b in range(len(self.methods))]
        if math.prod(len(option) for option in options) <= MAX_CHOICES:
            choices = itertools.product(*options)
        else:
            choices = (
                (*self.methods[:b], method, *self.methods[b + 1 :])
                for b, option in enumerate(options)
                for method in option
            )
        trials = [self.replace(methods=choice) for choice in choices]
        return min([self, *trials], key=lambda trial: trial.objective)


def useful_methods(model: Model, bucket: int) -> tuple[Method, ...]:
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


def first_methods(model: Model) -> tuple[Method, ...]:
    """Returns each bucket's fastest method for its mean number of matrices."""
    pieces = model.pieces + model.padding
    means = (pieces * (model.num_parcels / model.owners)[:, None]).sum(axis=0)
    methods = []
    for bucket, mean in enumerate(means.tolist()):
        rows = {method: model.costs[method][bucket] for method in model.costs}
        methods.append(
            min(
                rows,
                key=lambda m: (
                    int(rows[m][min(max(1, round(mean)), len(rows[m]) - 1)]),
                    m,
                ),
            )
        )
    return tuple(methods)
