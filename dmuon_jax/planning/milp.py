"""The mixed-integer program over count patterns, solved by HiGHS.

A pattern p says how many parcels of each listed task an owner takes. Owners of one kind
g are interchangeable, so the unknowns are how many of them follow each pattern:

    x[g,p]  integer   owners of kind g that follow pattern p
    w[i]    binary    the makespan is at least T[i];  T[0] < T[1] < ...
    z[t,k]  binary    task t has at least k slots,  k = min_slots[t] + 1, ...
    r       real      by how much the makespan exceeds its highest level

    minimise    makespan + sum_t price[t] (min_slots[t] + sum_k z[t,k])
    where       makespan = T[0] + sum_i (T[i] - T[i-1]) w[i] + r
    subject to  sum_p x[g,p]                         = owners[g]         each kind
                sum_gp count[p,t] x[g,p]             = demand[t]         each listed task
                sum_{gp: load[g,p] >= T[i]} x[g,p]  <= owners w[i]       each level i > 0
                sum_{gp: count[p,t] >= k} x[g,p]    <= most[t,k] z[t,k]  each listed task
                sum_gp load[g,p] x[g,p] + owners sand <= owners makespan
                w[i+1] <= w[i],  z[t,k+1] <= z[t,k]

with ``most[t,k] = min(owners, demand[t] // k)`` and ``sand`` the mean load of the tasks
that are not listed, less what their slots gain: ``mean - sum_tk gain[t,k] z[t,k]``.

Loads are rounded down to levels, kinds may be a relaxation and the sand is one, so the
optimum bounds every plan from below; whoever makes a plan of x evaluates it afresh.
Only what beats the known objective is listed: an infeasible program proves that one
optimal.
"""

import dataclasses

import highspy
import numpy as np

from dmuon_jax.planning.model import Model
from dmuon_jax.planning.packing import Packing
from dmuon_jax.planning.problem import Limits

