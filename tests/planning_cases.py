"""Planning problems for the tests, and a slow evaluation that shares no code."""

import dataclasses
import itertools
import math

import numpy as np

from dmuon_jax.planning.problem import Problem, Task
from dmuon_jax.planning.workloads import load_workload, read_json


@dataclasses.dataclass(frozen=True)
class PowerCost:
    """``time * batch ** power`` for each shape: below 1 batches pay, above they cost."""

    times: tuple[tuple[tuple[int, int], float], ...]
    power: float = 1.0
    gram: float = 2.0

    def time_us(self, shape, batch, method):
        factor = self.gram if method == "gram" else 1.0
        return dict(self.times)[shape] * batch**self.power * factor


@dataclasses.dataclass(frozen=True)
class RandomCost:
    """A random time for each shape, batch and method, by hash of nothing but numbers."""

    seed: int
    power: float = 1.0

    def time_us(self, shape, batch, method):
        rng = np.random.default_rng([self.seed, *shape, batch, len(method)])
        base = np.random.default_rng([self.seed, *shape]).uniform(1, 10)
        return float(base * batch**self.power * rng.uniform(0.8, 1.2))


@dataclasses.dataclass(frozen=True)
class RoughCost:
    """About an H200: FLOPs, memory passes and kernel starts, for *direct* and *gram*."""

    def time_us(self, shape, batch, method):
        s, t = shape
        flops = 15 * s * s * t + 5 * s**3
        if method == "gram":
            flops = 6 * s * s * t + 14 * s**3
        return 30 + batch * (flops / 500e6 + 20 * s * t / 3.5e6)


def single_axis(name, num_devices, cost=None, bytes_per_us=None):
    """A model of the workloads with every matrix sharded over one axis."""
    groups = {}
    for item in load_workload(name).matrices:
        groups.setdefault(item.shape, []).append(item)
    tasks = []
    for shape, items in groups.items():
        sent = 4 * math.prod(shape) * (num_devices - 1) // num_devices
        tasks.append(
            Task(
                name="+".join(item.name for item in items),
                num_parcels=sum(item.count for item in items),
                free_axes=("fsdp",),
                matrices=(tuple(sorted(shape)),),
                slot_bytes=((("fsdp",), sent),),
                parcel_bytes=2 * math.prod(shape),
            )
        )
    if bytes_per_us is None:
        bytes_per_us = 350e3 if num_devices <= 8 else 50e3
    return Problem(
        mesh=(("fsdp", num_devices),),
        tasks=tuple(tasks),
        cost=cost or RoughCost(),
        bandwidths=(("fsdp", bytes_per_us),),
    )


@dataclasses.dataclass(frozen=True)
class FixtureCost:
    """The WALL-X cost fixture, with noise of its own for every measured point."""

    noise: float = 0.0
    seed: int = 0

    def time_us(self, shape, batch, method):
        del method
        row = fixture_rows(self.noise, self.seed)[shape]
        batches, times = zip(*row, strict=True)
        if batch > batches[-1]:
            return times[-1] * batch / batches[-1]
        return float(np.interp(batch, batches, times))


def fixture_rows(noise, seed):
    """Returns ``(batch, time_us)`` by oriented shape."""
    rng = np.random.default_rng(seed)
    table = read_json()["wallx_cost_fixture_ms"]
    rows = {}
    for item in load_workload("wall-x").matrices:
        rows[tuple(sorted(item.shape))] = [
            (int(batch), 1e3 * ms * (1 + noise * rng.uniform(-1, 1)))
            for batch, ms in table[item.name].items()
        ]
    return rows


def compositions(total, parts):
    """Yields every tuple of *parts* counts that sum to *total*."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def plain_objective(problem, counts, methods):
    """Evaluates a plan device by device, straight from the definition."""
    names = [axis for axis, _ in problem.mesh]
    worst = 0.0
    for device in itertools.product(*(range(size) for _, size in problem.mesh)):
        place, number = dict(zip(names, device, strict=True)), {}
        for task, row in zip(problem.tasks, counts, strict=True):
            owner = 0
            for axis in task.free_axes:
                owner = owner * dict(problem.mesh)[axis] + place[axis]
            for shape in task.matrices:
                slots = max(row) if is_padded(problem, shape) else row[owner]
                number[shape] = number.get(shape, 0) + slots
        load = sum(
            problem.cost.time_us(shape, num, methods[shape])
            for shape, num in number.items()
            if num
        )
        worst = max(worst, load)
    exchange = sum(
        max(row) * problem.slot_us(task)
        for task, row in zip(problem.tasks, counts, strict=True)
    )
    return worst + problem.exposed * exchange


def is_padded(problem, shape):
    times = [problem.cost.time_us(shape, 1, m) for m in problem.methods]
    return min(times) < problem.pad_below_us


def brute_force(problem):
    """Returns the smallest objective over all counts and methods."""
    shapes = sorted({shape for task in problem.tasks for shape in task.matrices})
    rows = [
        list(compositions(task.num_parcels, problem.num_owners(task)))
        for task in problem.tasks
    ]
    return min(
        plain_objective(problem, counts, dict(zip(shapes, methods, strict=True)))
        for methods in itertools.product(problem.methods, repeat=len(shapes))
        for counts in itertools.product(*rows)
    )


def random_problem(seed, power, axes=(("x",),)):
    """A tiny problem that brute force can solve; parcels may be split into pieces."""
    rng = np.random.default_rng(seed)
    mesh = (("x", 2), ("y", 2)) if len(axes) > 1 else (("x", int(rng.integers(2, 4))),)
    shapes = [(2, 3), (4, 4), (5, 9)]
    tasks = []
    for number in range(int(rng.integers(1, 4))):
        free = axes[int(rng.integers(len(axes)))]
        sent = int(rng.integers(0, 8))
        tasks.append(
            Task(
                name=f"t{number}",
                num_parcels=int(rng.integers(0, 4)),
                free_axes=free,
                matrices=tuple(
                    shapes[i] for i in rng.integers(0, 3, size=rng.integers(1, 3))
                ),
                slot_bytes=((free, sent),),
            )
        )
    return Problem(
        mesh=mesh,
        tasks=tuple(tasks),
        cost=RandomCost(seed, power),
        methods=("direct",),
        bandwidths=tuple((axis, float(rng.choice([1.0, 3.0]))) for axis, _ in mesh),
        exposed=float(rng.choice([1.0, 0.3])),
    )
