"""``measure_costs``: times of the owners' update on this device, to plan with."""

import collections
import dataclasses
import functools
import itertools
import logging
import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax

from dmuon_jax.kernels.records import Cache, Records, cache_directory
from dmuon_jax.kernels.support import describe_device
from dmuon_jax.planning.batches import measured_batches, plan_batches
from dmuon_jax.planning.cost import ITEMSIZE, RooflineCost, TableCost, Timing
from dmuon_jax.planning.devices import device_of_kind
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.problem import METHODS, Method, Shape
from dmuon_jax.update_time import (
    RUNS,
    Point,
    UpdatePath,
    device_name,
    parse_time,
    record_key,
    time_update_us,
)

BUDGET_S = 60.0
OUT_OF_MEMORY = "out of memory"
OUT_OF_TIME = "out of time"
NOT_NEEDED = "above the largest batch"
FURTHER = 4
"""Beyond the largest batch each row goes on by this factor, as the roofline does."""

log = logging.getLogger("dmuon_jax")


def measure_costs(
    work: Plan | Mapping[Shape, int],
    path: UpdatePath | None = None,
    *,
    method: Method | None = None,
    device: Any = None,
    cache: Cache = True,
    budget_s: float = BUDGET_S,
) -> TableCost:
    """Times of the owners' update, measured on this device, to plan with.

    Timed is all that an owner does with a batch between the two exchanges: a transpose and
    a cast that stand for unpacking blocks, norms, the iteration in its form and with its
    kernels, and the way back. For each shape a few batches are measured; the table
    interpolates between them, and never falls as batches grow. Calls follow one another
    on the device, wall clock, the median of a few runs. Beyond the largest batch a row
    goes on as the roofline does.

    Results are kept for later runs under the kind of device, the versions of jax, jaxlib
    and our kernels, the path, method, shape and batch. A cache that cannot be read or
    written costs one warning and nothing else. Progress goes to the logger "dmuon_jax".

    Not for a traced context. Several processes must plan with *one* table: measure in one
    and share ``to_json()``, or leave it to ``dmuon(costs="measured")``.

    Example:
      >>> from dmuon_jax import measure_costs
      >>> table = measure_costs({(8, 16): 3}, method="direct", cache=False)
      >>> [timing.batch for timing in table.timings]
      [1, 2, 4, 16]

    Args:
      work: a plan, made with any costs: its shapes and batches are measured; or the
        largest batch worth knowing of each shape (s, l), s <= l.
      path: how owners update; None: the dtypes of the plan, else of the platform.
      method: "direct" or "gram"; None: both, but direct alone in bfloat16.
      device: a ``jax.Device``; None: the default device.
      cache: where results are kept: True for the user's folder
        (``$XDG_CACHE_HOME/dmuon_jax`` or ``~/.cache/dmuon_jax``), a folder, or False.
      budget_s: no timing is begun that would end later than this many seconds after the
        first. What is left out, or does not fit into memory, is the roofline's time scaled
        by what was measured; ``Timing.estimated`` and ``about`` say so.

    Returns:
      A table for ``dmuon(costs=...)``, ``plan_owners(costs=...)`` or ``plan --costs``.

    Raises:
      ValueError, TypeError: wrong arguments.
      RuntimeError: the update fails, for another reason than memory.
    """
    if method not in (None, *METHODS):
        raise ValueError(f"method must be None or one of {METHODS}, got {method!r}")
    if not budget_s >= 0:
        raise ValueError(f"budget_s must be at least 0, got {budget_s}")
    batches = plan_batches(work) if isinstance(work, Plan) else check_batches(work)
    device = default_device() if device is None else device
    target = describe_device(device.platform, device.device_kind, None)
    path = plan_path(work) if path is None else path
    path = path.on(target.platform)
    if method is not None:
        methods = (method,)
    else:
        methods = ("direct",) if path.compute_dtype == "bfloat16" else METHODS
    # The width of an element is what a roofline needs to know of complex numbers.
    roofline = RooflineCost(
        device_of_kind(target.platform, target.kind), str(path.compute_dtype), path.steps
    )
    points = ordered_points(batches, methods, roofline)
    bench = Bench(path, device, roofline, budget_s)
    with Records(cache_directory(cache)) as records:
        bench.run(points, records)
    return bench.table(points)


def check_batches(work: Any) -> dict[Shape, int]:
    """``work`` as plain integers.

    Raises:
      TypeError: it is no mapping.
      ValueError: a shape is not oriented, or a batch not positive.
    """
    if not isinstance(work, Mapping):
        raise TypeError(f"work must be a Plan or a mapping, got {type(work).__name__}")
    for shape, batch in work.items():
        if batch < 1:
            raise ValueError(f"work must hold batches >= 1, got {batch} at {shape}")
        Timing(tuple(shape), "direct", batch, 1.0)  # refuses other shapes
    return {(int(short), int(long)): int(n) for (short, long), n in work.items()}


def plan_path(work: Plan | Mapping[Shape, int]) -> UpdatePath:
    """The path with the dtypes of most of a plan's buckets and groups."""
    if not isinstance(work, Plan) or not work.buckets:
        return UpdatePath()
    computed = collections.Counter(bucket.compute_dtype for bucket in work.buckets)
    moved = collections.Counter(group.exchange_dtype for group in work.groups)
    compute_dtype, exchange_dtype = (
        name if name in ITEMSIZE else None
        for counter in (computed, moved)
        for name, _ in counter.most_common(1)
    )
    return UpdatePath(compute_dtype, exchange_dtype)


