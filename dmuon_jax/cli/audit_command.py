"""``dmuon-jax audit``: what the text of a compiled program does."""

import argparse
import pathlib

from dmuon_jax.cli.arguments import PICTURES, add_json, check_output, one_of, read_text
from dmuon_jax.cli.terminal import Terminal, UsageError
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.plan import Plan
from dmuon_jax.proof import Audit, AuditError, audit

EXAMPLES = """the file: text of optimized HLO, from
  open("step.hlo", "w").write(jax.jit(step).lower(...).compile().as_text())

examples:
  dmuon-jax audit step.hlo --device h200 --picture step.png
  dmuon-jax audit step.hlo --plan plan.json --scope orthogonalize --redundancy 1.05
"""
LIMITS = {
    "redundancy": (float, "FLOPs in scope over the plan's ideal"),
    "exposed_fraction": (
        float,
        "share of the step that compute waits (needs --device)",
    ),
    "bytes_ratio": (float, "bytes in scope over those of the plan's exchange"),
    "collectives_in_loops": (int, "collectives inside loops"),
    "synchronous": (int, "collectives that nothing can hide"),
}


def add_parser(commands) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "audit",
        help="collectives, FLOPs, memory and model time of a compiled program",
        description="Reads the text of a compiled program. With limits, exits with 1 and "
        "names the operations that break one.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", type=pathlib.Path, metavar="FILE", help="text of optimized HLO")
    add(
        "--device",
        type=one_of(tuple(DEVICES), "--device"),
        metavar="NAME",
        help=f"for the model of time: {', '.join(DEVICES)}",
    )
    add("--plan", type=pathlib.Path, metavar="FILE", help="JSON of the update's plan")
    add("--scope", default="", help="part of op_name that marks the update")
    add("--picture", type=pathlib.Path, metavar="FILE", help="draw the timeline")
    limits = parser.add_argument_group("limits, each the most allowed")
    for name, (kind, text) in LIMITS.items():
        flag = f"--{name.replace('_', '-')}"
        limits.add_argument(flag, type=kind, metavar="MOST", help=text)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    check_output("--picture", arguments.picture, PICTURES)
    plan = None
    if arguments.plan is not None:
        plan = Plan.from_json(read_text(arguments.plan, "--plan"))
    with terminal.waiting("Reading the program"):
        found = audit(
            read_text(arguments.file, "FILE"),
            plan=plan,
            device=arguments.device,
            scope=arguments.scope,
        )
    terminal.print(found.to_json() if arguments.json else found.summary())
    if arguments.picture is not None:
        with terminal.waiting("Drawing"):
            picture(found, arguments.picture)
        terminal.note(f"wrote {arguments.picture}")
    limits = {name: vars(arguments)[name] for name in LIMITS}
    try:
        found.check(**limits)
    except AuditError as error:
        terminal.note(str(error), "red")
        return 1
    return 0


def picture(found: Audit, path: pathlib.Path) -> None:
    """Writes the picture of the timeline."""
    if found.timeline is None:
        raise UsageError("--picture needs --device, for the times")
    try:
        from dmuon_jax.proof.picture import draw
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--picture needs {error.name}: pip install matplotlib"
        ) from error
    draw(found.timeline, path, found.name)
