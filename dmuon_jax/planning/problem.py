"""What the planner is asked, and what it answers: frozen data, checked at construction.

Parcels of one exchange group are interchangeable, and so are owners, so a plan is a
table of counts: how many parcels of each task every free owner takes.

A matrix has one owner. Where there are far more devices than matrices the longest matrix
bounds the makespan (`bounds.pigeonhole_bound`). Splitting it over k owners by columns
would enter here as k parcels of a task of its own, with a cost for (s, l / k) that
includes the all-reduces of the Gram matrix, and counts of at most one per owner.
"""

import dataclasses
import math
from typing import Literal, Protocol, get_args, runtime_checkable

Method = Literal["direct", "gram"]
Solver = Literal["milp", "greedy", "lpt", "even"]
Shape = tuple[int, int]
"""An oriented shape ``(s, l)`` with ``s <= l``: what one bucket orthogonalizes."""

METHODS: tuple[Method, ...] = get_args(Method)
SOLVERS: tuple[Solver, ...] = get_args(Solver)


class MemoryLimitError(ValueError):
    """No plan fits into the memory that an owner may use."""


@runtime_checkable
class CostModel(Protocol):
    """Time of the owner's update path for a batch of equal matrices."""

    def time_us(self, shape: Shape, batch: int, method: Method) -> float:
        """Returns the time of *batch* >= 1 matrices of *shape*, finite and positive."""
        ...


