"""``dmuon-jax doctor``: what is here, what would run, what is missing."""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from typing import Any

import jax

from dmuon_jax.cli.arguments import add_json
from dmuon_jax.cli.machine import find_devices
from dmuon_jax.cli.terminal import Terminal
from dmuon_jax.kernels import tune
from dmuon_jax.kernels.records import can_be_written, contents, default_directory
from dmuon_jax.kernels.select import Problem, choose
from dmuon_jax.kernels.support import target_device
from dmuon_jax.planning import Problem as PlanningProblem
from dmuon_jax.planning import Task, solve
from dmuon_jax.planning.build import COMPUTE_DTYPE
from dmuon_jax.planning.cost import RooflineCost
from dmuon_jax.planning.devices import DEVICES, device_of_kind

NEEDED = ("jax", "jaxlib", "optax", "numpy", "highspy")
OPTIONAL = {
    "flax": "the demo: pip install 'dmuon_jax[demo]'",
    "matplotlib": "pictures: pip install matplotlib",
    "orbax-checkpoint": "the demo's checkpoints: pip install 'dmuon_jax[demo]'",
}
CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
PROBES = ((64, 64), (1024, 4096), (4096, 14336))
COLORS = {"ok": "green", "note": "yellow", "missing": "red"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      name: what was looked at.
      state: "ok", "note" (works, could be better) or "missing" (needed).
      detail: what was found, and what to do.
    """

    name: str
    state: str
    detail: str


def add_parser(commands) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="devices, versions, kernels that would run, what is missing",
        description="Says what is installed here and what dmuon would do with it; exits "
        "with 1 if something that it needs is missing.",
        allow_abbrev=False,
    )
    add_json(parser)
    parser.set_defaults(run=run)


def version(package: str) -> str | None:
    """Installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages() -> Iterator[Finding]:
    """Versions of what is needed and of what helps."""
    yield Finding("python", "ok", platform.python_version())
    for name in NEEDED:
        found = version(name)
        if found is None:
            yield Finding(name, "missing", f"pip install {name}")
        else:
            yield Finding(name, "ok", found)
    for name, why in OPTIONAL.items():
        found = version(name)
        yield Finding(name, "ok" if found else "note", found or f"not here; for {why}")


def plugins() -> Iterator[Finding]:
    """What can compile for GPUs, present or not."""
    found = [f"{name} {version(name)}" for name in CUDA_PLUGINS if version(name)]
    if found:
        yield Finding("CUDA plugin", "ok", f"{', '.join(found)}; simulate can use it")
    else:
        yield Finding(
            "CUDA plugin",
            "note",
            "not here; to run on, or simulate, NVIDIA GPUs: pip install "
            "'dmuon_jax[cuda13]' (or cuda12)",
        )


def devices() -> Iterator[Finding]:
    """Devices, and what the planner takes them for."""
    try:
        found = find_devices()
    except NotImplementedError as error:
        yield Finding("devices", "missing", str(error))
        return
    first = found[0]
    kind = device_of_kind(target_device().platform, first.device_kind)
    text = f"{len(found)} x {first.device_kind} ({first.platform})"
    if jax.process_count() > 1:
        text += f" in {jax.process_count()} processes"
    state = "note" if first.platform == "cpu" else "ok"
    hint = "; no accelerator is used" if state == "note" else ""
    yield Finding("devices", state, f"{text}; planned as {kind.name}{hint}")
    yield from kernels()


def kernels() -> Iterator[Finding]:
    """The implementation that would be chosen for a few shapes."""
    device = target_device()
    dtype = COMPUTE_DTYPE.get(device.platform, "float32")
    folder = default_directory()
    table = None if folder is None else tune.table_path(folder, device.kind)
    verdicts = None
    if table is not None and table.exists():
        try:
            verdicts = tune.load(table)
        except (OSError, ValueError) as error:
            yield Finding("verdicts", "note", f"{table} is ignored: {error}")
    chosen: dict[str, list[str]] = {}
    for short, long in PROBES:
        choice = choose(Problem("gram", 4, short, long, dtype), verdicts)
        text = f"{choice.implementation} in {dtype} ({choice.reason})"
        chosen.setdefault(text, []).append(f"{short}x{long}")
    for text, shapes in chosen.items():
        yield Finding("kernels", "ok", f"{', '.join(shapes)}: {text}")
    if verdicts is not None:
        yield Finding("verdicts", "ok", str(table))
    elif device.platform == "gpu":
        yield Finding("verdicts", "note", "not measured: dmuon-jax tune --model ...")


def solver() -> Iterator[Finding]:
    """Whether HiGHS solves a small plan."""
    cost = RooflineCost(DEVICES["h200"])
    tasks = tuple(
        Task(f"probe {size}", 5, ("fsdp",), ((size, 2 * size),), (), 4 * size * size)
        for size in (512, 768, 1024)
    )
    solution = solve(PlanningProblem((("fsdp", 3),), tasks, cost))
    yield Finding("planner", "ok", f"{solution.status} (15 matrices, 3 owners)")


def caches() -> Iterator[Finding]:
    """Where measurements and compiled programs are kept."""
    kept = default_directory()
    number, size = contents(kept)
    where = "nowhere, there is no home" if kept is None else str(kept)
    found = f"{number} entries, {size / 1024:.1f} KiB in {where}"
    if kept is None or can_be_written(kept):
        yield Finding("measurements", "ok", found)
    else:
        why = "it cannot be written, so that nothing new is kept (XDG_CACHE_HOME names another)"
        yield Finding("measurements", "note", f"{found}; {why}")
    config: Any = jax.config  # whose options exist at run time only
    folder = config.jax_compilation_cache_dir
    if folder:
        yield Finding("compilation cache", "ok", str(folder))
    else:
        yield Finding(
            "compilation cache",
            "note",
            "off; set JAX_COMPILATION_CACHE_DIR to compile a step once only",
        )


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    findings: list[Finding] = []
    with terminal.waiting("Looking around"):
        for look in (packages, plugins, devices, solver, caches):
            findings += look()
    if arguments.json:
        records = [dataclasses.asdict(each) for each in findings]
        terminal.print(json.dumps({"findings": records}, indent=1))
    else:
        width = max(len(each.name) for each in findings)
        for each in findings:
            state = terminal.paint(each.state.ljust(7), COLORS[each.state])
            terminal.print(f"{state}  {each.name.ljust(width)}  {each.detail}")
    return int(any(each.state == "missing" for each in findings))
