"""Whether a plan, which may come from a file, is one that can be carried out."""

import collections
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dmuon_jax.layout import Layout
from dmuon_jax.matrices import Axes, MeshShape, oriented
from dmuon_jax.planning.buffers import route
from dmuon_jax.planning.groups import Bucket, Group
from dmuon_jax.planning.leaf_checks import check_dtype, check_leaf

if TYPE_CHECKING:
    from dmuon_jax.planning.plan import Plan

T = TypeVar("T", int, tuple[int, int, int])


def check_plan(plan: "Plan") -> None:
    """Raises ``ValueError`` unless every parcel has exactly one owner and one place."""
    times = (*plan.owner_load_us, plan.exchange_us, plan.lower_bound_us, plan.gap)
    if min(times) < 0:
        raise ValueError(f"times and gap must not be negative, got {min(times)}")
    check_axes(plan.mesh, "owner_axes", plan.owner_axes)
    for number, other in enumerate(plan.alternatives):
        check_axes(plan.mesh, f"alternatives[{number}].owner_axes", other.owner_axes)
    for leaf in plan.leaves:
        check_leaf(leaf)
    waves = {part.wave for group in plan.groups for part in group.parts}
    if plan.groups and waves != set(range(len(waves))):
        raise ValueError(f"waves must be numbered from 0, got {sorted(waves)}")
    if len(plan.owner_load_us) != plan.mesh.num_devices:
        raise ValueError(
            f"owner_load_us must have {plan.mesh.num_devices} entries, got "
            f"{len(plan.owner_load_us)}"
        )
    placed = [index for group in plan.groups for index in group.leaves]
    if wrong := not_once(placed, range(len(plan.leaves))):
        raise ValueError(f"groups must hold the position of each leaf once, got {wrong}")
    for number, group in enumerate(plan.groups):
        if not group.leaves:
            raise ValueError(f"a group must hold leaves, got none in groups[{number}]")
        check_group(plan, group)
    check_buffers(plan)
    pieces = [(m.group, m.part, m.piece) for b in plan.buckets for m in b.members]
    wanted = [
        (index, part, piece)
        for index, group in enumerate(plan.groups)
        for part in range(len(group.parts))
        for piece in range(len(plan.leaves[group.leaves[0]].matrix_shapes))
    ]
    if wrong := not_once(pieces, wanted):
        raise ValueError(
            "buckets must hold each piece of a part once, got as (group, part, piece) "
            + wrong
        )
    for number, bucket in enumerate(plan.buckets):
        if not bucket.members:
            raise ValueError(f"a bucket must have members, got none in buckets[{number}]")
        check_bucket(plan, bucket)


def not_once(found: Iterable[T], wanted: Iterable[T]) -> str:
    """Which of ``wanted`` are missing in ``found``, and what is there too often."""
    counts, known = collections.Counter(found), set(wanted)
    missing = sorted(known - set(counts))
    often = sorted(x for x in counts if x in known and counts[x] > 1)
    unknown = sorted(set(counts) - known)
    told = (("none of", missing), ("more than one of", often), ("the unknown", unknown))
    return " and ".join(f"{words} {some(items)}" for words, items in told if items)


