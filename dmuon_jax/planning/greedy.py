"""Plans without a solver: even spread, longest processing time first, local search."""

from collections.abc import Callable

import numpy as np

from dmuon_jax.planning.model import Counts, Model

FORBIDDEN = np.iinfo(np.int64).max // 4
MAX_MOVES = 500
MAX_WALKS = 3
MAX_TRIES = 20
# Tasks of more parcels are spread evenly but for their last rounds.
MAX_SINGLE = 1024
KEPT_ROUNDS = 3


def even_counts(model: Model) -> Counts:
    """Spreads each task evenly; the first owners take what is left over."""
    return tuple(
        num // owners + (np.arange(owners) < num % owners).astype(np.int64)
        for num, owners in zip(model.num_parcels, model.owners, strict=True)
    )


class Spread:
    """A table of counts under construction, with the loads that follow from it."""

    def __init__(self, model: Model, table: tuple[np.ndarray, ...], counts: Counts):
        self.model, self.table = model, table
        self.counts = tuple(row.copy() for row in counts)
        self.matrices = model.bucket_counts(self.counts)
        self.loads = model.loads(self.counts, table)

    def changes(self, step: np.ndarray, devices=slice(None)) -> np.ndarray:
        """Returns int64 [devices]: load change where *step* matrices are added."""
        total = np.zeros_like(self.loads[devices])
        for bucket in np.flatnonzero(step):
            row, cost = self.matrices[bucket, devices], self.table[bucket]
            total += cost.take(row + step[bucket], mode="clip") - cost.take(row)
        return total

    def loads_with(self, family: int, step: np.ndarray) -> np.ndarray:
        """Returns int64 [owners]: an owner's largest load with *step* added."""
        loads = self.loads + self.changes(step)
        return loads[self.model.members[family]].max(axis=1)

    def add(self, task: int, owner: int, num: int = 1):
        """Gives *num* parcels (or takes them, if negative) of *task* to *owner*."""
        devices = self.model.members[self.model.family_of[task]][owner]
        step = num * self.model.pieces[task]
        self.loads[devices] += self.changes(step, devices)
        self.matrices[:, devices] += step[:, None]
        self.counts[task][owner] += num

    def add_everywhere(self, task: int, num: int):
        """Gives *num* parcels of *task* to each of its owners."""
        step = num * self.model.pieces[task]
        self.loads += self.changes(step)
        self.matrices += step[:, None]
        self.counts[task][:] += num


def greedy_counts(
    model: Model,
    table: tuple[np.ndarray, ...],
    slots: np.ndarray,
    start: Counts | None = None,
) -> Counts | None:
    """Places the longest parcels first, each where the load ends up smallest.

    Args:
      model: The problem.
      table: Cost of each bucket by count.
      slots: int64 [tasks]: the most parcels of a task that an owner may take.
      start: What is placed already. By default nothing, but an even spread of all but
        the last rounds where a task has thousands of parcels.

    Returns:
      The counts, or None if the slots hold too few parcels.
    """
    if (slots * model.owners < model.num_parcels).any():
        return None
    if start is None:
        start = tuple(np.zeros(num, np.int64) for num in model.owners)
    spread = Spread(model, table, start)
    for task in longest_first(model, table):
        family, step = model.family_of[task], model.pieces[task]
        if not step.any():
            spread.counts[task][:] = even_counts(model)[task]
        placed = int(spread.counts[task].sum())
        left = int(model.num_parcels[task]) - placed
        rounds = left // int(model.owners[task]) - KEPT_ROUNDS
        if placed == 0 and left > MAX_SINGLE and rounds > 0:
            spread.add_everywhere(task, rounds)
            left -= rounds * int(model.owners[task])
        for _ in range(left):
            loads = spread.loads_with(family, step)
            loads[spread.counts[task] >= slots[task]] = FORBIDDEN
            spread.add(task, int(loads.argmin()))
    return spread.counts


def longest_first(model: Model, table: tuple[np.ndarray, ...]) -> list[int]:
    """Orders tasks by the time of one parcel; those of fewer owners come first."""
    single = {
        t: sum(int(table[b][k]) for b, k in enumerate(model.pieces[t]) if k)
        for t in np.flatnonzero(model.num_parcels).tolist()
    }
    return sorted(single, key=lambda t: (model.family_of[t], -single[t], t))


def balance(
    model: Model,
    table: tuple[np.ndarray, ...],
    counts: Counts,
    slots: np.ndarray,
    allowed: Callable[[Counts], bool] | None = None,
) -> Counts:
    """Moves and swaps parcels away from the most loaded device while that helps.

    Each step makes the sorted list of loads smaller, so the search ends. No more than
    *slots* are ever used, and only plans that are *allowed*, by default all.
    """
    spread = Spread(model, table, counts)
    for _ in range(MAX_MOVES):
        if not any(
            _relieve(spread, family, slots, allowed) for family in _families(model)
        ):
            break
    return spread.counts


def _families(model: Model) -> range:
    return range(len(model.members) - 1, -1, -1)


