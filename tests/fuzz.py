"""Random leaves, meshes, specs, dimension numbers and splits.

``python -m tests.fuzz --leaves 10000`` runs as many as asked for, and prints what failed.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import math
import random
import time
import unittest.mock
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from optax.contrib import MuonDimensionNumbers as Dims

from dmuon_jax import Plan, Split, dmuon
from dmuon_jax.matrices import Leaf, MeshShape
from dmuon_jax.owners import map_owners
from dmuon_jax.planning import build
from dmuon_jax.planning.buffers import Route, Sharing
from dmuon_jax.planning.model import build_model
from dmuon_jax.planning.problem import Problem, Solution
from dmuon_jax.scales import restored
from dmuon_jax.shardings import partition_spec
from dmuon_jax.split import matrix_axes, pieces_of
from tests.references import JORDAN, matrices, relative, textbook_newton_schulz

MESHES = (
    (("x",), (8,)),
    (("a", "b"), (2, 4)),
    (("a", "b"), (4, 2)),
    (("a", "b", "c"), (2, 2, 2)),
    (("a", "one", "b"), (4, 1, 2)),
    (("one", "a", "b", "c"), (1, 2, 2, 2)),
    (("x",), (3,)),
    (("a", "b"), (2, 3)),
)
PER_TREE = 25
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiler options: these programs run once."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One leaf.

    Attributes:
      shape: its shape.
      rule: its ``MuonDimensionNumbers`` or ``Split``.
      spec_in: mesh axes of each dimension of the momentum.
      spec_out: likewise of the parameter.
    """

    shape: tuple[int, ...]
    rule: Dims | Split
    spec_in: tuple[tuple[str, ...], ...]
    spec_out: tuple[tuple[str, ...], ...]


def random_spec(rng, mesh: MeshShape, ndim: int):
    """Mesh axes spread over dimensions; some axes are left out."""
    names = list(mesh.names)
    rng.shuffle(names)
    spec = [[] for _ in range(ndim)]
    for name in names:
        dim = rng.randrange(ndim + 1)
        if dim < ndim:
            spec[dim].append(name)
    return tuple(tuple(axes) for axes in spec)


def random_case(rng, mesh: MeshShape) -> Case:
    """A leaf that must be updated rightly."""
    ndim = rng.choice([2, 2, 3, 3, 4])
    axes = list(range(ndim))
    rng.shuffle(axes)
    ins = rng.randint(1, min(2, ndim - 1))
    outs = rng.randint(1, min(2, ndim - ins))
    spec_out = random_spec(rng, mesh, ndim)
    spec_in = random_spec(rng, mesh, ndim) if rng.random() < 0.6 else spec_out
    most = {2: 6, 3: 3, 4: 2}[ndim]
    shape = tuple(
        math.lcm(mesh.size(a), mesh.size(b)) * rng.randint(1, most)
        for a, b in zip(spec_in, spec_out, strict=True)
    )
    signed = [axis - ndim if rng.random() < 0.3 else axis for axis in axes]
    dims = Dims(tuple(signed[:ins]), tuple(signed[ins : ins + outs]))
    rule = dims if rng.random() < 0.7 else random_split(rng, shape, dims)
    return Case(shape, rule, spec_in, spec_out)


