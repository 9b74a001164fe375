"""Lower bounds on the objective that need no solver.

Every bound here holds for each plan within ``Model.max_slots``, whatever the methods.
"""

import math

import numpy as np

from dmuon_jax.planning.model import Model

SEARCHED_SLOTS = 64


def lower_bound(model: Model) -> int:
    """Returns ticks that no plan's objective is below.

    The makespan is at least the mean load over the devices (volume) and at least the
    load of the device that takes the most of one task or bucket (pigeonhole).
    """
    if not model.num_parcels.any():
        return 0
    makespan = max(volume_bound(model), pigeonhole_bound(model))
    return model.least_fixed_ticks() + makespan


def volume_bound(model: Model) -> int:
    """Returns ticks: least mean load, plus the price of slots beyond an even spread.

    A bucket holds ``mean = sum_t pieces * parcels / owners`` matrices per device, so
    its mean load is at least the lower convex envelope of its cost over the counts
    ``0..K`` that the slots allow, at ``mean``. More slots lower the envelope and are
    priced; a task that feeds several buckets shares its price among them.
    """
    total = 0.0
    table = model.best_table()
    fed = (model.pieces > 0).sum(axis=1)
    for bucket, cost in enumerate(table):
        tasks = np.flatnonzero((model.pieces[:, bucket] > 0) & (model.num_parcels > 0))
        if not tasks.size:
            continue
        pieces = model.pieces[tasks, bucket]
        mean = sum(
            int(p * n) / int(m)
            for p, n, m in zip(
                pieces, model.num_parcels[tasks], model.owners[tasks], strict=True
            )
        )
        fewest = int(pieces @ model.min_slots[tasks])
        most = int(pieces @ model.max_slots[tasks])
        price = min(
            int(model.slot_ticks[t]) / int(fed[t] * p)
            for t, p in zip(tasks, pieces, strict=True)
        )
        total += _cheapest(cost, mean, fewest, most, price)
    return math.floor(total * (1 - 1e-12))


def _cheapest(
    cost: np.ndarray, mean: float, fewest: int, most: int, price: float
) -> float:
    """Minimises envelope plus price over how many matrices the slots allow."""
    last = most if price == 0 else min(most, fewest + SEARCHED_SLOTS)
    # Where the search stops short of all counts, it lets the last ones be free.
    best = envelope(cost[: most + 1], mean) + price * (last - fewest)
    if price == 0:
        return best
    for limit in range(fewest, last):
        value = envelope(cost[: limit + 1], mean) + price * (limit - fewest)
        best = min(best, value)
    return best


def envelope(cost: np.ndarray, at: float) -> float:
    """Returns the lower convex envelope of the points ``(k, cost[k])`` at *at*.

    Args:
      cost: int64 [count].
      at: A number within 0 and ``len(cost) - 1``.
    """
    if at >= len(cost) - 1:
        return float(cost[-1])
    count, value = np.arange(len(cost), dtype=np.float64), cost.astype(np.float64)
    cut = math.floor(at) + 1
    left, right = 0, cut
    height = math.inf
    # The envelope is the lowest chord from a count at or below `at` to one above it.
    # Choosing its ends in turn stops at a line that no point is below.
    while True:
        slopes = (value[cut:] - value[left]) / (count[cut:] - count[left])
        right = cut + int(slopes.argmin())
        slopes = (value[right] - value[:cut]) / (count[right] - count[:cut])
        left = int(slopes.argmax())
        chord = value[left] + slopes[left] * (at - count[left])
        if chord >= height:
            return height
        height = float(chord)


def pigeonhole_bound(model: Model) -> int:
    """Returns ticks: some device takes at least the even share of a task or bucket."""
    table = model.best_table()
    tails = [np.minimum.accumulate(cost[::-1])[::-1] for cost in table]
    best = 0
    for task in np.flatnonzero(model.num_parcels):
        share = model.min_slots[task] * model.pieces[task]
        best = max(best, sum(int(tails[b][k]) for b, k in enumerate(share)))
    for bucket, tail in enumerate(tails):
        total = sum(
            int(model.pieces[t, bucket] * model.num_parcels[t])
            * (model.num_devices // int(model.owners[t]))
            for t in range(model.num_tasks)
        )
        best = max(best, int(tail[-(-total // model.num_devices)]))
    return best
