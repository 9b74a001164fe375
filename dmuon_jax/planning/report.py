"""What a plan amounts to: bytes of the exchange, and a table for people.

Reads plans, never builds them.
"""

import dataclasses
import math
import typing

from dmuon_jax.planning.cost import iteration_flops

if typing.TYPE_CHECKING:
    from dmuon_jax.planning.groups import Bucket, Group, Member
    from dmuon_jax.planning.plan import Plan

ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@dataclasses.dataclass(frozen=True)
class ExchangeBytes:
    """Collective buffer bytes per device and step (result buffers).

    Attributes:
      all_to_all: both ways, EMPTY slots and scales included.
      all_gather: results brought back to replicas, and blocks of repeated axes.
      empty: the part of both that EMPTY slots cause.
      scales: the part of both that carries float16 block exponents.
      collectives: number of collectives.
    """

    all_to_all: int
    all_gather: int
    empty: int
    scales: int
    collectives: int

    @property
    def total(self) -> int:
        return self.all_to_all + self.all_gather


def group_bytes(plan: "Plan", group: "Group") -> ExchangeBytes:
    """The share of one exchange group."""
    layout = plan.group_layout(group)
    itemsize = ITEMSIZE[group.exchange_dtype]
    number = plan.groups.index(group)
    results = {
        bucket.compute_dtype
        for bucket in plan.buckets
        if any(member.group == number for member in bucket.members)
    }
    useful = sum(group.counts) / layout.num_owners
    totals = {"all_to_all": 0, "all_gather": 0, "scales": 0}
    collectives = 0
    for way in ("in", "out"):
        side = layout.side(way)
        # On the way out a forced axis of the way in multiplies the slots, and vice versa;
        # those coordinates are part of `owner`, hence of the block factors below.
        block = math.prod(side.block_shape)
        # float16 results of the iteration need no exponents on their way back.
        plain = way == "out" and results == {"float16"}
        extra = 1 if group.exchange_dtype == "float16" and side.travels and not plain else 0
        for kind, elements in zip(
            ("all_to_all", "all_gather"), side.elements_per_slot(), strict=True
        ):
            blocks = elements // block
            totals[kind] += group.slots * blocks * (block + extra) * itemsize
            totals["scales"] += group.slots * blocks * extra * itemsize
            collectives += len(group.parts) if elements else 0
    moved = totals["all_to_all"] + totals["all_gather"]
    empty = round(moved * (1 - useful / group.slots)) if group.slots else 0
    return ExchangeBytes(**totals, empty=empty, collectives=collectives)


def exchange_bytes(plan: "Plan") -> ExchangeBytes:
    """The whole step."""
    parts = [group_bytes(plan, group) for group in plan.groups]
    return ExchangeBytes(
        *(
            sum(dataclasses.astuple(part)[i] for part in parts)
            for i in range(len(dataclasses.fields(ExchangeBytes)))
        )
    )


def summary(plan: "Plan") -> str:
    """A table of buckets, owner loads and bytes."""
    moved = exchange_bytes(plan)
    waves = "1 wave" if plan.num_waves == 1 else f"{plan.num_waves} waves"
    axes = ", ".join(
        f"{n}={s}" for n, s in zip(plan.mesh.names, plan.mesh.sizes, strict=True)
    )
    lines = [
        f"plan: {plan.num_matrices} matrices of {len(plan.leaves)} leaves on "
        f"{plan.mesh.num_devices} devices ({axes or 'no mesh'})",
        f"  {plan.status}",
        f"  NS makespan {plan.makespan_us / 1e3:.3f} ms (busiest owner, model) + exchange "
        f"{plan.exchange_us / 1e3:.3f} ms if nothing hid it; bound on "
        f"their sum {plan.lower_bound_us / 1e3:.3f} ms, gap {plan.gap:.1%}",
        f"  exchange: {moved.collectives} collectives in {waves}, "
        f"{moved.all_to_all / 2**20:.2f} MiB all-to-all + "
        f"{moved.all_gather / 2**20:.2f} MiB all-gather per device, "
        f"{moved.empty / 2**20:.2f} MiB of it EMPTY slots",
        f"  costs: {plan.costs or 'unknown'}",
        *axes_lines(plan),
        f"  {'matrix':>14} {'number':>7} {'per owner':>10} {'method':>7} {'dtype':>9}",
    ]
    for bucket in plan.buckets:
        number = sum(num_matrices(plan, member) for member in bucket.members)
        owned = owned_matrices(plan, bucket)
        fewest, most = min(owned), max(owned)
        per_owner = f"{fewest}" if fewest == most else f"{fewest}-{most}"
        shape = f"{bucket.shape[0]}x{bucket.shape[1]}"
        lines.append(
            f"  {shape:>14} {number:>7} {per_owner:>10} {bucket.method:>7} "
            f"{bucket.compute_dtype:>9}"
        )
    lines += [idle_line(plan), "  load per owner (model):", *bars(plan.owner_load_us)]
    return "\n".join(lines)


