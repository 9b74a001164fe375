"""Which exchange groups share a buffer, and owners that let them.

An all-to-all sends every owner a row of one length. A group of 28 large matrices on 128
owners so sends 100 EMPTY rows. Groups that have no owner in common can lie in one buffer:
its row for an owner holds the slots of the one group that this owner has parcels of, and is
as long as the longest of them. What then remains EMPTY is what rows are shorter than the
busiest owner's.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dmuon_jax.layout import Layout
from dmuon_jax.planning.bounds import lower_bound
from dmuon_jax.planning.branches import surplus
from dmuon_jax.planning.groups import Group
from dmuon_jax.planning.model import TICKS_PER_US, Counts, Model, build_model
from dmuon_jax.planning.problem import Problem, Solution
from dmuon_jax.planning.rounding import owners_sorted

Route = tuple
Table = tuple[np.ndarray, ...]

ROUNDS = 3
MORE_SLOTS = 3
"""How many more slots than it needs a group is tried with when it is moved."""


def route(layout: Layout, exchange_dtype: str) -> Route:
    """What groups must have in common to travel together, both ways."""
    sides = tuple(
        (side.exchanged, side.gathered, side.sliced)
        for side in (layout.side("in"), layout.side("out"))
    )
    forced = (layout.both, layout.forced_in, layout.forced_out)
    return (layout.dtype, exchange_dtype, layout.free, forced, sides)


@dataclasses.dataclass(frozen=True, eq=False)
class Sharing:
    """Counts of a model's tasks, and which tasks share a buffer.

    Attributes:
      model: the planner's problem.
      table: cost of each bucket by count.
      routes: what tasks must have in common to share, see ``route``.
      counts: parcels on each free owner.
    """

    model: Model
    table: Table
    routes: tuple[Route, ...]
    counts: Counts

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """int64 [tasks]: ticks that all slots of a task take on the link, both ways."""
        return self.model.slots(self.counts) * self.model.slot_ticks

    @functools.cached_property
    def buffers(self) -> list[int]:
        """The buffer of each task: the longest first, each to the first that it fits."""
        held: list[tuple[Route, np.ndarray]] = []
        found = [0] * len(self.routes)
        for task in np.argsort(-self.rows, kind="stable").tolist():
            way, here = self.routes[task], self.counts[task] > 0
            fits = (
                number
                for number, (other, taken) in enumerate(held)
                if way == other and not (taken & here).any()
            )
            number = next(fits, len(held))
            if number == len(held):
                held.append((way, np.zeros_like(here)))
            held[number][1][:] |= here
            found[task] = number
        return found

    def objective(self) -> int:
        """Makespan plus the time of all buffers, in ticks."""
        longest: dict[int, int] = {}
        for row, buffer in zip(self.rows.tolist(), self.buffers, strict=True):
            longest[buffer] = max(row, longest.get(buffer, 0))
        return self.model.makespan(self.counts, self.table) + sum(longest.values())

    def with_task(self, task: int, row: np.ndarray) -> "Sharing":
        """A copy in which ``task`` has other owners."""
        counts = (*self.counts[:task], row, *self.counts[task + 1 :])
        return dataclasses.replace(self, counts=counts)

    def moved(self, task: int) -> Iterator["Sharing"]:
        """Copies in which ``task`` has left the owners of another buffer's tasks."""
        num = int(self.model.num_parcels[task])
        for buffer in sorted(set(self.buffers)):
            others = [i for i, b in enumerate(self.buffers) if b == buffer and i != task]
            if not others or self.routes[others[0]] != self.routes[task]:
                continue
            free = ~np.any([self.counts[i] > 0 for i in others], axis=0)
            fewest = -(-num // max(int(free.sum()), 1))
            most = min(int(self.model.max_slots[task]), fewest + MORE_SLOTS)
            for slots in range(fewest, most + 1):
                if num <= slots * int(free.sum()):
                    yield self.with_task(task, self.placed(task, free * slots))

    def placed(self, task: int, room: np.ndarray) -> np.ndarray:
        """Owners of ``task`` with at most ``room`` parcels each: the least loaded, in turn."""
        model = self.model
        others = self.with_task(task, np.zeros_like(self.counts[task])).counts
        devices = model.members[model.family_of[task]]
        base = model.loads(others, self.table)[devices].max(axis=1)
        held = model.bucket_counts(others)[:, devices].max(axis=2)
        row = np.zeros_like(self.counts[task])
        fed = np.flatnonzero(model.pieces[task]).tolist()
        for _ in range(int(model.num_parcels[task])):
            load = base.copy()
            for bucket in fed:
                cost, pieces = self.table[bucket], model.pieces[task, bucket]
                after = np.minimum(held[bucket] + pieces * (row + 1), len(cost) - 1)
                load += cost[after] - cost[held[bucket]]
            load = np.where(row < room, load, np.iinfo(np.int64).max)
            row[int(load.argmin())] += 1
        return row


def share_buffers(
    problem: Problem, solution: Solution, routes: Sequence[Route]
) -> Sharing:
    """The tasks of ``solution`` in buffers, moved where those become shorter by it.

    Args:
      problem: what was planned.
      solution: the plan, as if each task had a buffer of its own.
      routes: see ``route``, of each task.
    """
    model = build_model(problem)
    table = model.table(tuple(method for _, method in solution.methods))
    counts = tuple(np.array(row, np.int64) for row in solution.counts)
    best = Sharing(model, table, tuple(routes), counts)
    most = problem.max_branches
    allowed = surplus(model, counts, most) if most else 0
    least = best.objective()
    few = [i for i, num in enumerate(model.num_parcels) if 0 < num < model.owners[i]]
    for _, task in itertools.product(range(ROUNDS), few):
        for trial in best.moved(task):
            if not model.fits(model.slots(trial.counts)):
                continue
            if most and surplus(model, trial.counts, most) > allowed:
                continue
            objective = trial.objective()
            if objective < least:
                best, least = trial, objective
    if best.counts is not counts:
        best = dataclasses.replace(best, counts=owners_sorted(model, best.counts))
    return best


def exchange_us(problem: Problem, groups: Sequence[Group]) -> float:
    """Time of all buffers of all waves, each as long as the longest of its rows."""
    longest: dict[tuple[int, int], float] = {}
    for group, task in zip(groups, problem.tasks, strict=True):
        for part in group.parts:
            key = (part.wave, group.buffer)
            us = part.slots * problem.slot_us(task)
            longest[key] = max(us, longest.get(key, 0.0))
    return sum(longest.values())


def shared_bound_us(problem: Problem, model: Model) -> float:
    """What no plan's makespan and exchange take less than, whatever groups share buffers.

    Rows are at least as long as an owner's mean, and as the longest slot.

    Args:
      problem: what is planned.
      model: the same in integers.
    """
    alone = dataclasses.replace(model, slot_ticks=np.zeros_like(model.slot_ticks))
    slot_us = [problem.slot_us(t) if t.num_parcels else 0.0 for t in problem.tasks]
    mean_us = math.fsum(
        us * task.num_parcels / problem.num_owners(task)
        for us, task in zip(slot_us, problem.tasks, strict=True)
    )
    exchange_us = max(mean_us, max(slot_us, default=0.0))
    return lower_bound(alone) / TICKS_PER_US + problem.exposed * exchange_us