def random_split(rng, shape, dims) -> Split:
    axis = rng.choice(["reduction", "output"])
    size = math.prod(shape[a] for a in (dims[0] if axis == "reduction" else dims[1]))
    if rng.random() < 0.5:
        parts = rng.choice([n for n in (1, 2, 3, 4) if size % n == 0])
        return Split(parts, dims, axis, interleaved=rng.random() < 0.5)
    cuts = sorted(rng.sample(range(1, size), min(size - 1, rng.randint(0, 2))))
    parts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))
    return Split(parts, dims, axis)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Leaves on one mesh."""

    mesh: MeshShape
    devices: Mesh
    cases: tuple[Case, ...]
    owner_axes: tuple[str, ...]

    def shardings(self, way: str) -> dict[str, NamedSharding]:
        """By name; ``way`` is "in" (momentum) or "out" (parameters)."""
        return {
            f"leaf{i}": NamedSharding(
                self.devices,
                partition_spec(case.spec_in if way == "in" else case.spec_out),
            )
            for i, case in enumerate(self.cases)
        }


def random_tree(seed: int, count: int = PER_TREE) -> Tree:
    rng = random.Random(seed)
    names, sizes = rng.choice(MESHES)
    mesh = MeshShape(names, sizes)
    kind = rng.choice([AxisType.Auto, AxisType.Explicit])
    grid = np.array(jax.devices()[: mesh.num_devices]).reshape(sizes)
    cases = [random_case(rng, mesh)]
    while len(cases) < count:
        # Equal leaves travel together.
        again = rng.random() < 0.6
        cases.append(rng.choice(cases) if again else random_case(rng, mesh))
    return Tree(
        mesh,
        Mesh(grid, names, axis_types=(kind,) * len(names)),
        tuple(cases),
        tuple(name for name in names if rng.random() < 0.8),
    )


@dataclasses.dataclass(frozen=True)
class FlatCost:
    """Costs that do not matter."""

    def time_us(self, shape, batch, method):
        return float(batch)


def random_owners(problem: Problem, **how: object) -> Solution:
    """In the planner's place: any owners that are allowed, most of them unwise."""
    rng = random.Random(len(problem.tasks))
    sizes = dict(problem.mesh)
    counts = []
    for task in problem.tasks:
        owners = math.prod(sizes[name] for name in task.free_axes)
        few = rng.sample(range(owners), rng.randint(1, owners))
        chosen = collections.Counter(rng.choices(few, k=task.num_parcels))
        counts.append(tuple(chosen[owner] for owner in range(owners)))
    shapes = sorted({shape for task in problem.tasks for shape in task.matrices})
    return Solution(
        counts=tuple(counts),
        methods=tuple((shape, problem.methods[0]) for shape in shapes),
        padded=(),
        makespan_us=0.0,
        exchange_us=0.0,
        objective_us=0.0,
        lower_bound_us=0.0,
        gap=0.0,
        status="random",
        solver="even",
    )


def as_they_come(problem: Problem, solution: Solution, routes: Sequence[Route]):
    """In the place of ``share_buffers``: owners stay where they are."""
    counts = tuple(np.array(row, np.int64) for row in solution.counts)
    return Sharing(build_model(problem), (), tuple(routes), counts)


@contextlib.contextmanager
def without_planner():
    """A context in which owners are random."""
    patch = unittest.mock.patch.object
    with patch(build, "solve", random_owners), patch(build, "share_buffers", as_they_come):
        yield


def make_leaf(index: int, case: Case) -> Leaf:
    path = f"leaf{index}"
    reduction, output = matrix_axes(case.rule, len(case.shape), path)
    return Leaf(
        path=path,
        shape=case.shape,
        dtype="float32",
        reduction_axes=reduction,
        output_axes=output,
        spec_in=case.spec_in,
        spec_out=case.spec_out,
        pieces=pieces_of(case.rule, case.shape, path),
    )


def round_trip(tree: Tree, exchange_dtype: str | None) -> list[str]:
    """``from_owners(to_owners(x)) == x`` bit for bit; returns what differs."""
    leaves = [make_leaf(i, case) for i, case in enumerate(tree.cases)]
    settings = build.Settings(
        tree.owner_axes, FlatCost(), exchange_dtype=exchange_dtype
    )
    with without_planner():
        plan = build.make_plan(leaves, tree.mesh, settings)
    again = Plan.from_json(plan.to_json())
    wrong = [] if again == plan and hash(again) == hash(plan) else ["plan and its JSON"]
    # Integers below 2^11: float16 holds them, also when divided by a power of two.
    host = [
        ((np.arange(math.prod(case.shape)) + i) % 2039).astype(np.float32)
        for i, case in enumerate(tree.cases)
    ]
    host = [x.reshape(case.shape) for x, case in zip(host, tree.cases, strict=True)]
    mesh = tree.devices
    arrays = [
        jax.device_put(x, NamedSharding(mesh, partition_spec(item.leaf.spec_in)))
        for x, item in zip(host, plan.layouts, strict=True)
    ]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def there_and_back(*arrays):
        return map_owners(lambda x, e, b, o: restored(x, e), arrays, plan, mesh)

    for i, y in enumerate(there_and_back(*arrays)):
        want = NamedSharding(mesh, partition_spec(tree.cases[i].spec_out))
        if not np.array_equal(np.asarray(y), host[i]):
            wrong.append(f"values of {tree.cases[i]} on {tree.mesh}")
        if not y.sharding.is_equivalent_to(want, y.ndim):
            wrong.append(f"sharding of {tree.cases[i]} on {tree.mesh}")
    return wrong


