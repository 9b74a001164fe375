"""Model step times of public models on GPU clusters, by optimizer; no GPU needed.

    JAX_PLATFORMS=cpu python bench/bench_scaling.py                 # all, hours
    JAX_PLATFORMS=cpu python bench/bench_scaling.py --models qwen2.5-1.5b --counts 8 64

Needs the CUDA plugin (``pip install 'dmuon_jax[cuda13]'``). Every model is compiled for
FSDP over all devices and, from two nodes on, for HSDP with eight to a node; with and
without clipping by global norm. A row is written as soon as it is known.
"""

import argparse
import json
import pathlib

from dmuon_jax.proof.models import CONFIGS, model_named
from dmuon_jax.proof.simulate import simulate

RESULTS = pathlib.Path(__file__).parent / "results"
PER_NODE = 8


def meshes(count: int) -> list[dict[str, int]]:
    """FSDP, and HSDP where there are several nodes."""
    found = [{"fsdp": count}]
    if count > PER_NODE:
        found.append({"data": count // PER_NODE, "fsdp": PER_NODE})
    return found


def rows(arguments: argparse.Namespace):
    """One record per model, mesh and clipping; a refusal is a record too."""
    for name in arguments.models:
        for count in arguments.counts:
            for mesh in meshes(count):
                for clip in (True, False) if arguments.both_clips else (True,):
                    yield row(name, mesh, clip, arguments)


def row(
    name: str, mesh: dict[str, int], clip: bool, arguments: argparse.Namespace
) -> dict:
    """One record."""
    try:
        found = simulate(
            model_named(name),
            mesh,
            arguments.device,
            sequence=arguments.sequence,
            batch_per_device=arguments.batch,
            optimizers=tuple(arguments.optimizers),
            clip=clip,
        )
    except ValueError as error:
        return {"model": name, "mesh": mesh, "clip": clip, "refused": str(error)}
    print(found.summary(), "\n", flush=True)
    return json.loads(found.to_json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=sorted(CONFIGS))
    parser.add_argument("--counts", nargs="+", type=int, default=[8, 64, 128, 512])
    parser.add_argument("--device", default="h200")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon", "dmuon"])
    parser.add_argument("--both-clips", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "scaling.json")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    records = []
    for record in rows(arguments):
        records.append(record)
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
