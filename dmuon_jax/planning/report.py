"""What a plan amounts to: bytes of the exchange, and a table for people.

Reads plans, never builds them.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

from dmuon_jax.planning.cost import iteration_flops

if typing.TYPE_CHECKING:
    from dmuon_jax.planning.groups import Bucket, Member
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


def buffer_bytes(plan: "Plan", parts: Sequence[tuple[int, int]]) -> ExchangeBytes:
    """What the parts (group, part) of one buffer move, both ways."""
    groups = [plan.groups[number] for number, _ in parts]
    layouts = [plan.group_layout(group) for group in groups]
    itemsize = ITEMSIZE[groups[0].exchange_dtype]
    totals = {"all_to_all": 0, "all_gather": 0, "scales": 0}
    useful, collectives = 0.0, 0
    for way in ("in", "out"):
        sides = [layout.side(way) for layout in layouts]
        extra = has_scales(plan, parts[0][0], way) and sides[0].travels
        for kind, elements in zip(
            ("all_to_all", "all_gather"),
            zip(*(side.elements_per_slot() for side in sides), strict=True),
            strict=True,
        ):
            # On the way out a forced axis of the way in multiplies the slots, and vice
            # versa; those coordinates are part of `owner`, hence of the number of blocks.
            blocks = [
                num // math.prod(side.block_shape)
                for num, side in zip(elements, sides, strict=True)
            ]
            rows = [
                (group.parts[part].slots * (num + extra * n), group.parts[part].slots * n)
                for num, n, group, (_, part) in zip(
                    elements, blocks, groups, parts, strict=True
                )
            ]
            longest, scales = max(rows)
            totals[kind] += longest * itemsize
            totals["scales"] += extra * scales * itemsize
            for (length, _), group, (_, part) in zip(rows, groups, parts, strict=True):
                counts = group.part_counts(part)
                slots = max(1, group.parts[part].slots * len(counts))
                useful += length * itemsize * sum(counts) / slots
            collectives += any(elements)
    moved = totals["all_to_all"] + totals["all_gather"]
    return ExchangeBytes(**totals, empty=round(moved - useful), collectives=collectives)


def has_scales(plan: "Plan", number: int, way: str) -> bool:
    """Whether blocks of a group would travel with exponents."""
    if plan.groups[number].exchange_dtype != "float16":
        return False
    results = {
        bucket.compute_dtype
        for bucket in plan.buckets
        if any(member.group == number for member in bucket.members)
    }
    # float16 results of the iteration need none on their way back.
    return way == "in" or results != {"float16"}


def exchange_bytes(plan: "Plan") -> ExchangeBytes:
    """The whole step."""
    found = [buffer_bytes(plan, parts) for wave in plan.waves for parts in wave]
    return ExchangeBytes(
        *(
            sum(dataclasses.astuple(item)[i] for item in found)
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
    where = f"{plan.mesh.num_devices} devices ({axes})"
    if plan.mesh.num_devices == 1:
        where = "1 device: no mesh of several was given, nor seen on the parameters"
    shared = len({group.buffer for group in plan.groups}) < len(plan.groups)
    weak = " (weak where buffers are shared)" if shared else ""
    lines = [
        f"plan: {plan.num_matrices} matrices of {len(plan.leaves)} leaves on {where}",
        f"  {plan.status}",
        f"  NS makespan {plan.makespan_us / 1e3:.3f} ms (busiest owner, model) + exchange "
        f"{plan.exchange_us / 1e3:.3f} ms if nothing hid it; bound on "
        f"their sum {plan.lower_bound_us / 1e3:.3f} ms{weak}, gap {plan.gap:.1%}",
        f"  exchange: {moved.collectives} collectives in {waves}, "
        f"{moved.all_to_all / 2**20:.2f} MiB all-to-all + "
        f"{moved.all_gather / 2**20:.2f} MiB all-gather per device, "
        f"{moved.empty / 2**20:.2f} MiB of it EMPTY slots",
        f"  costs: {plan.costs or 'unknown'}",
        *axes_lines(plan),
        f"  {'matrix':>14} {'number':>7} {'per owner':>10} {'method':>7} {'dtype':>9}",
    ]
    lines += [*matrix_rows(plan), idle_line(plan), *load_lines(plan)]
    return "\n".join(lines)


def matrix_rows(plan: "Plan") -> list[str]:
    """A row for each shape, method and dtype, whatever waves its buckets are in."""
    rows: dict[tuple[str, str, str], list[Bucket]] = {}
    for bucket in plan.buckets:
        shape = f"{bucket.shape[0]}x{bucket.shape[1]}"
        key = (shape, bucket.method, bucket.compute_dtype)
        rows.setdefault(key, []).append(bucket)
    lines = []
    for (shape, method, dtype), buckets in rows.items():
        members = [member for bucket in buckets for member in bucket.members]
        number = sum(num_matrices(plan, member) for member in members)
        owned = all_owned(plan, buckets)
        fewest, most = min(owned), max(owned)
        per_owner = f"{fewest}" if fewest == most else f"{fewest}-{most}"
        lines.append(f"  {shape:>14} {number:>7} {per_owner:>10} {method:>7} {dtype:>9}")
    return lines


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
    num_idle = all_owned(plan, plan.buckets).count(0) if plan.buckets else 0
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


def all_owned(plan: "Plan", buckets: Sequence["Bucket"]) -> list[int]:
    """Matrices of all ``buckets`` on each device."""
    owned = [owned_matrices(plan, bucket) for bucket in buckets]
    return [sum(numbers) for numbers in zip(*owned, strict=True)]


def load_lines(plan: "Plan", width: int = 40, rows: int = 16) -> list[str]:
    """A bar per device; beyond ``rows`` devices, a bar per run of neighbours' maximum.

    A device without a matrix has a load where it computes EMPTY slots along with others.
    """
    loads = plan.owner_load_us
    owned = all_owned(plan, plan.buckets) or [0] * len(loads)
    size = math.ceil(len(loads) / rows)
    most = f", the busiest of each {size}" if size > 1 else ""
    top = max(loads, default=0.0) or 1.0
    lines = [f"  load per owner, EMPTY slots included (model{most}):"]
    for start in range(0, len(loads), size):
        part = loads[start : start + size]
        name = f"{start}" if len(part) == 1 else f"{start}-{start + len(part) - 1}"
        bar = "#" * round(max(part) / top * width)
        idle = owned[start : start + size].count(0)
        note = f" ({idle} of {len(part)} own no matrix)" if idle and size > 1 else ""
        note = " (owns no matrix)" if idle and size == 1 else note
        lines.append(f"  {name:>9} {max(part) / 1e3:9.3f} ms {bar}{note}")
    return lines
