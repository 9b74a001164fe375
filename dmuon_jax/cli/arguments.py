"""Arguments that several commands share: a model, a mesh, a device."""

import argparse
import difflib
import json
import math
import pathlib
from typing import Any, TypeGuard

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
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".webp")

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


def owner_axes_argument(text: str) -> Axes:
    """``data,fsdp`` as axes over which owners are spread: one at least, each once."""
    axes = axes_argument(text)
    if not axes or len(set(axes)) < len(axes):
        raise argparse.ArgumentTypeError(
            f"--owner-axes must name one axis at least, and each once, got {text!r}"
        )
    return axes


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


def check_output(
    what: str, path: pathlib.Path | None, suffixes: tuple[str, ...] = ()
) -> None:
    """Raises ``UsageError`` for a file that cannot be written, before work is done for it."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{what} must name a file, got the folder {path}")
    if not path.parent.is_dir():
        raise UsageError(f"{what} must be in a folder that exists, got {path}")
    if suffixes and path.suffix.lower() not in suffixes:
        raise UsageError(f"{what} must end in one of {', '.join(suffixes)}, got {path}")


def read_model(arguments: argparse.Namespace) -> Workload:
    """The model that ``--model`` or ``--shapes`` names."""
    if arguments.model is not None:
        return load_workload(arguments.model)
    text = read_text(arguments.shapes, "--shapes")
    try:
        matrices = shapes_of(text)
    except ValueError as error:
        raise UsageError(f"--shapes {arguments.shapes}: {error}") from error
    layers = max(item.count // math.prod(item.stack) for item in matrices)
    return Workload(arguments.shapes.stem, layers, matrices)


def shapes_of(text: str) -> tuple[Matrices, ...]:
    """The matrices of a file of shapes.

    Raises:
      ValueError: it is no JSON, or a field is not what it must be; names the field.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the file must be JSON: {error}") from error
    records = data.get("matrices") if isinstance(data, dict) else data
    if not isinstance(data, dict) or not isinstance(records, list) or not records:
        raise ValueError(
            f"the file must hold an object with a list of matrices, got {text.strip():.60}"
        )
    matrices = tuple(matrices_of(x, f"matrices[{i}]") for i, x in enumerate(records))
    names = [item.name for item in matrices]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"name must be another for each of the matrices, got {twice} twice")
    return matrices


def matrices_of(record: Any, where: str) -> Matrices:
    """One entry of a file of shapes."""
    if not isinstance(record, dict):
        raise ValueError(f"each of the matrices must be an object, got {record!r} at {where}")
    fields = ("name", "shape", "count", "stack")
    if unknown := sorted(set(record) - set(fields)):
        raise ValueError(f"fields must be among {', '.join(fields)}, got {unknown} at {where}")

    def wrong(field: str, must: str) -> ValueError:
        value = f"{record[field]!r:.60}" if field in record else "none"
        return ValueError(f"{field} must be {must}, got {value} at {where}")

    name, shape, stack = record.get("name"), record.get("shape"), record.get("stack", [])
    if not isinstance(name, str) or not name:
        raise wrong("name", "a text")
    if not are_sizes(shape) or len(shape) != 2:
        raise wrong("shape", "two whole numbers >= 1")
    if not are_sizes(stack):
        raise wrong("stack", "whole numbers >= 1")
    each = math.prod(stack)
    count = record.get("count", each)
    if not are_sizes([count]) or count % each:
        raise wrong("count", f"a whole number >= 1, a multiple of {each}")
    return Matrices(name, (shape[0], shape[1]), count, tuple(stack))


def are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of whole numbers above zero."""
    return isinstance(value, list) and all(type(x) is int and x > 0 for x in value)


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
