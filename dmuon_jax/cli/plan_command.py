"""``dmuon-jax plan``: who would own what on a cluster, and what it would cost."""

import argparse
import dataclasses
import json
import pathlib

from dmuon_jax.cli.arguments import (
    add_cluster,
    add_json,
    add_model,
    axes_argument,
    placement,
    positive,
    read_model,
    read_text,
)
from dmuon_jax.cli.terminal import Terminal, UsageError, table
from dmuon_jax.planning.build import make_plan
from dmuon_jax.planning.clusters import cluster_settings, model_leaves
from dmuon_jax.planning.cost import TableCost
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.estimate import Estimate, estimate
from dmuon_jax.planning.plan import Plan

EXAMPLES = """examples:
  dmuon-jax plan --model llama-3.1-8b --mesh data=16,fsdp=8 --device h200
  dmuon-jax plan --model kimi-k2 --mesh fsdp=16,expert=64 --plot kimi.png
  dmuon-jax plan --shapes mine.json --mesh fsdp=64 --json
"""
MIB = 2**20


def add_parser(commands) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="who owns what on a cluster, and what it costs; needs no devices",
        description="Plans the owners of a model's matrices. Times are a model's.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(parser)
    add_cluster(parser)
    add_layout(parser)
    add_json(parser)
    parser.add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="FILE",
        help="draw owners (needs matplotlib)",
    )
    parser.add_argument(
        "--save", type=pathlib.Path, metavar="FILE", help="write the plan for plan="
    )
    parser.set_defaults(run=run)


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Adds how parameters lie, and how owners are chosen."""
    add = parser.add_argument
    axes = {"type": axes_argument, "metavar": "AXES"}
    add(
        "--fsdp-axis",
        **axes,
        help="axes that shard each matrix (default: fsdp, or the only axis)",
    )
    add("--expert-axis", **axes, help="axes that shard experts (default: expert)")
    add(
        "--momentum-axis",
        **axes,
        default=(),
        help="axes that shard the momentum on top, as ZeRO does",
    )
    add("--owner-axes", **axes, help="axes over which owners are spread (default: all)")
    add("--scan", action="store_true", help="layers are stacked, as under lax.scan")
    add("--method", choices=("direct", "gram"), help="form of the iteration")
    add("--costs", type=pathlib.Path, metavar="FILE", help="measured TableCost as JSON")
    add(
        "--max-wave-mib",
        type=positive,
        metavar="MIB",
        help="limit on whole matrices (float32) that a device holds at a time",
    )


def plan_for(arguments: argparse.Namespace, owner_axes=None) -> Plan:
    """The plan that the arguments ask for."""
    cost = None
    if arguments.costs is not None:
        cost = read_costs(arguments.costs)
    settings = cluster_settings(
        DEVICES[arguments.device],
        arguments.mesh,
        owner_axes=owner_axes,
        method=arguments.method,
        cost=cost,
        max_wave_bytes=arguments.max_wave_mib and arguments.max_wave_mib * MIB,
    )
    leaves = model_leaves(read_model(arguments), placement(arguments))
    return make_plan(leaves, arguments.mesh, settings)


def read_costs(path: pathlib.Path) -> TableCost:
    """The table of costs in a file."""
    text = read_text(path, "--costs")
    try:
        return TableCost.from_json(text)
    except ValueError as error:
        raise UsageError(
            f"--costs must be a table of costs: {path}: {error}"
        ) from error


def alternatives(arguments: argparse.Namespace) -> dict[tuple[str, ...], Plan]:
    """Plans with owners over fewer axes, where NS is repeated instead of sent further."""
    names = arguments.mesh.names
    if arguments.owner_axes is not None:
        return {}
    return {
        names[first:]: plan_for(arguments, names[first:])
        for first in range(1, len(names))
    }


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    device = DEVICES[arguments.device]
    with terminal.waiting("Solving the plan"):
        plan = plan_for(arguments, arguments.owner_axes)
    with terminal.waiting("Solving plans with owners over fewer axes"):
        others = alternatives(arguments)
    costs = estimate(plan, device)
    if arguments.save is not None:
        arguments.save.write_text(plan.to_json() + "\n", encoding="utf-8")
    if arguments.plot is not None:
        with terminal.waiting("Drawing"):
            draw(plan, arguments.plot)
    if arguments.json:
        terminal.print(json.dumps(record(plan, costs), indent=1))
        return 0
    terminal.print(plan.summary())
    terminal.print(f"\nper device, the matrices' share only ({device.name}, a model):")
    terminal.print(table(cost_rows(costs)))
    for axes, other in others.items():
        terminal.print(advice(axes, costs, estimate(other, device)))
    for tip in tips(plan):
        terminal.print(tip)
    for path in (arguments.save, arguments.plot):
        if path is not None:
            terminal.note(f"wrote {path}")
    return 0


def cost_rows(costs: Estimate) -> list[tuple[str, ...]]:
    """Memory and time beside AdamW's."""
    return [
        ("", "AdamW", "dmuon"),
        (
            "state MiB",
            f"{costs.adamw_state_bytes / MIB:.0f}",
            f"{costs.muon_state_bytes / MIB:.0f}",
        ),
        ("whole matrices held MiB", "-", f"{costs.whole_bytes / MIB:.0f}"),
        ("passes over memory ms", *ms(costs.adamw_us, costs.passes_us)),
        ("Newton-Schulz ms", "-", *ms(costs.orthogonalize_us)),
        ("update ms, exchange hidden", *ms(costs.adamw_us, costs.hidden_us)),
        ("update ms, nothing hidden", *ms(costs.adamw_us, costs.exposed_us)),
    ]


