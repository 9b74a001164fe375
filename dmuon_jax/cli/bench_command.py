"""``dmuon-jax bench``: times the jitted updates on the devices at hand, in turn."""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax.cli.arguments import add_json, add_model, positive, read_model
from dmuon_jax.cli.machine import find_devices
from dmuon_jax.cli.terminal import Terminal, table
from dmuon_jax.muon import dmuon
from dmuon_jax.planning.workloads import Matrices, Workload

SMALL = Workload(
    "small",
    4,
    (
        Matrices("attention", (256, 256), 16),
        Matrices("up", (256, 1024), 8),
        Matrices("down", (1024, 256), 4),
    ),
)
RATE = 1e-3
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(RATE),
    "optax.contrib.muon": lambda: optax.contrib.muon(
        RATE, muon_weight_dimension_numbers=dimension_numbers
    ),
    "dmuon": lambda: dmuon(RATE, muon_weight_dimension_numbers=dimension_numbers),
}


def add_parser(commands) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="time the updates of AdamW, optax.contrib.muon and dmuon here",
        description="Times the jitted update of a tree of matrices, sharded by rows over "
        "all devices of this machine (8 virtual ones on a CPU). The updates take turns; "
        "read the ratios.",
        allow_abbrev=False,
    )
    add_model(parser, required=False)
    add = parser.add_argument
    add(
        "--layers",
        type=positive,
        default=1,
        help="matrices of each weight (default: 1)",
    )
    add("--repeats", type=positive, default=5, help="timed updates (default: 5)")
    add_json(parser)
    parser.set_defaults(run=run)


def dimension_numbers(params: Any) -> Any:
    """Every leaf is a matrix or a stack of matrices."""
    return jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), params
    )


def make_mesh() -> Mesh:
    """All devices along one Auto axis."""
    # Accepted before the first use of a device only, and without effect on accelerators.
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if not number > 1:
        try:
            jax.config.update("jax_num_cpu_devices", 8)
        except RuntimeError:
            pass  # devices are in use, or XLA_FLAGS tells their number
    return Mesh(find_devices(), ("fsdp",))


def make_tree(workload: Workload, layers: int, mesh: Mesh, key: jax.Array) -> Any:
    """Gaussian matrices, rows over the mesh where they divide."""
    leaves = {}
    for item in workload.matrices:
        count = min(layers, item.count // math.prod(item.stack))
        for layer in range(count):
            shape = (*item.stack, *item.shape)
            rows = "fsdp" if shape[-2] % mesh.size == 0 else None
            spec = PartitionSpec(*(None,) * (len(shape) - 2), rows)
            key, here = jax.random.split(key)
            values = jax.random.normal(here, shape, jnp.float32)
            where = NamedSharding(mesh, spec)
            leaves[f"{layer}.{item.name}"] = jax.device_put(values, where)
    return leaves


def time_s(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def measure(
    workload: Workload, layers: int, repeats: int, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Milliseconds of every update of each optimizer, which take turns.

    Calls ``advance`` after each compilation and after each turn.
    """
    mesh = make_mesh()
    params = make_tree(workload, layers, mesh, jax.random.key(0))
    grads = make_tree(workload, layers, mesh, jax.random.key(1))
    calls = {}
    for name, make in OPTIMIZERS.items():
        tx = make()
        state = tx.init(params)
        compiled = jax.jit(tx.update).lower(grads, state, params).compile()
        calls[name] = lambda run=compiled, state=state: run(grads, state, params)
        time_s(calls[name])
        advance()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(1e3 * time_s(call))
        advance()
    return times


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    small = arguments.model is None and arguments.shapes is None
    workload = SMALL if small else read_model(arguments)
    layers = max(arguments.layers, SMALL.layers) if small else arguments.layers
    parts = len(OPTIMIZERS) + arguments.repeats
    with terminal.waiting("Compiling and timing three updates", parts) as advance:
        times = measure(workload, layers, arguments.repeats, advance)
    medians = {name: statistics.median(row) for name, row in times.items()}
    first = jax.devices()[0]
    if arguments.json:
        record = {
            "model": workload.name,
            "layers": layers,
            "device": first.device_kind,
            "num_devices": jax.device_count(),
            "times_ms": times,
            "median_ms": medians,
        }
        terminal.print(json.dumps(record, indent=1))
        return 0
    terminal.print(
        f"{workload.name}, {layers} layers on {jax.device_count()} x {first.device_kind}; "
        f"median of {arguments.repeats} updates"
    )
    base = medians["adamw"]
    rows = [("", "ms", "/ adamw", "spread")]
    for name, row in times.items():
        spread = (max(row) - min(row)) / medians[name]
        rows.append(
            (
                name,
                f"{medians[name]:.2f}",
                f"{medians[name] / base:.2f}",
                f"{spread:.0%}",
            )
        )
    terminal.print(table(rows))
    return 0
