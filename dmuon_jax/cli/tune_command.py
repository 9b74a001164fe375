"""``dmuon-jax tune``: measures which kernels and tiles are fastest on this device."""

import argparse
import dataclasses
import json
import pathlib

from dmuon_jax.cli import plan_command
from dmuon_jax.cli.arguments import add_cluster, add_json, add_model
from dmuon_jax.cli.machine import find_devices
from dmuon_jax.cli.terminal import Terminal, UsageError
from dmuon_jax.kernels import tune
from dmuon_jax.kernels.records import default_directory
from dmuon_jax.kernels.select import Problem, candidates
from dmuon_jax.kernels.support import target_device
from dmuon_jax.planning.groups import Bucket
from dmuon_jax.planning.plan import Plan

EXAMPLES = """examples:
  dmuon-jax tune --model qwen2.5-1.5b --mesh fsdp=8
  dmuon-jax tune --shapes mine.json --mesh fsdp=64 --dry-run

then, in the program: dmuon(..., implementation=dmuon_jax.kernels.tune.load(FILE))
"""


def add_parser(commands) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="measure kernels and tiles on this GPU for a model's shapes",
        description="Times every kernel and tile size that can run here on the batches "
        "that a plan gives its owners, and keeps the verdicts in a file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(parser)
    add_cluster(parser)
    plan_command.add_layout(parser)
    parser.add_argument(
        "--directory",
        type=pathlib.Path,
        default=default_directory(),
        metavar="DIR",
        help="where verdicts are kept (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only list what would be measured"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def bucket_problems(bucket: Bucket) -> tuple[Problem, ...]:
    """The products of one bucket's iteration, for each batch that an owner may have."""
    short, long = bucket.shape
    chain = ("direct_chain", short, long)
    if bucket.method == "gram":
        chain = ("polynomial_chain", short, short)
    products = (("gram", short, long), ("symmetric_matmul", short, short), chain)
    batches = sorted({sum(counts) for counts in bucket.branches} - {0})
    return tuple(
        Problem(kernel, batch, rows, columns, bucket.compute_dtype)
        for batch in batches
        for kernel, rows, columns in products
    )


def plan_problems(plan: Plan) -> tuple[Problem, ...]:
    """The products of a whole update, each once."""
    found = [p for bucket in plan.buckets for p in bucket_problems(bucket)]
    return tuple(dict.fromkeys(found))


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    if arguments.directory is None:
        raise UsageError("there is no home folder for verdicts: pass --directory")
    with terminal.waiting("Solving the plan"):
        problems = plan_problems(plan_command.plan_for(arguments))
    if arguments.dry_run and arguments.json:
        terminal.print(json.dumps([dataclasses.asdict(p) for p in problems], indent=1))
        return 0
    if arguments.dry_run:
        for problem in problems:
            terminal.print(describe(problem))
        return 0
    with terminal.waiting("Looking for devices"):
        find_devices()
    device = target_device()
    open_ones = [p for p in problems if len(candidates(p, device)) > 1]
    if not open_ones:
        raise NotImplementedError(
            f"there is nothing to tune on {device}: XLA is the only candidate for these "
            "shapes"
        )
    verdicts = measure(open_ones, arguments.directory, terminal)
    path = tune.table_path(arguments.directory, device.kind)
    if arguments.json:
        terminal.print(json.dumps({"file": str(path), "device": device.kind}))
        return 0
    for problem, choice in verdicts.entries:
        terminal.print(f"{describe(problem)}: {choice.implementation}, {choice.reason}")
    terminal.print(f"verdicts in {path}")
    return 0


def measure(problems: list[Problem], directory: pathlib.Path, terminal: Terminal):
    """Tunes, writing a line for each measurement."""
    done: set[Problem] = set()

    def report(each: tune.Measurement) -> None:
        done.add(each.problem)
        result = each.failure or f"{each.time_us:.1f} us"
        terminal.note(
            f"[{len(done)}/{len(problems)}] {describe(each.problem)} "
            f"{each.choice.implementation}: {result}"
        )

    return tune.tune(problems, directory, report)


def describe(problem: Problem) -> str:
    """A problem in one line."""
    size = f"{problem.batch} x {problem.rows} x {problem.columns}"
    return f"{problem.kernel} {size} {problem.dtype}"