def ms(*times_us: float) -> tuple[str, ...]:
    """Times in milliseconds."""
    return tuple(f"{time / 1e3:.2f}" for time in times_us)


def advice(axes: tuple[str, ...], costs: Estimate, other: Estimate) -> str:
    """What another choice of ``owner_axes`` would do."""
    better = other.exposed_us < costs.exposed_us
    named = ", ".join(repr(axis) for axis in axes)
    return (
        f"owner_axes=({named},): update {other.hidden_us / 1e3:.2f} ms with the exchange "
        f"hidden, {other.exposed_us / 1e3:.2f} ms without"
        + ("; shorter if nothing hides it" if better else "")
    )


def tips(plan: Plan) -> list[str]:
    """What would help, as sentences."""
    moved = plan.exchange_bytes
    used = {axis for leaf in plan.leaves for axes in leaf.spec_out for axis in axes}
    whole = [n for n in plan.mesh.names if n not in used and plan.mesh.size((n,)) > 1]
    found = []
    if whole and moved.all_gather > moved.all_to_all:
        found.append(
            f"Parameters are replicated over {', '.join(whole)}, so that owners' results "
            f"are gathered there, {moved.all_gather / MIB:.0f} MiB; --fsdp-axis "
            f"{','.join((*whole, *sorted(used)))} shards them there too."
        )
    idle = plan.mesh.size(plan.owner_axes) - plan.num_matrices
    if idle > 0:
        found.append(f"There are fewer matrices than owners: {idle} or more own none.")
    return found


def record(plan: Plan, costs: Estimate) -> dict:
    """All figures, for ``--json``."""
    return {
        "num_matrices": plan.num_matrices,
        "num_devices": plan.mesh.num_devices,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "owner_axes": plan.owner_axes,
        "status": plan.status,
        "makespan_us": plan.makespan_us,
        "exchange_us": plan.exchange_us,
        "lower_bound_us": plan.lower_bound_us,
        "gap": plan.gap,
        "owner_load_us": plan.owner_load_us,
        "exchange_bytes": dataclasses.asdict(plan.exchange_bytes),
        "methods": [
            {"shape": b.shape, "method": b.method, "dtype": b.compute_dtype}
            for b in plan.buckets
        ],
        "estimate": dataclasses.asdict(costs)
        | {"hidden_us": costs.hidden_us, "exposed_us": costs.exposed_us},
    }


def draw(plan: Plan, path: pathlib.Path) -> None:
    """Writes the picture of the plan."""
    try:
        from dmuon_jax.plan_plot import plan_figure
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--plot needs {error.name}: pip install matplotlib"
        ) from error
    plan_figure(plan).savefig(path, dpi=150)
