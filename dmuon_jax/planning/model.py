"""A problem in integers, and the evaluation of a table of counts.

Times are held in ticks of a picosecond as int64, so that sums are exact and two
processes can never differ by the order of an addition.
"""

import dataclasses
import functools
import math

import numpy as np

from dmuon_jax.planning.problem import MemoryLimitError, Method, Problem, Shape

TICKS_PER_US = 1_000_000
MAX_TICKS = 2**53
"""Costs above this (2.5 hours) are refused; below it float64 is exact as well."""

Counts = tuple[np.ndarray, ...]
"""For each task an int64 array [owners of the task]."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What the solvers work on.

    Devices that differ only along axes free for no task carry the same load, so only
    the axes free for some task span the ``num_devices`` devices here. ``families``
    are the distinct free-axes sets, fewest owners first.

    Attributes:
      num_devices: Devices that can carry different loads.
      num_parcels: int64 [tasks].
      family_of: For each task the index of its family.
      members: For each family int64 [owners, devices per owner]: the devices that
        repeat an owner's counts.
      shapes: The oriented shapes, sorted; one bucket each.
      pieces: int64 [tasks, buckets]: matrices of a bucket in one parcel, 0 in padded
        buckets.
      padding: int64 [tasks, buckets]: the same for padded buckets, else 0.
      costs: For each method, for each bucket int64 [count]: ticks.
      slot_ticks: int64 [tasks]: objective ticks per slot.
      min_slots: int64 [tasks]: slots of an even spread.
      max_slots: int64 [tasks]: slots beyond which no plan is looked for.
      parcel_bytes: int64 [tasks].
      max_owner_bytes: Limit on ``slots . parcel_bytes``, or None.
    """

    num_devices: int
    num_parcels: np.ndarray
    family_of: tuple[int, ...]
    members: tuple[np.ndarray, ...]
    shapes: tuple[Shape, ...]
    pieces: np.ndarray
    padding: np.ndarray
    costs: dict[Method, tuple[np.ndarray, ...]]
    slot_ticks: np.ndarray
    min_slots: np.ndarray
    max_slots: np.ndarray
    parcel_bytes: np.ndarray
    max_owner_bytes: int | None

    @property
    def num_tasks(self) -> int:
        return len(self.num_parcels)

    @functools.cached_property
    def owners(self) -> np.ndarray:
        """int64 [tasks]: free owners of each task."""
        return np.array([len(self.members[f]) for f in self.family_of], np.int64)

    @functools.cached_property
    def owner_of(self) -> tuple[np.ndarray, ...]:
        """For each family int64 [devices]: the owner whose counts a device repeats."""
        tables = []
        for members in self.members:
            table = np.empty(self.num_devices, np.int64)
            table[members] = np.arange(len(members))[:, None]
            tables.append(table)
        return tuple(tables)

    def table(self, methods: tuple[Method, ...]) -> tuple[np.ndarray, ...]:
        """Returns each bucket's cost by count under *methods*, one per bucket."""
        return tuple(self.costs[m][b] for b, m in enumerate(methods))

    def best_table(self) -> tuple[np.ndarray, ...]:
        """Returns each bucket's cost by count, the best method at every count."""
        return tuple(
            functools.reduce(np.minimum, [self.costs[m][b] for m in self.costs])
            for b in range(len(self.shapes))
        )

    def bucket_counts(self, counts: Counts) -> np.ndarray:
        """Returns int64 [buckets, devices]: matrices on each device."""
        total = np.zeros((len(self.shapes), self.num_devices), np.int64)
        for task, row in enumerate(counts):
            on_device = row[self.owner_of[self.family_of[task]]]
            total += self.pieces[task][:, None] * on_device[None, :]
        return total

    def loads(self, counts: Counts, table: tuple[np.ndarray, ...]) -> np.ndarray:
        """Returns int64 [devices]: each device's ticks in buckets that are not padded."""
        total = np.zeros(self.num_devices, np.int64)
        for bucket, row in enumerate(self.bucket_counts(counts)):
            total += table[bucket][row]
        return total

    def padded_ticks(self, slots: np.ndarray, table: tuple[np.ndarray, ...]) -> int:
        """Returns the ticks that padded buckets take on every device."""
        return sum(int(table[b][n]) for b, n in enumerate(slots @ self.padding))

    def least_fixed_ticks(self) -> int:
        """Returns what no plan's padded buckets and exchange take less than."""
        total = int(self.min_slots @ self.slot_ticks)
        for cost, num in zip(
            self.best_table(), self.min_slots @ self.padding, strict=True
        ):
            total += int(cost[num:].min())
        return total

    def slots(self, counts: Counts) -> np.ndarray:
        """Returns int64 [tasks]: slots on every owner."""
        return np.array([row.max(initial=0) for row in counts], np.int64)

    def fits(self, slots: np.ndarray) -> bool:
        """Returns whether the slots respect the memory limit of an owner."""
        if self.max_owner_bytes is None:
            return True
        return int(slots @ self.parcel_bytes) <= self.max_owner_bytes

    def objective(self, counts: Counts, table: tuple[np.ndarray, ...]) -> int:
        """Returns makespan plus priced exchange, in ticks."""
        exchange = int(self.slots(counts) @ self.slot_ticks)
        return self.makespan(counts, table) + exchange

    def makespan(self, counts: Counts, table: tuple[np.ndarray, ...]) -> int:
        """Returns the largest time of a device, padded buckets included, in ticks."""
        padded = self.padded_ticks(self.slots(counts), table)
        return padded + int(self.loads(counts, table).max(initial=0))

    def best(
        self, candidates: tuple[Counts, ...], table: tuple[np.ndarray, ...]
    ) -> Counts:
        """Returns the first of the plans with the smallest objective.

        Plans above the memory limit count only where there is no other.
        """
        return min(
            candidates,
            key=lambda c: (not self.fits(self.slots(c)), self.objective(c, table)),
        )


