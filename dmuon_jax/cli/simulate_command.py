"""``dmuon-jax simulate``: compiles training steps for a cluster and puts them on a clock."""

import argparse
import json

import jax

from dmuon_jax.cli import plan_command
from dmuon_jax.cli.arguments import add_cluster, add_json, add_model, positive
from dmuon_jax.cli.terminal import Terminal, UsageError, table
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.estimate import estimate
from dmuon_jax.proof.models import model_named
from dmuon_jax.proof.simulate import simulate
from dmuon_jax.proof.steps import OPTIMIZERS

EXAMPLES = """examples:
  dmuon-jax simulate --model qwen2.5-1.5b --mesh fsdp=8
  dmuon-jax simulate --model llama-3.1-8b --mesh data=16,fsdp=8 --seq 4096
  dmuon-jax simulate --model moonlight-16b-a3b --mesh fsdp=8,expert=8
"""


def add_parser(commands) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="step time with AdamW, optax.contrib.muon and dmuon on a cluster",
        description="Compiles the training step of a model for a cluster that is not "
        "here, batch split over all mesh axes and parameters over fsdp, and reads the time "
        "of the scheduled program off a two-stream model. Needs "
        "the CUDA plugin (or libtpu); without it, prints the plan alone.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(parser)
    add_cluster(parser)
    add = parser.add_argument
    add("--seq", type=positive, default=4096, metavar="N", help="tokens of a sequence")
    add(
        "--batch-per-device",
        type=positive,
        default=1,
        metavar="N",
        help="sequences on one device (default: 1)",
    )
    add(
        "--optimizers",
        nargs="+",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[:3],
        help="ratios are to the first; dmuon-local repeats the work of an owner on every "
        "replica (default: adamw muon dmuon)",
    )
    add("--no-clip", action="store_true", help="no clipping by the global norm")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    if arguments.model is None:
        raise UsageError(
            "simulate needs --model: a file of shapes has no layers to run"
        )
    if "fsdp" not in arguments.mesh.names:
        raise UsageError(
            "--mesh must have an axis called fsdp, over which simulate shards the "
            f"parameters (data=8,fsdp=1 for none), got {', '.join(arguments.mesh.names)}"
        )
    mesh = dict(zip(arguments.mesh.names, arguments.mesh.sizes, strict=True))
    jax.config.update("jax_platforms", "cpu")  # compiling needs no accelerator
    model = model_named(arguments.model)
    try:
        with terminal.waiting(f"Compiling {len(arguments.optimizers)} training steps"):
            found = simulate(
                model,
                mesh,
                arguments.device,
                sequence=arguments.seq,
                batch_per_device=arguments.batch_per_device,
                optimizers=tuple(arguments.optimizers),
                clip=not arguments.no_clip,
            )
    except NotImplementedError as error:
        analytic(arguments, terminal)
        terminal.note(f"dmuon-jax simulate: only the plan is shown: {error}")
        return 1
    terminal.print(found.to_json() if arguments.json else found.summary())
    return 0


def analytic(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """The plan alone, where nothing can be compiled."""
    defaults = argparse.ArgumentParser()
    plan_command.add_layout(defaults)
    filled = argparse.Namespace(**vars(defaults.parse_args([])) | vars(arguments))
    plan = plan_command.plan_for(filled)
    costs = estimate(plan, DEVICES[arguments.device])
    if arguments.json:
        plan_only = {"plan_only": plan_command.record(plan, costs, {})}
        terminal.print(json.dumps(plan_only, indent=1))
    else:
        terminal.print(plan.summary())
        terminal.print(table(plan_command.cost_rows(costs)))
