"""Better bounds and better plans by mixed-integer programs."""

import numpy as np

from dmuon_jax.planning.bounds import pigeonhole_bound
from dmuon_jax.planning.greedy import balance, walk_slots
from dmuon_jax.planning.incumbent import Incumbent
from dmuon_jax.planning.milp import Outcome, solve_packing
from dmuon_jax.planning.model import Counts
from dmuon_jax.planning.packing import Packing, family_packing, relaxed_packing
from dmuon_jax.planning.problem import Limits
from dmuon_jax.planning.rounding import plan_from_patterns


def improve(found: Incumbent, limits: Limits) -> Incumbent:
    """Returns *found* with a better bound, or a better plan, or both, if possible."""
    found = _by_relaxation(found, limits)
    families = range(len(found.model.members))
    # One family was spread by the relaxed program, only with each count's own method.
    enough = limits.large_gap if len(families) == 1 else limits.rel_gap
    for family in families:
        if found.notes or found.gap <= enough:
            break
        found = _by_family(found, family, limits)
    return found


def _by_relaxation(found: Incumbent, limits: Limits) -> Incumbent:
    """Solves the relaxed program, with more patterns if the gap stays large."""
    model, listed = found.model, None
    for most in (limits.patterns, limits.more_patterns):
        packing = relaxed_packing(model, model.best_table(), found.slack, most)
        if found.notes or len(packing.tasks) == listed:
            break
        listed = len(packing.tasks)
        outcome = _run(found, packing, limits)
        found = found.replace(
            bound=max(found.bound, outcome.bound_ticks),
            notes=(outcome.trouble,) if outcome.trouble else (),
        )
        if len(model.members) == 1:
            nothing = tuple(np.zeros_like(row) for row in found.counts)
            found = _take(found, packing, outcome, nothing, limits)
        if found.gap <= limits.large_gap:
            break
    return found


def _by_family(found: Incumbent, family: int, limits: Limits) -> Incumbent:
    """Spreads one family anew around the counts of the others."""
    model = found.model
    packing = family_packing(
        model, found.table, found.counts, family, found.slack, limits.patterns
    )
    fixed = tuple(
        row * (model.family_of[task] != family) for task, row in enumerate(found.counts)
    )
    return _take(found, packing, _run(found, packing, limits), fixed, limits)


def _run(found: Incumbent, packing: Packing, limits: Limits) -> Outcome:
    floor = pigeonhole_bound(found.model)
    return solve_packing(found.model, packing, found.objective, floor, limits)


def _take(
    found: Incumbent,
    packing: Packing,
    outcome: Outcome,
    fixed: Counts,
    limits: Limits,
) -> Incumbent:
    """Makes a plan of a program's answer and keeps it if it is better."""
    if outcome.num is None:
        return found
    model, chosen = found.model, (outcome.num, outcome.slots)
    counts = plan_from_patterns(model, found.table, packing, chosen, fixed)
    if counts is None:
        return found
    trial = found.replace(counts=counts, solver="milp").refitted()
    slots = model.slots(trial.counts)
    counts = balance(model, trial.table, trial.counts, slots)
    target = int(found.bound * (1 + limits.rel_gap))
    counts = walk_slots(model, trial.table, counts, target)
    return found.better(trial.replace(counts=counts).refitted())