def default_device() -> Any:
    """The device that a program without a mesh runs on."""
    config: Any = jax.config  # whose options exist at run time only
    named = config.jax_default_device
    if named is None or isinstance(named, str):
        return jax.local_devices(backend=named)[0]
    return named


def ordered_points(
    batches: Mapping[Shape, int], methods: tuple[Method, ...], roofline: RooflineCost
) -> list[Point]:
    """What to time, the most telling first, as time may not suffice for all.

    The largest batch of each shape, then one matrix, then the others; what takes longest
    first.
    """

    def rank(point: Point) -> tuple:
        largest = measured_batches(batches[point.shape])[-1]
        order = 0 if point.batch == largest else 1 if point.batch == 1 else 2
        return order, -roofline_us(roofline, point), point.shape, point.method

    points = [
        Point(shape, method, batch)
        for shape, number in batches.items()
        for method in methods
        for batch in measured_batches(number)
    ]
    return sorted(points, key=rank)


def roofline_us(roofline: RooflineCost, point: Point) -> float:
    return roofline.time_us(point.shape, point.batch, point.method)


class Bench:
    """Times points on one device until its budget ends."""

    def __init__(
        self,
        path: UpdatePath,
        device: Any,
        roofline: RooflineCost,
        budget_s: float,
    ):
        self.path = path
        self.device = device
        self.roofline = roofline
        self.budget_s = budget_s
        self.measured: dict[Point, float] = {}
        self.missing: dict[Point, str] = {}

    def run(self, points: list[Point], records: Records) -> None:
        """Times the ``points`` that ``records`` does not know, and keeps the results."""
        for point in points:
            key = record_key(point, self.path, self.device)
            found = records.read(key, functools.partial(parse_time, point))
            if found is not None:
                self.measured[point] = found
        unknown = [point for point in points if point not in self.measured]
        if unknown:
            log.warning(
                "dmuon_jax: timing %d batches on %s, up to about %.0f s; %s",
                len(unknown),
                device_name(self.device),
                self.budget_s,
                kept_where(records.directory),
            )
        started = time.perf_counter()
        for number, point in enumerate(unknown, 1):
            left_s = self.budget_s - (time.perf_counter() - started)
            result = self.try_point(point, left_s)
            log.info("[%d/%d] %s: %s", number, len(unknown), point, result)
            if point in self.measured:
                key = record_key(point, self.path, self.device)
                records.write(key, {"time_us": self.measured[point]})

    def try_point(self, point: Point, left_s: float) -> str:
        """Times one point if time and memory suffice; says what came of it."""
        expected_s = (1 + RUNS) * self.scaled_us(point) / 1e6
        if expected_s > left_s or left_s <= 0:
            self.missing[point] = OUT_OF_TIME
        else:
            try:
                self.measured[point] = time_update_us(point, self.path, self.device)
                return f"{self.measured[point]:.1f} us"
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self.missing[point] = OUT_OF_MEMORY
        return self.missing[point]

    def scaled_us(self, point: Point) -> float:
        """The roofline's time by the ratio found for the same matrices, else for any."""
        ratios: dict[bool, list[float]] = {True: [], False: []}
        for other, time_us in self.measured.items():
            same = (other.shape, other.method) == (point.shape, point.method)
            ratios[same].append(time_us / roofline_us(self.roofline, other))
        found = ratios[True] or ratios[False] or [1.0]
        return roofline_us(self.roofline, point) * statistics.median(found)

    def table(self, points: list[Point]) -> TableCost:
        """All points, estimated where they are missing, never falling with the batch."""
        rows = sorted(points, key=lambda p: (p.shape, p.method, p.batch))
        timings = []
        for _, row in itertools.groupby(rows, key=lambda p: (p.shape, p.method)):
            longest = 0.0
            for point in row:
                why = "" if point in self.measured else self.missing[point]
                time_us = self.scaled_us(point) if why else self.measured[point]
                longest = max(longest, time_us)
                where = (point.shape, point.method, point.batch)
                timings.append(Timing(*where, longest, why))
            # Small batches may all take as long as one: what comes after follows the
            # roofline, lest a table end level.
            beyond = dataclasses.replace(point, batch=FURTHER * point.batch)
            ratio = longest / roofline_us(self.roofline, point)
            time_us = max(longest, ratio * roofline_us(self.roofline, beyond))
            where = (beyond.shape, beyond.method, beyond.batch)
            timings.append(Timing(*where, time_us, NOT_NEEDED))
        return TableCost(tuple(timings), self.about(len(points)))

    def about(self, number: int) -> str:
        """What was measured, where and how, and what was not."""
        path = self.path
        text = (
            f"measured on {device_name(self.device)}, jax {jax.__version__}, "
            f"{path.compute_dtype}, blocks in {path.exchange_dtype}, {path.steps} steps"
        )
        if self.missing:
            reasons = collections.Counter(self.missing.values())
            listed = ", ".join(f"{n} {why}" for why, n in sorted(reasons.items()))
            text += (
                f"; {len(self.missing)} of {number} times are the roofline's, scaled "
                f"({listed})"
            )
        return text


def kept_where(directory: pathlib.Path | None) -> str:
    return "not kept" if directory is None else f"kept in {directory}"
