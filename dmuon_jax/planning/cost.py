"""What the owner's work costs: a roofline of a device, or a table of measurements.

Both are cost models in the sense of `problem.CostModel`: a shape, a batch and a method
give microseconds. The numeric type and the kernels are part of the model itself.
"""

import dataclasses
import functools
import itertools
import json
import math
from typing import Any

from dmuon_jax.planning.devices import Device
from dmuon_jax.planning.problem import METHODS, CostModel, Method, Shape

ITEMSIZE: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FORMAT = "dmuon_jax cost table 1"

PASSES = 7
"""Times that a matrix is read or written outside the iteration: unpacked from its
blocks (2), its norm taken (1), cast and normalised (2), packed into blocks (2)."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Equal matrix products of one matrix.

    Attributes:
      num: How many of them.
      num_flops: Floating-point operations of one, two per multiply-add.
      num_elements: Elements that one reads and writes.
    """

    num: int
    num_flops: int
    num_elements: int


def iteration_work(
    shape: Shape, method: Method, steps: int, restarts: int, symmetric: bool
) -> tuple[Work, ...]:
    """Lists the products of a Newton-Schulz iteration.

    The direct form computes ``A = X X'``, ``B = b A + c A A`` and ``a X + B X`` in each
    step. The Gram form works on ``R = X X'`` in ``restarts + 1`` segments: a segment
    starts with ``R`` and ends with ``Q X``; a step computes ``Z = b R + c R R`` and, but
    for the first of a segment, ``Q Z``; and, but for the last, ``R Z`` and ``Z R Z``.

    Args:
      shape: (s, l) with s <= l.
      method: The form.
      steps: Steps in all.
      restarts: Restarts of the Gram form.
      symmetric: Whether kernels compute only half of a symmetric product.
    """
    short, long = shape
    half = 2 if symmetric else 1
    whole, small = short * long, short * short
    gram = Work(1, 2 * small * long // half, whole + small)
    apply = Work(1, 2 * small * long, 2 * whole + small)
    square = Work(1, 2 * small * short // half, 3 * small)
    if method == "direct":
        times = ((gram, steps), (square, steps), (apply, steps))
    else:
        segments = min(restarts + 1, steps)
        squares = steps + 3 * (steps - segments)
        times = ((gram, segments), (square, squares), (apply, segments))
    return tuple(dataclasses.replace(work, num=num) for work, num in times)


def iteration_flops(
    shape: Shape,
    method: Method,
    *,
    steps: int = 5,
    restarts: int = 1,
    symmetric: bool = False,
) -> int:
    """Returns the floating-point operations that orthogonalize one matrix.

    For five steps and one restart: direct ``20 s^2 l + 10 s^3`` and Gram
    ``8 s^2 l + 28 s^3``; with symmetric kernels ``15 s^2 l + 5 s^3`` and
    ``6 s^2 l + 14 s^3``.
    """
    works = iteration_work(shape, method, steps, restarts, symmetric)
    return sum(work.num * work.num_flops for work in works)


@dataclasses.dataclass(frozen=True)
class RooflineCost:
    """Time of the owner's work by arithmetic alone.

    Every product takes the longer of its FLOPs at the device's matrix rate and its
    bytes at the device's memory rate, plus the start of a kernel; the passes around the
    iteration are bytes only. A batch shares the starts.

    Attributes:
      device: Rates and latencies.
      dtype: Type of the iteration.
      steps: Newton-Schulz steps.
      restarts: Restarts of the Gram form.
      symmetric: Whether kernels compute only half of a symmetric product.
    """

    device: Device
    dtype: str = "float16"
    steps: int = 5
    restarts: int = 1
    symmetric: bool = False

    def __post_init__(self):
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"dtype must be one of {sorted(ITEMSIZE)}, got {self.dtype!r}"
            )
        if self.steps < 1 or self.restarts < 0:
            raise ValueError(
                "steps must be at least 1 and restarts at least 0, got "
                f"{self.steps} and {self.restarts}"
            )

    def time_us(self, shape: Shape, batch: int, method: Method) -> float:
        """Returns microseconds for *batch* matrices of *shape*."""
        itemsize, device = ITEMSIZE[self.dtype], self.device
        works = iteration_work(shape, method, self.steps, self.restarts, self.symmetric)
        total = device.kernel_latency_us + device.stream_us(
            batch * PASSES * math.prod(shape) * itemsize
        )
        for work in works:
            longer = max(
                device.matmul_us(batch * work.num_flops, itemsize),
                device.stream_us(batch * work.num_elements * itemsize),
            )
            total += work.num * (device.kernel_latency_us + longer)
        return total


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measurement: *time_us* for *batch* matrices of *shape* by *method*.

    Attributes:
      estimated: Why it was not measured but scaled from a roofline; "" if it was.
    """

    shape: Shape
    method: Method
    batch: int
    time_us: float
    estimated: str = ""

    def __post_init__(self):
        small, large = self.shape
        if not 0 < small <= large:
            raise ValueError(
                f"shape must be oriented (s, l), 0 < s <= l, got {self.shape}"
            )
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {self.method!r}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        if not (self.time_us > 0 and math.isfinite(self.time_us)):
            raise ValueError(
                f"time_us must be positive and finite, got {self.time_us} (at shape "
                f"{self.shape}, batch {self.batch}, method {self.method!r})"
            )


@dataclasses.dataclass(frozen=True)
class TableCost:
    """Measured times, interpolated linearly between measured batches.

    Below the smallest measured batch its time is taken. Above the largest the slope of
    the last two holds on, or the mean time per matrix where there is only one.

    Attributes:
      timings: The measurements, at most one for each shape, method and batch.
      about: What was measured, for people: device, versions, kernels.
    """

    timings: tuple[Timing, ...]
    about: str = ""

    def __post_init__(self):
        keys = [(t.shape, t.method, t.batch) for t in self.timings]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(
                "timings must name each shape, method and batch once, got twice "
                f"{sorted(twice)}"
            )

    @functools.cached_property
    def rows(self) -> dict[tuple[Shape, Method], list[tuple[int, float]]]:
        """The measured ``(batch, time_us)`` of each shape and method, by batch."""
        rows: dict[tuple[Shape, Method], list[tuple[int, float]]] = {}
        for timing in sorted(self.timings, key=lambda t: t.batch):
            pair = (timing.batch, timing.time_us)
            rows.setdefault((timing.shape, timing.method), []).append(pair)
        return rows

    def time_us(self, shape: Shape, batch: int, method: Method) -> float:
        """Returns microseconds for *batch* matrices of *shape*.

        Raises:
          ValueError: *shape* was not measured with *method*.
        """
        short, long = shape
        row = self.rows.get(((short, long), method))
        if row is None:
            raise ValueError(
                f"shape must be one that was measured with {method!r}, got {shape}"
            )
        if batch <= row[0][0]:
            return row[0][1]
        for (low, before), (high, after) in itertools.pairwise(row):
            if batch <= high:
                return before + (after - before) * (batch - low) / (high - low)
        last, time = row[-1]
        if len(row) == 1:
            return time * batch / last
        low, before = row[-2]
        return time + max(time - before, 0.0) * (batch - last) / (last - low)

    def to_json(self) -> str:
        """Returns the table as JSON text."""
        rows = [
            [list(t.shape), t.method, t.batch, t.time_us]
            + ([t.estimated] if t.estimated else [])
            for t in sorted(
                self.timings, key=lambda t: (t.shape, t.method, t.batch, t.time_us)
            )
        ]
        return json.dumps(
            {"format": FORMAT, "about": self.about, "timings": rows}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> "TableCost":
        """Reads what `to_json` wrote.

        Raises:
          ValueError: *text* is no table of this format.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"text must be JSON with format {FORMAT!r}")
        rows, about = data.get("timings"), data.get("about")
        if not isinstance(rows, list) or not isinstance(about, str):
            raise ValueError("text must hold a list 'timings' and a string 'about'")
        return cls(tuple(_timing(row, i) for i, row in enumerate(rows)), about)


def _timing(row: Any, index: int) -> Timing:
    match row:
        case [
            [int(short), int(long)],
            "direct" | "gram" as method,
            int(batch),
            int() | float() as us,
        ]:
            return Timing((short, long), method, batch, float(us))
        case [[int(), int()], str(), int(), int() | float(), str(estimated)]:
            timing = _timing(row[:4], index)
            return dataclasses.replace(timing, estimated=estimated)
    raise ValueError(
        "timings must be rows [[s, l], method, batch, time_us] and, if estimated, the "
        f"reason, got {row} (at {index})"
    )


def source_of(cost: CostModel) -> str:
    """Where the times of a plan come from, in a few words."""
    match cost:
        case RooflineCost():
            return f"roofline of {cost.device.name} in {cost.dtype}"
        case TableCost(about=about):
            return about or "a table of measurements"
    return f"given by a {type(cost).__name__}"
