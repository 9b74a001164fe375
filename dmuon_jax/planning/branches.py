"""Plans whose buckets need few distinct counts: one compiled branch for each.

Where EMPTY slots are skipped by branching, a program holds only a few branches per
bucket. The counts of all tasks that feed a bucket, on one device, make one branch.
"""

import numpy as np

from dmuon_jax.planning.greedy import balance, even_counts, longest_first
from dmuon_jax.planning.incumbent import Incumbent
from dmuon_jax.planning.model import Counts, Model
from dmuon_jax.planning.rounding import even_by_load


def with_few_branches(found: Incumbent, most: int) -> Incumbent:
    """Returns the best plan known with at most *most* branches per bucket.

    If there is none, one with the fewest branches too many is returned.
    """
    if surplus(found.model, found.counts, most) == 0:
        return found
    model, table = found.model, found.table
    starts = [even_counts(model), staggered(model, table)]
    starts.append(relabelled(model, found.counts))
    starts.append(_flattened(model, table, starts[-1], most))
    plans = [found.replace(counts=starts[0], solver="even")]
    for counts in starts:
        slots = np.maximum(model.slots(counts), model.slots(found.counts))

        def allowed(counts: Counts, ceiling: int = surplus(model, counts, most)):
            return surplus(model, counts, most) <= ceiling

        counts = balance(model, table, counts, slots, allowed)
        plans.append(found.replace(counts=counts))
    return min(
        (plan for plan in plans if model.fits(model.slots(plan.counts))),
        key=lambda plan: (surplus(model, plan.counts, most), plan.objective),
    )


def surplus(model: Model, counts: Counts, most: int) -> int:
    """Returns how many branches beyond *most* the buckets have, all together."""
    total = 0
    for bucket in range(len(model.shapes)):
        total += max(num_branches(model, counts, bucket) - most, 0)
    return total


def num_branches(model: Model, counts: Counts, bucket: int) -> int:
    """Returns how many distinct counts of a bucket's tasks the devices have."""
    tasks = np.flatnonzero(model.pieces[:, bucket])
    rows = {
        tuple(row)
        for row in zip(
            *(counts[t][model.owner_of[model.family_of[t]]].tolist() for t in tasks),
            strict=True,
        )
    }
    return len(rows)


def relabelled(model: Model, counts: Counts) -> Counts:
    """Makes all but one task of a bucket even, each device's total left as it is.

    Only for buckets whose tasks feed no other, piece by piece, and share an owner grid.
    """
    result = list(counts)
    for bucket in range(len(model.shapes)):
        tasks = np.flatnonzero(model.pieces[:, bucket]).tolist()
        alone = all(model.pieces[t].sum() == 1 for t in tasks)
        if len(tasks) < 2 or not alone or len({model.family_of[t] for t in tasks}) > 1:
            continue
        left = np.sum([counts[t] for t in tasks], axis=0)
        order = np.argsort(-left, kind="stable")
        trial = {}
        for task in tasks[:-1]:
            num, owners = int(model.num_parcels[task]), len(left)
            trial[task] = np.empty_like(left)
            even = num // owners + (np.arange(owners) < num % owners)
            trial[task][order] = even
            left = left - trial[task]
        trial[tasks[-1]] = left
        if (left < 0).any() or left.max() > counts[tasks[-1]].max():
            continue
        for task, row in trial.items():
            result[task] = row
    return tuple(result)


def staggered(model: Model, table: tuple[np.ndarray, ...]) -> Counts:
    """Spreads every task evenly, what is left over to the least loaded owners so far."""
    counts = tuple(np.zeros(num, np.int64) for num in model.owners)
    for task in longest_first(model, table):
        row = even_by_load(model, table, counts, task)
        counts = tuple(row if t == task else c for t, c in enumerate(counts))
    return counts


def _flattened(
    model: Model, table: tuple[np.ndarray, ...], counts: Counts, most: int
) -> Counts:
    """Spreads the tasks of buckets with too many branches evenly, by load."""
    for bucket in range(len(model.shapes)):
        if num_branches(model, counts, bucket) <= most:
            continue
        for task in np.flatnonzero(model.pieces[:, bucket]).tolist():
            row = even_by_load(model, table, counts, task)
            counts = tuple(row if t == task else c for t, c in enumerate(counts))
    return counts
