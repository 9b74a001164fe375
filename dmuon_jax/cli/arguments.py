"""Arguments that several commands share: a model, a mesh, a device."""

import argparse
import difflib
import json
import math
import pathlib
from typing import Any

from dmuon_jax.cli.terminal import UsageError
from dmuon_jax.matrices import Axes, MeshShape
from dmuon_jax.planning.clusters import Placement
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.workloads import (
    Matrices,
    Workload,
    load_workload,
    workload_names,
)

MOST_DEVICES = 65536

SHAPES_HELP = """JSON file of weight matrices:
{"matrices": [{"name": "up", "shape": [4096, 14336], "count": 32},
{"name": "experts", "shape": [2048, 1408], "count": 1664, "stack": [64]}]}"""


def one_of(names: Any, what: str):
    """A type for argparse: one of ``names``, whatever its case."""

    def convert(text: str) -> str:
        if text.lower() in names:
            return text.lower()
        near = difflib.get_close_matches(text.lower(), names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(
            f"{what} must be one of {', '.join(sorted(names))}, got {text!r}{hint}"
        )

    return convert


def mesh_argument(text: str) -> MeshShape:
    """``data=16,fsdp=8`` as a mesh."""
    names, sizes = [], []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip().isidentifier() or not size.strip().isdigit():
            raise argparse.ArgumentTypeError(
                f"--mesh must be like data=16,fsdp=8, got {text!r}"
            )
        names.append(name.strip())
        sizes.append(int(size))
    try:
        mesh = MeshShape(tuple(names), tuple(sizes))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 1 <= mesh.num_devices <= MOST_DEVICES:
        raise argparse.ArgumentTypeError(
            f"--mesh must have 1 to {MOST_DEVICES} devices, got {text!r}"
        )
    return mesh


def axes_argument(text: str) -> Axes:
    """``data,fsdp`` as axes; an empty text is none."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds ``--model`` and ``--shapes``."""
    group = parser.add_mutually_exclusive_group(required=required)
    names = workload_names()
    group.add_argument(
        "--model",
        type=one_of(names, "--model"),
        metavar="NAME",
        help=f"a public model: {', '.join(names)}",
    )
    group.add_argument("--shapes", type=pathlib.Path, metavar="FILE", help=SHAPES_HELP)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Adds ``--mesh`` and ``--device``."""
    parser.add_argument(
        "--mesh",
        type=mesh_argument,
        default=MeshShape(("fsdp",), (8,)),
        metavar="AXIS=N,...",
        help="sizes of the mesh axes, the last within a node (default: fsdp=8)",
    )
    parser.add_argument(
        "--device",
        type=one_of(tuple(DEVICES), "--device"),
        default="h200",
        metavar="NAME",
        help=f"one of {', '.join(DEVICES)} (default: h200)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def read_text(path: pathlib.Path, what: str) -> str:
    """The text of a file; one sentence if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(
            f"{what} must be a readable file: {path} ({reason})"
        ) from error


def read_model(arguments: argparse.Namespace) -> Workload:
    """The model that ``--model`` or ``--shapes`` names."""
    if arguments.model is not None:
        return load_workload(arguments.model)
    text = read_text(arguments.shapes, "--shapes")
    try:
        data = json.loads(text)
        matrices = tuple(matrices_of(record) for record in data["matrices"])
    except json.JSONDecodeError as error:
        raise UsageError(
            f"--shapes must be JSON: {arguments.shapes}: {error}"
        ) from error
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"--shapes must hold a list 'matrices' of name, shape and count: "
            f"{arguments.shapes} ({type(error).__name__}: {error})"
        ) from error
    if not matrices:
        raise UsageError(f"--shapes must hold matrices, got none in {arguments.shapes}")
    layers = max(item.count // math.prod(item.stack) for item in matrices)
    return Workload(arguments.shapes.stem, layers, matrices)


def matrices_of(record: dict[str, Any]) -> Matrices:
    """One entry of a file of shapes."""
    item = Matrices(
        record["name"],
        tuple(record["shape"]),
        record.get("count", math.prod(record.get("stack", ()))),
        tuple(record.get("stack", ())),
    )
    sizes = (*item.shape, item.count, *item.stack)
    whole = all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or len(item.shape) != 2 or item.count % math.prod(item.stack):
        raise UsageError(
            "shape must be two sizes and count a multiple of the stack's product, all "
            f"whole numbers >= 1, got {record}"
        )
    return item


def placement(arguments: argparse.Namespace, model: Workload) -> Placement:
    """Where parameters lie: FSDP axes as named, or the one called fsdp, or the only one."""
    mesh = arguments.mesh
    expert = arguments.expert_axis
    if expert is None:
        expert = ("expert",) if "expert" in mesh.names else ()
    if expert and not any(item.stack for item in model.matrices):
        raise UsageError(
            f"an expert axis must be for a model with experts, got {', '.join(expert)} for "
            "one without"
        )
    fsdp = arguments.fsdp_axis
    if fsdp is None:
        rest = [n for n in mesh.names if n not in (*expert, *arguments.momentum_axis)]
        fsdp = ("fsdp",) if "fsdp" in rest else tuple(rest)
        if len(fsdp) > 1:
            raise UsageError(
                "--fsdp-axis must name the axes that shard each matrix where none is "
                f"called fsdp, got the mesh axes {', '.join(mesh.names)}"
            )
    return Placement(mesh, fsdp, expert, arguments.momentum_axis, arguments.scan)