NUM_LEVELS = 64
# HiGHS accepts rows and integers that are wrong by about 1e-6; bounds allow for it.
SAFETY = 1e-5
# What becomes of the C++ exceptions in it.
RAISED = (RuntimeError, ValueError, IndexError, MemoryError)


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What HiGHS answered.

    Attributes:
      num: For each kind int64 [patterns]: owners that follow each pattern; None where
        nothing was found.
      slots: int64 [tasks of the model]: what it paid for.
      bound_ticks: No plan better than the known one has a smaller objective; the known
        objective itself if there is no better plan.
      trouble: What went wrong, in words; empty if nothing did.
    """

    num: tuple[np.ndarray, ...] | None
    slots: np.ndarray
    bound_ticks: int
    trouble: str


class Rows:
    """Collects the rows of a sparse constraint matrix."""

    def __init__(self):
        self.starts, self.index, self.value = [0], [], []
        self.low, self.high = [], []

    def add(self, index, value, low: float, high: float):
        """Adds ``low <= sum_j value[j] * column[index[j]] <= high``."""
        self.index.append(np.asarray(index, np.int32))
        self.value.append(np.broadcast_to(np.asarray(value, float), len(index)))
        self.starts.append(self.starts[-1] + len(index))
        self.low.append(low)
        self.high.append(high)


def solve_packing(
    model: Model, packing: Packing, known: int, floor: int, limits: Limits
) -> Outcome:
    """Solves the program above.

    Args:
      model: The problem.
      packing: The patterns and the sand.
      known: Ticks: objective of the best plan so far.
      floor: Ticks that no plan's makespan, padded buckets aside, is below: T[0].
      limits: Where to stop.
    """
    slots = model.min_slots.copy()
    if any(not len(patterns) for patterns in packing.patterns):
        return Outcome(None, slots, known, "")
    extra = _extra_slots(model, packing)
    lp = _build(model, packing, known, floor, extra)
    try:
        highs = _configured(limits)
        steps = [highs.passModel(lp), highs.run()]
    except RAISED as error:
        return Outcome(None, slots, 0, f"HiGHS failed: {type(error).__name__} {error}")
    status, info = highs.getModelStatus(), highs.getInfo()
    named = highs.modelStatusToString(status)
    if any(step == highspy.HighsStatus.kError for step in steps):
        return Outcome(None, slots, 0, f"HiGHS failed with status {named!r}")
    if status == highspy.HighsModelStatus.kInfeasible:
        return Outcome(None, slots, known, "")
    bound = 0
    if np.isfinite(info.mip_dual_bound):
        bound = min(known, int(known * (info.mip_dual_bound - SAFETY)))
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Outcome(None, slots, bound, f"HiGHS found no plan, status {named!r}")
    value = np.rint(np.array(highs.getSolution().col_value)).astype(np.int64)
    ends = np.cumsum([len(patterns) for patterns in packing.patterns])
    num = tuple(np.split(value[: ends[-1]], ends[:-1]))
    for (task, _), taken in zip(extra, value[-1 - len(extra) : -1], strict=True):
        slots[task] += taken
    return Outcome(num, slots, bound, "")


class Quiet(highspy.Highs):
    """HiGHS without callbacks, whose set-up prints a banner before it can be silenced."""

    def __init__(self):
        super(highspy.Highs, self).__init__()


def _configured(limits: Limits) -> highspy.Highs:
    # A pool of threads that an earlier solve in this process started would make a
    # one-thread solve fail; a reset lets HiGHS start a new one.
    highspy.Highs.resetGlobalScheduler(True)
    highs = Quiet()
    for name, value in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", 0),
        ("mip_max_nodes", limits.nodes),
        ("mip_rel_gap", limits.rel_gap),
        ("mip_abs_gap", 0.0),
    ):
        if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise ValueError(f"HiGHS must know the option {name!r}, got {value}")
    return highs


def _extra_slots(model: Model, packing: Packing) -> list[tuple[int, int]]:
    """Lists the pairs (task, slots) that have a variable z."""
    extra = [(task, k) for task, k, _ in packing.sand.gains]
    for column, task in enumerate(packing.tasks.tolist()):
        if model.slot_ticks[task] > 0:
            most = max(int(p[:, column].max()) for p in packing.patterns)
            extra += [
                (task, k) for k in range(int(model.min_slots[task]) + 1, most + 1)
            ]
    return sorted(extra)


def _levels(packing: Packing, floor: int) -> np.ndarray:
    levels = np.unique(np.concatenate(packing.loads))
    levels = levels[levels > floor]
    if len(levels) > NUM_LEVELS:
        levels = levels[np.arange(NUM_LEVELS) * len(levels) // NUM_LEVELS]
    return np.concatenate([[floor], levels])


def _build(
    model: Model,
    packing: Packing,
    known: int,
    floor: int,
    extra: list[tuple[int, int]],
) -> highspy.HighsLp:
    """Writes the program; all times are in units of *known*."""
    patterns, load = np.concatenate(packing.patterns), np.concatenate(packing.loads)
    levels = _levels(packing, floor)
    level_of = np.searchsorted(levels, load, side="right") - 1
    load = np.where(level_of < 0, load, levels[level_of])
    steps = np.diff(levels) / known
    first_w, first_z = len(load), len(load) + len(steps)
    owners, rows, inf = packing.num_owners, Rows(), highspy.kHighsInf
    start = 0
    for (members, _), own in zip(packing.kinds, packing.patterns, strict=True):
        rows.add(np.arange(start, start + len(own)), 1, len(members), len(members))
        start += len(own)
    for column, demand in enumerate(packing.demand.tolist()):
        index = np.flatnonzero(patterns[:, column])
        rows.add(index, patterns[index, column], demand, demand)
    for i in range(len(steps)):
        index = np.flatnonzero(level_of > i)
        rows.add([*index, first_w + i], [*np.ones(len(index)), -owners], -inf, 0)
        if i:
            rows.add([first_w + i, first_w + i - 1], [1, -1], -inf, 0)
    column_of = {task: column for column, task in enumerate(packing.tasks.tolist())}
    for j, (task, k) in enumerate(extra):
        if task in column_of:
            index = np.flatnonzero(patterns[:, column_of[task]] >= k)
            most = min(owners, int(packing.demand[column_of[task]]) // k)
            rows.add([*index, first_z + j], [*np.ones(len(index)), -most], -inf, 0)
        if j and extra[j - 1][0] == task:
            rows.add([first_z + j, first_z + j - 1], [1, -1], -inf, 0)
    gains = {(task, k): ticks for task, k, ticks in packing.sand.gains}
    gain = np.array([gains.get(pair, 0.0) for pair in extra]) / known
    rows.add(
        np.arange(first_z + len(extra) + 1),
        np.concatenate([load / known / owners, -steps, -gain, [-1.0]]),
        -inf,
        (floor - packing.sand.mean_ticks) / known,
    )
    price = np.array([model.slot_ticks[task] for task, _ in extra]) / known
    sizes = [len(members) for members, _ in packing.kinds]
    limit = np.repeat(sizes, [len(own) for own in packing.patterns])
    cost = np.concatenate([np.zeros(first_w), steps, price, [1.0]])
    offset = (floor + model.least_fixed_ticks()) / known
    return _program(cost, offset, np.append(limit, np.ones(len(cost) - first_w)), rows)


def _program(
    cost: np.ndarray, offset: float, upper: np.ndarray, rows: Rows
) -> highspy.HighsLp:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(rows.low)
    lp.col_cost_, lp.offset_ = cost, offset
    lp.col_lower_, lp.col_upper_ = np.zeros(len(cost)), upper
    lp.integrality_ = [highspy.HighsVarType.kInteger] * (len(cost) - 1) + [
        highspy.HighsVarType.kContinuous
    ]
    lp.row_lower_, lp.row_upper_ = np.array(rows.low), np.array(rows.high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(rows.starts, np.int32)
    lp.a_matrix_.index_ = np.concatenate(rows.index)
    lp.a_matrix_.value_ = np.concatenate(rows.value)
    return lp