def _relieve(
    spread: Spread,
    family: int,
    slots: np.ndarray,
    allowed: Callable[[Counts], bool] | None,
) -> bool:
    """Applies the best move or swap from the most loaded device's owner, if any."""
    source = int(spread.model.owner_of[family][spread.loads.argmax()])
    options = _options(spread, family, slots, source)
    if allowed is None:
        options = [min(options)] if options else []
    for _, target, given, taken in sorted(options)[:MAX_TRIES]:
        spread.add(given, source, -1)
        spread.add(given, target)
        if taken >= 0:
            spread.add(taken, target, -1)
            spread.add(taken, source)
        if allowed is None or allowed(spread.counts):
            return True
        spread.add(given, target, -1)
        spread.add(given, source)
        if taken >= 0:
            spread.add(taken, source, -1)
            spread.add(taken, target)
    return False


def _options(
    spread: Spread, family: int, slots: np.ndarray, source: int
) -> list[tuple[int, int, int, int]]:
    """Lists what lowers the loads of a source and some target.

    Returns:
      Tuples (the larger load afterwards, target, task given, task taken or -1), for
      each pair of tasks the best target.
    """
    model = spread.model
    here = model.members[family][source]
    now = int(spread.loads[here].max())
    tasks = [t for t in range(model.num_tasks) if model.family_of[t] == family]
    options = []
    for given in (t for t in tasks if spread.counts[t][source] > 0):
        for taken in (-1, *(t for t in tasks if t != given)):
            step = model.pieces[given]
            if taken >= 0:
                if spread.counts[taken][source] >= slots[taken]:
                    continue
                step = step - model.pieces[taken]
            left = int((spread.loads[here] + spread.changes(-step, here)).max())
            if left >= now:
                continue
            worst = np.maximum(spread.loads_with(family, step), left)
            worst[spread.counts[given] >= slots[given]] = FORBIDDEN
            if taken >= 0:
                worst[spread.counts[taken] <= 0] = FORBIDDEN
            worst[source] = FORBIDDEN
            target = int(worst.argmin())
            if worst[target] < now:
                options.append((int(worst[target]), target, given, taken))
    return options


def search(model: Model, table: tuple[np.ndarray, ...], target: int = 0) -> Counts:
    """Returns the best plan of several starts, improved by changing slots one by one.

    Slots are priced, so the search walks over slot limits: under each it packs
    greedily and balances.

    Args:
      model: The problem.
      table: Cost of each bucket by count.
      target: Ticks: an objective that is good enough.
    """
    packed = {
        name: greedy_counts(model, table, slots)
        for name, slots in (("wide", model.max_slots), ("tight", model.min_slots))
    }
    plans = [even_counts(model), *(c for c in packed.values() if c is not None)]
    best = model.best(tuple(plans), table)
    for counts, slots in ((packed["tight"], model.min_slots), (packed["wide"], None)):
        if model.objective(best, table) <= target:
            return best
        if counts is not None:
            limits = model.max_slots if slots is None else slots
            best = model.best((best, balance(model, table, counts, limits)), table)
    for family in range(len(model.members) if len(model.members) > 1 else 0):
        best = _place_anew(model, table, best, family)
    return walk_slots(model, table, best, target)


def _place_anew(
    model: Model, table: tuple[np.ndarray, ...], best: Counts, family: int
) -> Counts:
    """Spreads the other families evenly or as they are, and one family around them."""
    inside = [f == family for f in model.family_of]
    candidates = [best]
    for others in (best, even_counts(model)):
        start = tuple(row * (not own) for row, own in zip(others, inside, strict=True))
        for slots in (model.min_slots, model.max_slots):
            limits = np.where(inside, slots, np.maximum(model.slots(others), 1))
            limits = np.maximum(limits, model.min_slots)
            placed = greedy_counts(model, table, limits, start)
            if placed is not None and model.fits(model.slots(placed)):
                candidates.append(balance(model, table, placed, model.slots(placed)))
    return model.best(tuple(candidates), table)


def walk_slots(
    model: Model, table: tuple[np.ndarray, ...], best: Counts, target: int
) -> Counts:
    """Improves a plan by balancing it under one slot fewer or more of each task."""
    for _ in range(MAX_WALKS):
        before = model.objective(best, table)
        for task in np.argsort(-model.slot_ticks, kind="stable").tolist():
            for change in (-1, 1):
                most = model.objective(best, table) - target
                if most <= max(change * int(model.slot_ticks[task]), 0):
                    continue
                trial = _with_slots(model, table, best, task, change)
                best = model.best((best, trial), table)
        if model.objective(best, table) >= before:
            break
    return best


def _with_slots(
    model: Model, table: tuple[np.ndarray, ...], counts: Counts, task: int, change: int
) -> Counts:
    slots = model.slots(counts)
    slots[task] += change
    allowed = model.min_slots[task] <= slots[task] <= model.max_slots[task]
    if not (allowed and model.fits(slots)):
        return counts
    spread = Spread(model, table, counts)
    family, step = model.family_of[task], model.pieces[task]
    for owner in np.flatnonzero(spread.counts[task] > slots[task]).tolist():
        spread.add(task, owner, -1)
        loads = spread.loads_with(family, step)
        loads[spread.counts[task] >= slots[task]] = FORBIDDEN
        spread.add(task, int(loads.argmin()))
    return balance(model, table, spread.counts, slots)
