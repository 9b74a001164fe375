"""``dmuon-jax plan``: who would own what on a cluster, and what it would cost."""

import argparse
import dataclasses
import json
import pathlib

from dmuon_jax.cli.arguments import (
    PICTURES,
    add_cluster,
    add_json,
    add_model,
    axes_argument,
    check_output,
    owner_axes_argument,
    placement,
    positive,
    read_model,
    read_text,
)
from dmuon_jax.cli.terminal import Terminal, UsageError, table
from dmuon_jax.kernels.support import describe_device
from dmuon_jax.matrices import Axes, Leaf
from dmuon_jax.measure import default_device, measure_costs
from dmuon_jax.planning.batches import even_batches
from dmuon_jax.planning.build import Settings, make_plan
from dmuon_jax.planning.clusters import cluster_settings, model_leaves
from dmuon_jax.planning.compare import AUTO, cheapest_plan, owner_axes_candidates
from dmuon_jax.planning.cost import TableCost
from dmuon_jax.planning.devices import DEVICES, device_of_kind
from dmuon_jax.planning.estimate import Estimate, estimate
from dmuon_jax.planning.plan import Alternative, Plan

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
    add(
        "--owner-axes",
        type=owner_axes_argument,
        metavar="AXES",
        help="axes over which owners are spread; auto: the cheapest (default: all)",
    )
    add("--scan", action="store_true", help="layers are stacked, as under lax.scan")
    add("--method", choices=("direct", "gram"), help="form of the iteration")
    add(
        "--costs",
        metavar="SOURCE",
        help="roofline (default), measured (here and now), or a file of a TableCost",
    )
    add(
        "--max-wave-mib",
        type=positive,
        metavar="MIB",
        help="limit on whole matrices (float32) that a device holds at a time",
    )
    add(
        "--max-owner-mib",
        type=positive,
        metavar="MIB",
        help="limit on an owner's slots, EMPTY ones too, as they travel; no plan is above it",
    )


Work = tuple[tuple[Leaf, ...], Settings]
"""What is planned, and how."""


def work_for(arguments: argparse.Namespace) -> Work:
    """The leaves of the model, and settings with the costs that the arguments name."""
    model = read_model(arguments)
    leaves = model_leaves(model, placement(arguments, model))
    settings = cluster_settings(
        DEVICES[arguments.device],
        arguments.mesh,
        owner_axes=AUTO if is_auto(arguments) else arguments.owner_axes,
        method=arguments.method,
        max_wave_bytes=arguments.max_wave_mib and arguments.max_wave_mib * MIB,
        max_owner_bytes=arguments.max_owner_mib and arguments.max_owner_mib * MIB,
    )
    cost = costs_for(arguments, leaves, settings)
    if cost is not None:
        settings = dataclasses.replace(settings, cost=cost)
    return leaves, settings


def read_costs(path: pathlib.Path) -> TableCost:
    """The table of costs in a file."""
    text = read_text(path, "--costs")
    try:
        return TableCost.from_json(text)
    except ValueError as error:
        raise UsageError(
            f"--costs must be a table of costs: {path}: {error}"
        ) from error


def is_auto(arguments: argparse.Namespace) -> bool:
    """Whether owner axes are to be chosen by price."""
    return arguments.owner_axes == (AUTO,) and AUTO not in arguments.mesh.names


def costs_for(
    arguments: argparse.Namespace, leaves: tuple[Leaf, ...], settings: Settings
) -> TableCost | None:
    """The table of ``--costs``; None for the roofline of the settings.

    Raises:
      NotImplementedError: ``--costs measured`` where the device here is another.
    """
    if arguments.costs in (None, "roofline"):
        return None
    if arguments.costs != "measured":
        return read_costs(pathlib.Path(arguments.costs))
    device = default_device()
    target = describe_device(device.platform, device.device_kind, None)
    here = device_of_kind(target.platform, target.kind).name
    if here != arguments.device:
        raise NotImplementedError(
            f"--costs measured must be run on the device that is planned for, got {here} "
            f"here for --device {arguments.device}"
        )
    mesh = arguments.mesh
    candidates = owner_axes_candidates(leaves, mesh, settings.bandwidths)
    batches = even_batches(leaves, mesh, (settings.owner_axes, *candidates))
    return measure_costs(batches, method=arguments.method, device=device)


def plan_of(work: Work, arguments: argparse.Namespace) -> Plan:
    """The plan, over the owner axes named or the cheapest."""
    make = cheapest_plan if is_auto(arguments) else make_plan
    return make(work[0], arguments.mesh, work[1])