def build_model(problem: Problem) -> Model:
    """Turns *problem* into integers.

    Raises:
      ValueError: A cost is not positive and finite.
      MemoryLimitError: Even the even spread is above ``max_owner_bytes``.
    """
    tasks = problem.tasks
    sizes = dict(problem.mesh)
    used = [a for a in sizes if any(a in task.free_axes for task in tasks)]
    grid = np.arange(math.prod(sizes[a] for a in used), dtype=np.int64)
    grid = grid.reshape([sizes[a] for a in used])
    families = sorted(
        {task.free_axes for task in tasks},
        key=lambda axes: (math.prod(sizes[a] for a in axes), axes),
    )
    shapes = tuple(sorted({shape for task in tasks for shape in task.matrices}))
    pieces = np.array(
        [[task.matrices.count(shape) for shape in shapes] for task in tasks], np.int64
    ).reshape(len(tasks), len(shapes))
    num_parcels = np.array([task.num_parcels for task in tasks], np.int64)
    owners = np.array([problem.num_owners(task) for task in tasks], np.int64)
    min_slots = -(-num_parcels // owners)
    # Far beyond the even spread no plan pays; the cap keeps the cost tables short.
    max_slots = np.minimum(num_parcels, min_slots + np.maximum(32, min_slots // 4))
    padded = np.array([_is_padded(problem, shape) for shape in shapes], bool)
    max_slots = np.where((pieces * ~padded).any(axis=1), max_slots, min_slots)
    longest = (max_slots @ pieces).tolist()
    slot_us = [problem.exposed * problem.slot_us(task) for task in tasks]
    model = Model(
        num_devices=grid.size,
        num_parcels=num_parcels,
        family_of=tuple(families.index(task.free_axes) for task in tasks),
        members=tuple(_members(grid, used, axes) for axes in families),
        shapes=shapes,
        pieces=pieces * ~padded,
        padding=pieces * padded,
        costs={
            method: tuple(
                _cost_row(problem, shape, num, method)
                for shape, num in zip(shapes, longest, strict=True)
            )
            for method in sorted(set(problem.methods))
        },
        slot_ticks=np.array([_ticks(us) for us in slot_us], np.int64),
        min_slots=min_slots,
        max_slots=max_slots,
        parcel_bytes=np.array([task.parcel_bytes for task in tasks], np.int64),
        max_owner_bytes=problem.max_owner_bytes,
    )
    if not model.fits(min_slots):
        raise MemoryLimitError(
            f"max_owner_bytes must hold an even spread, which takes "
            f"{int(min_slots @ model.parcel_bytes)} bytes of slots, EMPTY ones included, got "
            f"{problem.max_owner_bytes}"
        )
    return model


def _members(grid: np.ndarray, used: list[str], axes: tuple[str, ...]) -> np.ndarray:
    free = [used.index(a) for a in axes]
    rest = [i for i in range(len(used)) if i not in free]
    num_owners = math.prod(grid.shape[i] for i in free)
    return grid.transpose(free + rest).reshape(num_owners, -1)


def _is_padded(problem: Problem, shape: Shape) -> bool:
    if problem.pad_below_us <= 0:
        return False
    return problem.pad_below_us > min(
        problem.cost.time_us(shape, 1, method) for method in problem.methods
    )


def _cost_row(
    problem: Problem, shape: Shape, longest: int, method: Method
) -> np.ndarray:
    row = np.zeros(longest + 1, np.int64)
    for batch in range(1, longest + 1):
        time_us = problem.cost.time_us(shape, batch, method)
        if not (0 < time_us and time_us * TICKS_PER_US <= MAX_TICKS):
            raise ValueError(
                "time_us must be positive and finite (at most "
                f"{MAX_TICKS / TICKS_PER_US:.0f}), got {time_us} "
                f"(at shape {shape}, batch {batch}, method {method!r})"
            )
        row[batch] = max(_ticks(time_us), 1)
    return row


def _ticks(time_us: float) -> int:
    return round(time_us * TICKS_PER_US)
