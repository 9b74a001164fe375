"""Count patterns: what one owner may take of the tasks whose grain matters.

A plan is how many owners follow which pattern. Patterns of all tasks are too many to
list for large models; but there most tasks are *sand*: their matrices are short beside
the makespan, so only their mean load matters. Tasks are taken out of the sand, longest
matrices first, while the patterns stay few. Leaving a task in the sand relaxes the
problem, so bounds stay bounds.
"""

import dataclasses

import numpy as np

from dmuon_jax.planning.bounds import envelope
from dmuon_jax.planning.model import Counts, Model


@dataclasses.dataclass(frozen=True, eq=False)
class Sand:
    """Mean loads of the tasks that have no patterns.

    Attributes:
      mean_ticks: Their least mean load per device at the fewest slots.
      gains: Triples ``(task, slots, ticks)``: by how much the mean load may fall when
        the task has that many slots instead of one fewer.
    """

    mean_ticks: float
    gains: tuple[tuple[int, int, float], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Tasks to be spread over owners that differ at most in what they already hold.

    Attributes:
      tasks: int64 [tasks]: the tasks with patterns, as indices into the model.
      demand: int64 [tasks]: parcels over all owners.
      kinds: For each kind of owner: its owners, and int64 [devices, buckets], what the
        devices behind such an owner already hold.
      patterns: For each kind int64 [patterns, tasks].
      loads: For each kind int64 [patterns]: ticks of the most loaded device.
      sand: The other tasks.
    """

    tasks: np.ndarray
    demand: np.ndarray
    kinds: tuple[tuple[np.ndarray, np.ndarray], ...]
    patterns: tuple[np.ndarray, ...]
    loads: tuple[np.ndarray, ...]
    sand: Sand

    @property
    def num_owners(self) -> int:
        return sum(len(owners) for owners, _ in self.kinds)


def relaxed_packing(
    model: Model, table: tuple[np.ndarray, ...], slack: tuple[int, int], most: int
) -> Packing:
    """Lets every device choose for itself, also where devices share an owner's counts.

    With one family this is the problem itself; else it is a relaxation.

    Args:
      model: The problem.
      table: Cost of each bucket by count.
      slack: Only plans within this makespan matter, and within this price of slots
        beyond the fewest, both in ticks.
      most: How many patterns to list at most.
    """
    held = np.zeros((1, len(model.shapes)), np.int64)
    kinds = ((np.arange(model.num_devices), held),)
    tasks = np.flatnonzero((model.num_parcels > 0) & model.pieces.any(axis=1))
    repeats = model.num_devices // model.owners
    return _pack(model, table, kinds, tasks, repeats, slack, most)


def family_packing(
    model: Model,
    table: tuple[np.ndarray, ...],
    counts: Counts,
    family: int,
    slack: tuple[int, int],
    most: int,
) -> Packing:
    """Spreads one family, the counts of all the others taken as they are."""
    inside = np.array(model.family_of, np.int64) == family
    others = tuple(row * (not inside[t]) for t, row in enumerate(counts))
    held = model.bucket_counts(others).T
    kinds: dict[bytes, tuple[list[int], np.ndarray]] = {}
    for owner, devices in enumerate(model.members[family]):
        distinct = np.unique(held[devices], axis=0)
        kinds.setdefault(distinct.tobytes(), ([], distinct))[0].append(owner)
    return _pack(
        model,
        table,
        tuple((np.array(owners), rows) for owners, rows in kinds.values()),
        np.flatnonzero(inside & (model.num_parcels > 0) & model.pieces.any(axis=1)),
        np.ones(model.num_tasks, np.int64),
        slack,
        most,
    )


def _pack(
    model: Model,
    table: tuple[np.ndarray, ...],
    kinds: tuple[tuple[np.ndarray, np.ndarray], ...],
    tasks: np.ndarray,
    repeats: np.ndarray,
    slack: tuple[int, int],
    most: int,
) -> Packing:
    makespan, slots = slack[0], _affordable_slots(model, slack[1])
    chosen: list[int] = []
    patterns = tuple(np.zeros((1, 0), np.int64) for _ in kinds)
    for group in _coarse_first(model, table, tasks):
        wider = chosen + group
        trial = tuple(
            _extend(model, table, held, (old, wider), slots, (makespan, most))
            for (_, held), old in zip(kinds, patterns, strict=True)
        )
        if sum(len(new) for new in trial) <= most:
            chosen, patterns = wider, trial
    loads = tuple(
        _loads(table, held, new @ model.pieces[chosen])
        for (_, held), new in zip(kinds, patterns, strict=True)
    )
    fits = tuple(load <= makespan for load in loads)
    return Packing(
        tasks=np.array(chosen, np.int64),
        demand=(model.num_parcels * repeats)[chosen],
        kinds=kinds,
        patterns=tuple(p[ok] for p, ok in zip(patterns, fits, strict=True)),
        loads=tuple(p[ok] for p, ok in zip(loads, fits, strict=True)),
        sand=_sand(model, table, [t for t in tasks if t not in chosen], slots),
    )


def _affordable_slots(model: Model, spare: int) -> np.ndarray:
    """Returns int64 [tasks]: the most slots whose price beyond the fewest is *spare*."""
    more = spare // np.maximum(model.slot_ticks, 1)
    more = np.where(model.slot_ticks > 0, more, model.max_slots)
    return np.minimum(model.min_slots + more, model.max_slots)


def _coarse_first(
    model: Model, table: tuple[np.ndarray, ...], tasks: np.ndarray
) -> list[list[int]]:
    """Groups tasks that share buckets; groups of long matrices come first."""
    groups: list[list[int]] = []
    for task in tasks.tolist():
        joined = [
            g for g in groups if (model.pieces[g].max(0) * model.pieces[task]).any()
        ]
        groups = [g for g in groups if g not in joined]
        groups.append(sorted([task, *(t for g in joined for t in g)]))
    longest = {
        group[0]: max(
            int(table[b][model.pieces[t, b]])
            for t in group
            for b in np.flatnonzero(model.pieces[t])
        )
        for group in groups
    }
    return sorted(groups, key=lambda group: (-longest[group[0]], group))


def _extend(
    model: Model,
    table: tuple[np.ndarray, ...],
    held: np.ndarray,
    patterns: tuple[np.ndarray, list[int]],
    slots: np.ndarray,
    limits: tuple[int, int],
) -> np.ndarray:
    """Adds the last tasks of a list to patterns of the first ones.

    Args:
      model: The problem.
      table: Cost of each bucket by count.
      held: int64 [devices, buckets]: what such an owner holds already.
      patterns: int64 [patterns, first tasks], and the list of all tasks.
      slots: int64 [tasks of the model].
      limits: The largest load in ticks, and how many patterns to list at most.

    Returns:
      int64 [patterns, tasks]. It holds more rows than the limit where the list was cut.
    """
    rows, tasks = patterns
    makespan, most = limits
    # What a pattern costs at least, however many matrices are added to it later.
    tails = tuple(np.minimum.accumulate(c[::-1])[::-1] for c in table)
    for task in tasks[rows.shape[1] :]:
        done = tasks[: rows.shape[1]] + [task]
        parts, total = [rows[:0, :0].reshape(0, len(done))], 0
        for num in range(int(slots[task]) + 1):
            part = np.column_stack([rows, np.full(len(rows), num, np.int64)])
            fits = _loads(tails, held, part @ model.pieces[done]) <= makespan
            total += int(fits.sum())
            if not fits.any() or total > most:
                parts.append(part[fits])
                break
            parts.append(part[fits])
        rows = np.concatenate(parts)
        if total > most:
            return np.zeros((most + 1, len(tasks)), np.int64)
    return rows


def _loads(
    table: tuple[np.ndarray, ...], held: np.ndarray, matrices: np.ndarray
) -> np.ndarray:
    """Returns int64 [rows]: the most loaded of the devices in *held*, plus a row each."""
    worst = np.zeros(len(matrices), np.int64)
    for row in held:
        total = np.zeros(len(matrices), np.int64)
        for bucket, cost in enumerate(table):
            total += cost[row[bucket] + matrices[:, bucket]]
        np.maximum(worst, total, out=worst)
    return worst


def _sand(
    model: Model, table: tuple[np.ndarray, ...], tasks: list[int], slots: np.ndarray
) -> Sand:
    mean_ticks, gains = 0.0, []
    fed = (model.pieces > 0).sum(axis=1)
    for bucket in np.flatnonzero(model.pieces[tasks].any(axis=0)):
        inside = [t for t in tasks if model.pieces[t, bucket]]
        pieces = model.pieces[inside, bucket]
        means = model.num_parcels[inside] / model.owners[inside]
        mean, cost = float((pieces * means).sum()), table[bucket]
        task = inside[0]
        if len(inside) > 1 or fed[task] > 1 or model.slot_ticks[task] == 0:
            mean_ticks += envelope(cost[: int(pieces @ slots[inside]) + 1], mean)
            continue
        counts = range(int(model.min_slots[task]), int(slots[task]) + 1)
        heights = [envelope(cost[: int(pieces[0]) * k + 1], mean) for k in counts]
        mean_ticks += heights[0]
        for k, before, after in zip(counts[1:], heights, heights[1:], strict=False):
            gains.append((task, k, before - after))
    return Sand(mean_ticks, tuple(gains))