def axes_lines(plan: "Plan") -> list[str]:
    """What other ``owner_axes`` would cost, where they were priced."""
    if not plan.alternatives:
        return []
    lines = [
        f"  owners over {plan.owner_axes}: {plan.objective_us / 1e3:.3f} ms of "
        "makespan and exchange"
    ]
    for other in plan.alternatives:
        more = other.objective_us - plan.objective_us
        share = f", {more / plan.objective_us:.1%}" if plan.objective_us else ""
        lines.append(
            f"    over {other.owner_axes} {other.objective_us / 1e3:.3f} ms: "
            f"{more / 1e3:.3f} ms{share} more"
        )
    return lines


def idle_share(plan: "Plan") -> float:
    """Share of what devices could do, while the busiest works, that no matrix needs.

    Counted in FLOPs of owned matrices: work on EMPTY slots is idleness too.
    """
    work = [0] * plan.mesh.num_devices
    for bucket in plan.buckets:
        flops = iteration_flops(bucket.shape, bucket.method)
        for device, number in enumerate(owned_matrices(plan, bucket)):
            work[device] += flops * number
    most = max(work, default=0) * len(work)
    return 1.0 - sum(work) / most if most else 0.0


def idle_line(plan: "Plan") -> str:
    """How much of the devices lies idle, and why it stays so."""
    owned = [owned_matrices(plan, bucket) for bucket in plan.buckets]
    num_idle = sum(not any(numbers) for numbers in zip(*owned, strict=True))
    line = f"  idle or on EMPTY slots: {idle_share(plan):.1%} of what owners could do"
    if num_idle:
        line += (
            f"; {num_idle} of {plan.mesh.num_devices} devices own no matrix (one "
            "matrix is never split over owners)"
        )
    return line
def num_matrices(plan: "Plan", member: "Member") -> int:
    """Matrices of one member of a bucket."""
    group = plan.groups[member.group]
    first = plan.layouts[group.leaves[0]]
    copies = first.leaf.num_parcels // first.core if first.core else 0
    return copies * sum(group.part_counts(member.part))


def owned_matrices(plan: "Plan", bucket: "Bucket") -> list[int]:
    """Matrices of ``bucket`` on each device, row-major over the mesh."""
    groups = [plan.groups[member.group] for member in bucket.members]
    counts = [g.part_counts(m.part) for g, m in zip(groups, bucket.members, strict=True)]
    free = [plan.group_layout(group).free for group in groups]
    places = [plan.mesh.coordinates(i) for i in range(plan.mesh.num_devices)]
    return [
        sum(c[plan.mesh.index(place, f)] for c, f in zip(counts, free, strict=True))
        for place in places
    ]


def bars(loads: tuple[float, ...], width: int = 40, rows: int = 16) -> list[str]:
    """A bar per owner; beyond ``rows`` owners, a bar per run of neighbours' maximum."""
    size = math.ceil(len(loads) / rows) if loads else 1
    top = max(loads, default=0.0) or 1.0
    lines = []
    for start in range(0, len(loads), size):
        part = loads[start : start + size]
        name = f"{start}" if len(part) == 1 else f"{start}-{start + len(part) - 1}"
        bar = "#" * round(max(part) / top * width)
        lines.append(f"  {name:>9} {max(part) / 1e3:9.3f} ms {bar}")
    return lines