def update(tree: Tree, method: str) -> list[str]:
    """One step of ``dmuon`` against NumPy; returns what differs."""
    rng = np.random.default_rng(0)
    rules = {f"leaf{i}": case.rule for i, case in enumerate(tree.cases)}
    grads = {
        f"leaf{i}": rng.normal(size=case.shape).astype(np.float32)
        for i, case in enumerate(tree.cases)
    }
    shardings = tree.shardings("out")
    tx = dmuon(
        1.0,
        ns_steps=1,
        method=method,
        muon_weight_dimension_numbers=rules,
        momentum_shardings=tree.shardings("in"),
        param_shardings=shardings,
        owner_axes=tree.owner_axes,
    )
    params = jax.device_put(grads, shardings)
    with without_planner():
        step = jax.jit(tx.update, compiler_options=QUICK)
        updates, _ = step(params, tx.init(params), params)
    wrong = []
    for i, case in enumerate(tree.cases):
        name = f"leaf{i}"
        if relative(updates[name], -reference(grads[name], case.rule)) > 1e-4:
            wrong.append(f"update of {case} on {tree.mesh}")
        if not updates[name].sharding.is_equivalent_to(
            shardings[name], len(case.shape)
        ):
            wrong.append(f"sharding of the update of {case} on {tree.mesh}")
    return wrong


def reference(x, rule):
    """One Newton-Schulz step and the shape scale of each part, in float64."""
    dims = rule.dimension_numbers if isinstance(rule, Split) else rule
    stack, undo = matrices(np.asarray(x, np.float64), dims)
    result = np.zeros_like(stack)
    for index in cuts(stack.shape, rule):
        for target, part in zip(result[index], stack[index], strict=True):
            factor = math.sqrt(max(1, part.shape[1] / part.shape[0]))
            target[...] = factor * textbook_newton_schulz(part, (JORDAN,))
    return undo(result)


def cuts(shape, rule):
    """Indices of ``[batch, fan_in, fan_out]``, one for each part."""
    if not isinstance(rule, Split):
        return [(slice(None),) * 3]
    size = shape[1] if rule.axis == "reduction" else shape[2]
    if rule.interleaved:
        ranges = [slice(i, None, rule.parts) for i in range(rule.parts)]
    else:
        parts = rule.parts
        if isinstance(parts, int):
            parts = (size // parts,) * parts
        ends = np.cumsum(parts)
        ranges = [slice(b - a, b) for a, b in zip(parts, ends, strict=True)]
    whole = slice(None)
    return [
        (whole, r, whole) if rule.axis == "reduction" else (whole, whole, r)
        for r in ranges
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after")
    parser.add_argument("--updates", type=int, default=10, help="a full update each N")
    options = parser.parse_args()
    start, done, failures = time.monotonic(), 0, 0
    seed = options.first
    while done < options.leaves and time.monotonic() - start < options.seconds:
        tree = random_tree(seed)
        try:
            wrong = round_trip(tree, "float16" if seed % 2 else None)
            if seed % options.updates == 0:
                wrong += update(tree, "gram" if seed % 4 else "direct")
        except jax.errors.JaxRuntimeError as error:
            wrong = [f"program on {tree.mesh}: {str(error).splitlines()[0]}"]
        for line in wrong:
            print(f"seed {seed}: wrong {line}", flush=True)
        done, failures, seed = done + len(tree.cases), failures + len(wrong), seed + 1
        jax.clear_caches()
    seconds = time.monotonic() - start
    print(f"{done} leaves in {seconds:.0f} s: {failures} wrong")


if __name__ == "__main__":
    main()