def plan_for(arguments: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for."""
    return plan_of(work_for(arguments), arguments)


def alternatives(work: Work, arguments: argparse.Namespace) -> dict[Axes, Plan]:
    """Plans with owners over fewer axes, where NS is repeated instead of sent further."""
    if arguments.owner_axes is not None:
        return {}
    leaves, settings = work
    mesh = arguments.mesh
    others = owner_axes_candidates(leaves, mesh, settings.bandwidths)[1:]
    return {
        axes: make_plan(leaves, mesh, dataclasses.replace(settings, owner_axes=axes))
        for axes in others
    }


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    device = DEVICES[arguments.device]
    check_output("--save", arguments.save)
    check_output("--plot", arguments.plot, PICTURES)
    with terminal.logs():
        work = work_for(arguments)
    with terminal.waiting("Solving the plan"):
        plan = plan_of(work, arguments)
    with terminal.waiting("Solving plans with owners over fewer axes"):
        others = alternatives(work, arguments)
    costs = estimate(plan, device)
    if arguments.save is not None:
        arguments.save.write_text(plan.to_json() + "\n", encoding="utf-8")
    if arguments.plot is not None:
        with terminal.waiting("Drawing"):
            draw(plan, arguments.plot)
    if arguments.json:
        terminal.print(json.dumps(record(plan, costs, others), indent=1))
        return 0
    terminal.print(plan.summary())
    terminal.print(f"\nper device, the matrices' share only ({device.name}, a model):")
    terminal.print(table(cost_rows(costs)))
    for axes, other in others.items():
        terminal.print(advice(axes, costs, estimate(other, device)))
    for tip in tips(plan, fsdp_axes(arguments)):
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


def advice(axes: Axes, costs: Estimate, other: Estimate) -> str:
    """What another choice of ``owner_axes`` would do."""
    saved = costs.exposed_us - other.exposed_us
    compared = "shorter" if saved > 0 else "longer"
    return (
        f"owner_axes={axes}: update {other.hidden_us / 1e3:.2f} ms with the exchange "
        f"hidden, {other.exposed_us / 1e3:.2f} ms without: {abs(saved) / 1e3:.2f} ms "
        f"{compared} if nothing hides it"
    )


def tips(plan: Plan, fsdp_axes: Axes) -> list[str]:
    """What would help, as sentences."""
    moved = plan.exchange_bytes
    used = {axis for leaf in plan.leaves for axes in leaf.spec_out for axis in axes}
    real = [n for n in plan.mesh.names if plan.mesh.size((n,)) > 1]
    whole = [n for n in real if n not in used and n not in fsdp_axes]
    meant = [undivided(plan, n) for n in real if n in fsdp_axes]
    found = [tip for tip in meant if tip]
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


def fsdp_axes(arguments: argparse.Namespace) -> Axes:
    """The axes that are meant to shard each matrix."""
    return ("fsdp",) if arguments.fsdp_axis is None else arguments.fsdp_axis


def undivided(plan: Plan, axis: str) -> str:
    """A sentence on the weights that ``axis`` is meant to shard but does not divide."""
    size = plan.mesh.size((axis,))
    left = [leaf for leaf in plan.leaves if axis not in sum(leaf.spec_out, ())]
    if not left:
        return ""
    return (
        f"{axis}={size} divides no dimension that is free in {len(left)} of "
        f"{len(plan.leaves)} weights, such as {left[0].path} {left[0].shape}: they are "
        "planned as replicated over it."
    )


def record(plan: Plan, costs: Estimate, others: dict[Axes, Plan]) -> dict:
    """All figures, for ``--json``."""
    priced = [Alternative(a, p.makespan_us, p.exchange_us) for a, p in others.items()]
    return {
        "num_matrices": plan.num_matrices,
        "num_devices": plan.mesh.num_devices,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "owner_axes": plan.owner_axes,
        "alternatives": [
            dataclasses.asdict(each) for each in (*plan.alternatives, *priced)
        ],
        "status": plan.status,
        "costs": plan.costs,
        "idle_share": plan.idle_share,
        "makespan_us": plan.makespan_us,
        "exchange_us": plan.exchange_us,
        "lower_bound_us": plan.lower_bound_us,
        "gap": plan.gap,
        "owner_load_us": plan.owner_load_us,
        "exchange_bytes": dataclasses.asdict(plan.exchange_bytes),
        "methods": [
            {"shape": shape, "method": method, "dtype": dtype}
            for shape, method, dtype in dict.fromkeys(
                (b.shape, b.method, b.compute_dtype) for b in plan.buckets
            )
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