def some(items: Sequence[Any], most: int = 5) -> str:
    """The first few of ``items``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def check_axes(mesh: MeshShape, name: str, axes: Axes) -> None:
    """Raises ``ValueError`` unless ``axes`` are distinct axes of ``mesh``."""
    if len(set(axes)) < len(axes) or set(axes) - set(mesh.names):
        raise ValueError(f"{name} must be distinct axes of {mesh.names}, got {axes}")


def check_travel_dtype(name: str, dtype: str, leaf_dtype: str, where: str) -> None:
    """Raises ``ValueError`` unless arrays of ``leaf_dtype`` can be brought to ``dtype``."""
    check_dtype(name, dtype)
    if leaf_dtype.startswith("complex") and dtype != leaf_dtype:
        raise ValueError(f"{name} must be that of {leaf_dtype} leaves, got {dtype} {where}")
    if dtype.startswith("complex") and not leaf_dtype.startswith("complex"):
        raise ValueError(f"{name} must be real for {leaf_dtype} leaves, got {dtype} {where}")


def check_group(plan: "Plan", group: Group) -> None:
    layouts = [plan.layouts[index] for index in group.leaves]
    paths = [plan.leaves[index].path for index in group.leaves]
    dtype = layouts[0].layout.dtype
    check_travel_dtype("exchange_dtype", group.exchange_dtype, dtype, f"for {paths}")
    if any(x.layout != layouts[0].layout for x in layouts):
        raise ValueError(f"the leaves of a group must share one layout, got {paths}")
    core = sum(x.core for x in layouts)
    owners = layouts[0].layout.num_owners
    if (
        len(group.counts) != owners
        or sum(group.counts) != core
        or min(group.counts) < 0
    ):
        raise ValueError(
            f"counts must place {core} parcels on {owners} owners, got {group.counts} "
            f"for {paths}"
        )
    sizes = [part.slots for part in group.parts]
    if sum(sizes) != group.slots or not sizes or (len(sizes) > 1 and min(sizes) < 1):
        raise ValueError(f"parts must divide {group.slots} slots, got {sizes} for {paths}")


def check_buffers(plan: "Plan") -> None:
    """Raises ``ValueError`` unless groups of one buffer can travel in it together."""
    buffers: dict[int, list[Group]] = {}
    for group in plan.groups:
        buffers.setdefault(group.buffer, []).append(group)
    if sorted(buffers) != list(range(len(buffers))):
        raise ValueError(f"buffers must be numbered from 0, got {sorted(buffers)}")
    for number, groups in buffers.items():
        paths = [plan.leaves[index].path for group in groups for index in group.leaves]
        where = f"in buffer {number} of {paths}"
        routes = {route(plan.group_layout(x), x.exchange_dtype) for x in groups}
        if len(routes) > 1:
            raise ValueError(f"groups of a buffer must go one way, got {routes} {where}")
        counts = [group.counts for group in groups]
        if any(sum(map(bool, row)) > 1 for row in zip(*counts, strict=True)):
            raise ValueError(
                f"groups of a buffer must have no owner in common, got {counts} {where}"
            )
    for group in plan.groups:
        waves = [part.wave for part in group.parts]
        if len(set(waves)) != len(waves):
            paths = [plan.leaves[index].path for index in group.leaves]
            raise ValueError(f"parts of a group must be of different waves for {paths}")


def check_bucket(plan: "Plan", bucket: Bucket) -> None:
    where = f"in the bucket of {bucket.shape}"
    if bucket.method not in ("direct", "gram"):
        raise ValueError(
            f"method must be direct or gram, got {bucket.method!r} {where}"
        )
    layouts = [plan.group_layout(plan.groups[m.group]) for m in bucket.members]
    dtype = layouts[0].dtype
    check_travel_dtype("compute_dtype", bucket.compute_dtype, dtype, where)
    for member, layout in zip(bucket.members, layouts, strict=True):
        leaf = plan.leaves[plan.groups[member.group].leaves[0]]
        shape = oriented(leaf.matrix_shapes[member.piece])
        if shape != bucket.shape:
            raise ValueError(
                f"members must have the bucket's shape, got {shape} {where}"
            )
        if (layout.varying, layout.dtype) != (layouts[0].varying, layouts[0].dtype):
            raise ValueError(f"members must share dtype and varying axes {where}")
        if plan.groups[member.group].parts[member.part].wave != plan.wave_of(bucket):
            raise ValueError(f"members must be of one wave {where}")
    check_branches(plan, bucket, layouts)


def check_branches(plan: "Plan", bucket: Bucket, layouts: Sequence[Layout]) -> None:
    """Raises ``ValueError`` unless each device has a branch that computes what it owns."""
    where = f"in the bucket of {bucket.shape}"
    for number, row in enumerate(bucket.branches):
        if len(row) != len(bucket.members):
            raise ValueError(
                f"a branch must have a number for each of {len(bucket.members)} members, "
                f"got {row} at branches[{number}] {where}"
            )
    varying = layouts[0].varying
    places = range(len(bucket.branches))
    if any(branch not in places for branch in bucket.branch_of):
        raise ValueError(f"branch_of must name branches, got {bucket.branch_of} {where}")
    if len(bucket.branch_of) != plan.mesh.size(varying):
        raise ValueError(f"branch_of must have an entry for each device {where}")
    owned = [plan.groups[m.group].part_counts(m.part) for m in bucket.members]
    for device in range(plan.mesh.num_devices):
        place = plan.mesh.coordinates(device)
        branch = bucket.branches[bucket.branch_of[plan.mesh.index(place, varying)]]
        for member, layout, counts, computed in zip(
            bucket.members, layouts, owned, branch, strict=True
        ):
            count = counts[plan.mesh.index(place, layout.free)]
            slots = plan.groups[member.group].parts[member.part].slots
            if not count <= computed <= slots:
                raise ValueError(
                    f"a branch must compute every matrix that its device owns, got "
                    f"{computed} for {count} of at most {slots} {where}"
                )
