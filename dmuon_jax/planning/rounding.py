"""From owners per pattern to a whole plan, and a plan in its plainest form."""

import numpy as np

from dmuon_jax.planning.greedy import greedy_counts
from dmuon_jax.planning.model import Counts, Model
from dmuon_jax.planning.packing import Packing


def plan_from_patterns(
    model: Model,
    table: tuple[np.ndarray, ...],
    packing: Packing,
    chosen: tuple[tuple[np.ndarray, ...], np.ndarray],
    fixed: Counts,
) -> Counts | None:
    """Gives owners their patterns, then spreads the sand over them.

    Args:
      model: The problem.
      table: Cost of each bucket by count.
      packing: A packing of one family.
      chosen: For each kind int64 [patterns], how many owners follow each; and int64
        [tasks], the slots paid for.
      fixed: The counts of the tasks that the packing takes as given, 0 for the others.

    Returns:
      The counts, or None if the numbers do not add up.
    """
    num, slots = chosen
    counts = tuple(row.copy() for row in fixed)
    for (owners, _), patterns, times in zip(
        packing.kinds, packing.patterns, num, strict=True
    ):
        if int(times.sum()) != len(owners) or (times < 0).any():
            return None
        for column, task in enumerate(packing.tasks.tolist()):
            counts[task][owners] = np.repeat(patterns[:, column], times)
    for task in packing.tasks.tolist():
        if counts[task].sum() != model.num_parcels[task]:
            return None
    slots = np.maximum(slots, model.slots(counts))
    filled = greedy_counts(model, table, slots, counts)
    if filled is None or not model.fits(model.slots(filled)):
        return None
    return filled


def tidy(model: Model, table: tuple[np.ndarray, ...], counts: Counts) -> Counts:
    """Makes counts even where the objective does not grow from it."""
    for task in range(model.num_tasks):
        trial = list(counts)
        trial[task] = even_by_load(model, table, counts, task)
        if np.ptp(trial[task]) < np.ptp(counts[task]):
            counts = model.best((tuple(trial), counts), table)
    return counts


def owners_sorted(model: Model, counts: Counts) -> Counts:
    """Sorts interchangeable owners by what they take, those with more first."""
    if len(model.members) != 1:
        return counts
    order = np.lexsort([-row for row in reversed(counts)])
    return tuple(row[order] for row in counts)


def even_by_load(
    model: Model, table: tuple[np.ndarray, ...], counts: Counts, task: int
) -> np.ndarray:
    """Spreads a task evenly; owners of the smallest other loads take what is left."""
    num, owners = int(model.num_parcels[task]), int(model.owners[task])
    without = tuple(row * (t != task) for t, row in enumerate(counts))
    loads = model.loads(without, table)[model.members[model.family_of[task]]]
    rank = np.argsort(np.argsort(loads.max(axis=1), kind="stable"), kind="stable")
    return num // owners + (rank < num % owners).astype(np.int64)
