"""Times the jitted optimizer update: AdamW, optax.contrib.muon and dmuon in turn.

    python bench/bench_update.py            # about two minutes on two CPU cores
    python bench/bench_update.py --half     # also half precision, reported only

One process, eight virtual CPU devices, a tree of 56 matrices under FSDP. The updates
take turns, so that a busy machine disturbs all of them alike; read the ratios, which
compare medians of one run, rather than the milliseconds.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax import dmuon
from dmuon_jax.proof import audit

NUM_DEVICES = 8
NUM_LAYERS = 8
# Seven matrices (in, out) per layer; key and value are shared by two query heads each.
LAYER_SHAPES = {
    "query": (384, 384),
    "key": (384, 192),
    "value": (384, 192),
    "out": (384, 384),
    "gate": (384, 1024),
    "up": (384, 1024),
    "down": (1024, 384),
}
BASELINE = "optax.contrib.muon"
RATE = 1e-3
RESULTS = pathlib.Path(__file__).parent / "results"

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": lambda: optax.adamw(RATE),
    BASELINE: lambda: optax.contrib.muon(RATE),
    "dmuon direct float32": lambda: dmuon(RATE, method="direct"),
    "dmuon gram float32": lambda: dmuon(RATE, method="gram"),
}
HALF_OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "dmuon direct bfloat16": lambda: dmuon(
        RATE, method="direct", compute_dtype=jnp.bfloat16
    ),
    "dmuon gram float16": lambda: dmuon(RATE, method="gram", compute_dtype=jnp.float16),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """One optimizer's update; sizes are per device.

    Attributes:
      times_ms: Every timed update.
      median_ms: Their median.
      collectives: Collectives that one compiled update runs.
      collective_bytes: Bytes of their buffers.
      dot_flops: Matrix-multiplication FLOPs of one device.
      compile_s: Seconds to trace and compile.
    """

    times_ms: list[float]
    median_ms: float
    collectives: int
    collective_bytes: int
    dot_flops: float
    compile_s: float


def make_mesh() -> Mesh:
    """Virtual CPU devices along one Auto axis; must run before any use of a device."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_platforms", "cpu")
    return Mesh(jax.devices(), ("fsdp",))


def make_tree(mesh: Mesh, seed: int) -> dict[str, jax.Array]:
    """The 56 matrices, float32, Gaussian, rows over the mesh."""
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    return {
        f"layer{layer}.{name}": jax.device_put(
            rng.normal(size=shape).astype(np.float32), sharding
        )
        for layer in range(NUM_LAYERS)
        for name, shape in LAYER_SHAPES.items()
    }


def compile_update(
    tx: optax.GradientTransformation, grads: Any, params: Any
) -> tuple[Any, Any]:
    """The compiled update and the state to call it with."""
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(grads, state, params).compile()
    return compiled, state


def measure(optimizers: dict[str, Any], repeats: int) -> dict[str, Result]:
    """Compiles every update, then times them in turn."""
    mesh = make_mesh()
    params, grads = make_tree(mesh, 0), make_tree(mesh, 1)
    calls, compile_s = {}, {}
    for name, make in optimizers.items():
        began = time.perf_counter()
        calls[name] = compile_update(make(), grads, params)
        compile_s[name] = time.perf_counter() - began
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, (compiled, state) in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(compiled(grads, state, params))
            if repeat:  # The first round warms up.
                times_ms[name].append(1e3 * (time.perf_counter() - began))
    results = {}
    for name, (compiled, _) in calls.items():
        found = audit(compiled)
        results[name] = Result(
            times_ms=[round(value, 2) for value in times_ms[name]],
            median_ms=round(statistics.median(times_ms[name]), 2),
            collectives=sum(item.times for item in found.collectives),
            collective_bytes=found.collective_bytes,
            dot_flops=found.dot_flops,
            compile_s=round(compile_s[name], 2),
        )
    return results


def format_results(results: dict[str, Result]) -> str:
    """The results as text; the ratio is the baseline's median over this one's."""
    baseline = results[BASELINE].median_ms
    lines = [
        f"{'update':<24}{'median ms':>10}{'min..max':>16}{'speed-up':>10}"
        f"{'collectives':>13}{'MiB/device':>12}{'GFLOP/device':>14}{'compile s':>11}"
    ]
    for name, result in results.items():
        spread = f"{min(result.times_ms):.0f}..{max(result.times_ms):.0f}"
        lines.append(
            f"{name:<24}{result.median_ms:>10.1f}{spread:>16}"
            f"{baseline / result.median_ms:>9.2f}x{result.collectives:>13}"
            f"{result.collective_bytes / 2**20:>12.1f}"
            f"{result.dot_flops / 1e9:>14.2f}{result.compile_s:>11.1f}"
        )
    return "\n".join(lines)


def write_results(path: pathlib.Path, results: dict[str, Result]) -> None:
    """Writes the results and what they were measured with."""
    baseline = results[BASELINE].median_ms
    record = {
        "command": "bench/bench_update.py",
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
        },
        "tree": {"layers": NUM_LAYERS, "layer_shapes": LAYER_SHAPES},
        "speed_up_over_optax": {
            name: round(baseline / result.median_ms, 3)
            for name, result in results.items()
        },
        "results": {name: dataclasses.asdict(value) for name, value in results.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="timed updates of each")
    parser.add_argument("--half", action="store_true", help="also half precision")
    parser.add_argument(
        "--out", type=pathlib.Path, default=RESULTS / "update.json", help="the record"
    )
    arguments = parser.parse_args()
    optimizers = OPTIMIZERS | (HALF_OPTIMIZERS if arguments.half else {})
    results = measure(optimizers, max(1, arguments.repeats))
    print(format_results(results))
    write_results(arguments.out, results)
    print(f"Record: {arguments.out}")


if __name__ == "__main__":
    main()
