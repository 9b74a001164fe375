"""Plans of public models: objective by solver, proven bound, gap and time.

    PYTHONPATH=. python bench/bench_planning.py             # every model
    PYTHONPATH=. python bench/bench_planning.py --fixture   # WALL-X costs with noise

Every matrix is sharded over one axis; models with experts are also planned on a mesh of
8 by N/8 whose second axis forces the experts' owners. Times are microseconds of
the cost model, not of a device; seconds are processor time of the planner.
"""

import argparse
import math
import resource
import time

import numpy as np

from dmuon_jax.planning import Problem, Task, solve
from dmuon_jax.planning.cost import RooflineCost, TableCost, Timing
from dmuon_jax.planning.devices import device_named
from dmuon_jax.planning.workloads import load_workload, read_json, workload_names

SIZES = (8, 16, 64, 128)
LARGE = {"kimi-k2": (1024,)}
SOLVERS = ("even", "lpt", "greedy", "milp")


def problem_of(name, num_devices, cost, device, experts=1):
    """Returns the model as a planning problem on a (data, expert) mesh."""
    sizes = (("data", num_devices // experts), ("expert", experts))
    links = {}
    span = 1
    for axis, size in reversed(sizes):
        span *= size
        inner = span <= device.devices_per_node
        speed = device.intra_bandwidth if inner else device.inter_bandwidth
        links[axis] = speed * device.link_efficiency / 1e6
    groups = {}
    for item in load_workload(name).matrices:
        stacked = bool(item.stack) and experts > 1
        groups.setdefault((item.shape, stacked), []).append(item)
    tasks = []
    for (shape, stacked), items in groups.items():
        free = ("data",) if stacked else ("data", "expert")
        owners = math.prod(dict(sizes)[axis] for axis in free)
        num = sum(item.count for item in items)
        tasks.append(
            Task(
                name="+".join(item.name for item in items),
                num_parcels=num // experts if stacked else num,
                free_axes=free,
                matrices=(tuple(sorted(shape)),),
                slot_bytes=((free, 4 * math.prod(shape) * (owners - 1) // owners),),
            )
        )
    return Problem(sizes, tuple(tasks), cost, bandwidths=tuple(links.items()))


def report(label, problem):
    """Solves with every solver and prints one row."""
    objectives = {}
    for name in SOLVERS:
        start = time.process_time()
        solution = solve(problem, solver=name)
        objectives[name] = solution.objective_us
    seconds = time.process_time() - start
    cells = " | ".join(f"{objectives[name]:,.0f}" for name in SOLVERS)
    print(
        f"| {label} | {cells} | {solution.lower_bound_us:,.0f} | {solution.gap:.2%} "
        f"| {seconds:.2f} | {solution.solver} |",
        flush=True,
    )
    return solution.gap, seconds


def fixture_cost(noise, seed):
    """Returns the WALL-X cost fixture with uniform noise on every point."""
    rng = np.random.default_rng(seed)
    table = read_json()["wallx_cost_fixture_ms"]
    timings = []
    for item in load_workload("wall-x").matrices:
        for batch, ms in table[item.name].items():
            noisy = 1e3 * ms * (1 + noise * rng.uniform(-1, 1))
            shape = tuple(sorted(item.shape))
            timings.append(Timing(shape, "direct", int(batch), noisy))
    return TableCost(tuple(timings))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names; all by default")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--symmetric", action="store_true", help="symmetric kernels")
    parser.add_argument("--fixture", action="store_true")
    args = parser.parse_args()
    device = device_named(args.device)
    print("| plan | " + " | ".join(SOLVERS) + " | bound | gap | seconds | by |")
    print("|---" * (len(SOLVERS) + 5) + "|")
    rows = []
    if args.fixture:
        for size in (16, 32, 64):
            for seed in range(5):
                cost = fixture_cost(0.2 if seed else 0.0, seed)
                problem = problem_of("wall-x", size, cost, device)
                problem = Problem(
                    problem.mesh,
                    problem.tasks,
                    cost,
                    methods=("direct",),
                    bandwidths=problem.bandwidths,
                )
                rows.append(report(f"wall-x fixture, noise {seed}, {size}", problem))
    else:
        cost = RooflineCost(device, symmetric=args.symmetric)
        for name in args.models or workload_names():
            for size in (*SIZES, *LARGE.get(name, ())):
                rows.append(
                    report(f"{name}, {size}", problem_of(name, size, cost, device))
                )
                if (
                    any(item.stack for item in load_workload(name).matrices)
                    and size > 8
                ):
                    problem = problem_of(name, size, cost, device, size // 8)
                    rows.append(report(f"{name}, 8x{size // 8}", problem))
    worst_gap, most_seconds = (max(column) for column in zip(*rows, strict=True))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nworst gap {worst_gap:.2%}, most seconds {most_seconds:.2f}, ", end="")
    print(f"peak memory {memory:.2f} GiB")


if __name__ == "__main__":
    main()