@dataclasses.dataclass(frozen=True)
class Task:
    """One exchange group as the planner sees it.

    Attributes:
      name: A stable key, for reports and for sorting.
      num_parcels: Parcels per forced coordinate, to be spread over the free owners.
      free_axes: Mesh axes along which the owner may be chosen, in mesh order.
      matrices: Oriented shapes of the matrices that one parcel is split into.
      slot_bytes: Pairs ``(axes, bytes)``, one for each collective of the two
        exchanges: the bytes that one more slot on every owner makes each device send
        to the others along those mesh axes.
      parcel_bytes: Memory that one slot takes on its owner; counts only against
        ``Problem.max_owner_bytes``.
    """

    name: str
    num_parcels: int
    free_axes: tuple[str, ...]
    matrices: tuple[Shape, ...]
    slot_bytes: tuple[tuple[tuple[str, ...], int], ...] = ()
    parcel_bytes: int = 0

    def __post_init__(self):
        if self.num_parcels < 0:
            raise ValueError(
                f"num_parcels must be at least 0, got {self.num_parcels} (at {self.name})"
            )
        if not self.matrices:
            raise ValueError(f"matrices must name at least one shape (at {self.name})")
        for small, large in self.matrices:
            if not 0 < small <= large:
                raise ValueError(
                    "matrices must be oriented (s, l) with 0 < s <= l, got "
                    f"{(small, large)} (at {self.name})"
                )
        if min((num for _, num in self.slot_bytes), default=0) < 0:
            raise ValueError(
                f"slot_bytes must not be negative, got {self.slot_bytes} (at {self.name})"
            )


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that a plan depends on.

    Attributes:
      mesh: Name and size of every mesh axis, in mesh order.
      tasks: The exchange groups; names must differ.
      cost: Times of the owner's work; must not change while the problem is solved.
      methods: The methods allowed; a single one forces it.
      bandwidths: Bytes per microsecond (1 GB/s is 1000) that one device sends along a
        mesh axis; an axis that is not named costs nothing.
      exposed: The share of the exchange time that nothing hides, 0 to 1.
      max_owner_bytes: Limit on the slots' memory on an owner, all tasks together.
      pad_below_us: Shapes of which one matrix takes less than this are *padded*: every
        device computes all its slots, EMPTY ones too, as that is cheaper than a branch.
      max_branches: How many distinct counts, of the tasks that feed it, a shape that is
        not padded may have over the devices; 0 for any number. Bounds ignore it, and
        where more than two tasks feed a shape a plan may have a few more.
    """

    mesh: tuple[tuple[str, int], ...]
    tasks: tuple[Task, ...]
    cost: CostModel
    methods: tuple[Method, ...] = METHODS
    bandwidths: tuple[tuple[str, float], ...] = ()
    exposed: float = 1.0
    max_owner_bytes: int | None = None
    pad_below_us: float = 0.0
    max_branches: int = 0

    def __post_init__(self):
        sizes = dict(self.mesh)
        if len(sizes) != len(self.mesh) or min(sizes.values(), default=1) < 1:
            raise ValueError(
                f"mesh must have distinct axes of positive size, got {self.mesh}"
            )
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"tasks must have distinct names, got {names}")
        if not self.methods or set(self.methods) - set(METHODS):
            raise ValueError(
                f"methods must be chosen from {METHODS}, got {self.methods}"
            )
        if not 0.0 <= self.exposed <= 1.0:
            raise ValueError(f"exposed must be within 0 and 1, got {self.exposed}")
        for axis, bandwidth in self.bandwidths:
            if not (bandwidth > 0 and math.isfinite(bandwidth)):
                raise ValueError(
                    "bandwidths must be positive and finite, got "
                    f"{bandwidth} (at axis {axis!r})"
                )
        order = list(sizes)
        for task in self.tasks:
            axes = [*task.free_axes, *(a for axs, _ in task.slot_bytes for a in axs)]
            if unknown := set(axes) - set(order):
                raise ValueError(
                    f"free_axes and slot_bytes must name axes of the mesh {order}, "
                    f"got {sorted(unknown)} (at {task.name})"
                )
            if list(task.free_axes) != [a for a in order if a in task.free_axes]:
                raise ValueError(
                    "free_axes must be distinct and in mesh order, got "
                    f"{task.free_axes} (at {task.name})"
                )

    def num_owners(self, task: Task) -> int:
        """Returns over how many free owners the parcels of *task* are spread."""
        sizes = dict(self.mesh)
        return math.prod(sizes[axis] for axis in task.free_axes)

    def slot_us(self, task: Task) -> float:
        """Returns the exchange time that one more slot of *task* costs, in us.

        A collective over several axes sends each device's bytes evenly to all the
        others. A message crosses the slowest axis on which its two ends differ, and
        the links of different axes work at the same time.
        """
        return self.link_us(task.slot_bytes)

    def link_us(self, collectives: tuple[tuple[tuple[str, ...], int], ...]) -> float:
        """Returns the time of *collectives*, pairs as in ``Task.slot_bytes``, in us."""
        return sum(self._collective_us(axes, num) for axes, num in collectives)

    def _collective_us(self, axes: tuple[str, ...], num_bytes: int) -> float:
        sizes, speeds = dict(self.mesh), dict(self.bandwidths)
        timed = sorted((speeds[a], a) for a in axes if a in speeds)
        members = math.prod(sizes[a] for a in axes)
        worst, others = 0.0, members
        for speed, axis in timed:
            crossing = others - others // sizes[axis]
            others //= sizes[axis]
            worst = max(worst, num_bytes * crossing / max(members - 1, 1) / speed)
        return worst


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where the solver stops; never by the clock, so that every process stops alike.

    Attributes:
      nodes: Branch-and-bound nodes of each program.
      patterns: Count patterns of the first program.
      more_patterns: Count patterns of a second one, if the gap is still large.
      rel_gap: A plan this close to the bound is good enough.
      gap_us: So is one this close in microseconds.
      large_gap: A gap worth the second program.
    """

    nodes: int = 500
    patterns: int = 800
    more_patterns: int = 2400
    rel_gap: float = 1e-3
    gap_us: float = 0.0
    large_gap: float = 1.5e-2

    def __post_init__(self):
        if not min(dataclasses.astuple(self)) >= 0:
            raise ValueError(f"limits must not be negative, got {self}")


@dataclasses.dataclass(frozen=True)
class Solution:
    """A plan in numbers.

    Attributes:
      counts: For each task the parcels on each free owner, row-major over its
        ``free_axes``; they sum to ``num_parcels``.
      methods: The method of each oriented shape, sorted by shape.
      padded: The shapes whose EMPTY slots are computed, sorted.
      makespan_us: The largest load of a device.
      exchange_us: Time of the exchanges, hidden or not.
      objective_us: ``makespan_us + exposed * exchange_us``.
      lower_bound_us: No plan of this problem has a smaller objective.
      gap: ``(objective_us - lower_bound_us) / objective_us``, 0 when both are 0.
      status: A sentence that says how the plan was found and how good it is.
      solver: What found the plan.
    """

    counts: tuple[tuple[int, ...], ...]
    methods: tuple[tuple[Shape, Method], ...]
    padded: tuple[Shape, ...]
    makespan_us: float
    exchange_us: float
    objective_us: float
    lower_bound_us: float
    gap: float
    status: str
    solver: Solver
