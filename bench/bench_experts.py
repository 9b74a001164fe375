"""The update of MoE expert stacks on 32 GPUs, compiled and counted; no GPU needed.

    JAX_PLATFORMS=cpu python bench/bench_experts.py
    python bench/bench_experts.py --print           # the table

Needs the CUDA plugin. Two layers of experts [256, 2560, 2560] and [256, 1280, 2560] on a
mesh (replica 2, data 2, expert 8): parameters ``P("expert", "data", None)``, replicated
over replica, momentum sharded over replica too.
"""

import argparse
import json
import math
import pathlib
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax import dmuon
from dmuon_jax.proof import audit
from dmuon_jax.proof.topology import compile_devices

RESULTS = pathlib.Path(__file__).parent / "results"
SIZES = {"replica": 2, "data": 2, "expert": 8}
SHAPES = {"gate_up": (256, 2560, 2560), "down": (256, 1280, 2560)}
PARAMETER = PartitionSpec("expert", "data", None)
MOMENTUM = PartitionSpec("expert", ("data", "replica"), None)


def rule(params):
    """All leaves are stacks of (reduction, output)."""
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(1, 2), params)


def transform(name: str, shardings, momentum):
    """dmuon or optax's muon."""
    if name == "muon":
        return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=rule)
    return dmuon(
        1e-3,
        muon_weight_dimension_numbers=rule,
        param_shardings=shardings,
        momentum_shardings=momentum,
        compute_dtype=jnp.float16,
        exchange_dtype=jnp.float16,
    )


def compile_update(name: str, mesh: Mesh, layers: int):
    """The compiled update of `layers` layers."""
    shapes = {
        f"layer_{i}": {
            key: jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(mesh, PARAMETER)
            )
            for key, shape in SHAPES.items()
        }
        for i in range(layers)
    }
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    momentum = jax.tree.map(lambda x: NamedSharding(mesh, MOMENTUM), shapes)
    chosen = transform(name, shardings, momentum)

    def place(leaf):
        spec = MOMENTUM if leaf.ndim == 3 else PartitionSpec()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    state = jax.tree.map(place, jax.eval_shape(chosen.init, shapes))
    outputs = (shardings, jax.tree.map(lambda x: x.sharding, state))
    jitted = jax.jit(chosen.update, donate_argnums=(0, 1), out_shardings=outputs)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jitted.lower(shapes, state, shapes).compile()


def commit() -> str:
    """The commit at hand, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def table(records: dict) -> str:
    """What the README shows."""
    rows = [
        "| update of 2 layers | collectives | GiB moved | TFLOP | model ms | of it exposed "
        "| GiB of memory |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, title in (("muon", "`optax.contrib.muon`"), ("dmuon", "dmuon")):
        found = records[name]
        rows.append(
            f"| {title} | {found['collectives']} "
            f"| {found['collective_bytes'] / 2**30:.2f} "
            f"| {found['dot_flops'] / 1e12:.1f} | {found['step_us'] / 1e3:.1f} "
            f"| {found['exposed_us'] / 1e3:.1f} | {found['peak_bytes'] / 2**30:.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--optimizers", nargs="+", default=["dmuon", "muon"])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "experts.json")
    parser.add_argument("--print", action="store_true", help="print the table only")
    arguments = parser.parse_args()
    if arguments.print:
        print(table(json.loads(arguments.out.read_text())))
        return
    devices = compile_devices(arguments.device, math.prod(SIZES.values()))
    mesh = Mesh(np.array(devices).reshape(tuple(SIZES.values())), tuple(SIZES))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    records = {}
    for name in arguments.optimizers:
        started = time.process_time()
        compiled = compile_update(name, mesh, arguments.layers)
        report = audit(compiled, device=arguments.device)
        print(name, report.summary(), "", sep="\n", flush=True)
        record = json.loads(report.to_json())
        counted = (
            "dot_flops",
            "collective_bytes",
            "peak_bytes",
            "step_us",
            "exposed_us",
        )
        records[name] = {key: record[key] for key in counted} | {
            "collectives": len(report.collectives),
            "compile_s": time.process_time() - started,
            "commit": commit(),
            "jax": jax.__version__,
        }
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
