"""The plan: who orthogonalizes what, and how. Static, hashable, JSON both ways.

No arrays and no devices. Parcels of one exchange group are interchangeable, so the plan
says only *how many* parcels each free owner takes; which ones follows in order.
"""

import dataclasses
import functools
import hashlib
import json
from typing import TYPE_CHECKING

from dmuon_jax.layout import LeafLayout, leaf_layout
from dmuon_jax.matrices import Axes, Leaf, MeshShape, oriented
from dmuon_jax.planning import report
from dmuon_jax.planning.buffers import route
from dmuon_jax.planning.groups import Bucket, Group
from dmuon_jax.planning.leaf_checks import check_dtype, check_leaf
from dmuon_jax.planning.plan_json import read, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 3


@dataclasses.dataclass(frozen=True)
class Alternative:
    """What a plan with other ``owner_axes`` would cost: times as in ``Plan``."""

    owner_axes: Axes
    makespan_us: float
    exchange_us: float

    @property
    def objective_us(self) -> float:
        return self.makespan_us + self.exchange_us


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static schedule of one optimizer step.

    Attributes:
      mesh: axes of the mesh that it was made for.
      owner_axes: axes over which owners are spread.
      leaves: the leaves that Muon updates.
      groups: exchange groups.
      buckets: NS batches.
      owner_load_us: modelled NS time of each device, row-major over the mesh.
      exchange_us: modelled time of the exchange, if nothing hid it.
      lower_bound_us: proven bound on makespan plus exchange.
      gap: (makespan + exchange - bound) / (makespan + exchange), 0 if both are 0.
      status: a sentence on how the plan was found.
      costs: where the times of the owners' work come from.
      alternatives: other ``owner_axes`` that were priced beside this plan's.
      bounded: whether waves bound memory: each starts only when the last but one has
        ended.
    """

    mesh: MeshShape
    owner_axes: Axes
    leaves: tuple[Leaf, ...]
    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]
    owner_load_us: tuple[float, ...]
    exchange_us: float
    lower_bound_us: float
    gap: float
    status: str
    costs: str = ""
    alternatives: tuple[Alternative, ...] = ()
    bounded: bool = False

    def __post_init__(self):
        check_plan(self)

    @functools.cached_property
    def layouts(self) -> tuple[LeafLayout, ...]:
        """The layout of each leaf."""
        return tuple(leaf_layout(x, self.mesh, self.owner_axes) for x in self.leaves)

    def group_layout(self, group: Group):
        """The layout that the leaves of ``group`` share."""
        return self.layouts[group.leaves[0]].layout

    @functools.cached_property
    def waves(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """For each wave its buffers, and for each buffer its parts (group, part)."""
        found: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(self.num_waves)]
        for number, group in enumerate(self.groups):
            for part, item in enumerate(group.parts):
                found[item.wave].setdefault(group.buffer, []).append((number, part))
        return tuple(tuple(map(tuple, buffers.values())) for buffers in found)

    @property
    def num_waves(self) -> int:
        return 1 + max((x.wave for group in self.groups for x in group.parts), default=0)

    def wave_of(self, bucket: Bucket) -> int:
        """The wave of the parts that feed ``bucket``."""
        first = bucket.members[0]
        return self.groups[first.group].parts[first.part].wave

    @property
    def makespan_us(self) -> float:
        """Modelled NS time of the busiest device."""
        return max(self.owner_load_us, default=0.0)

    @property
    def objective_us(self) -> float:
        """Makespan plus exchange: what a planner makes small."""
        return self.makespan_us + self.exchange_us

    @property
    def idle_share(self) -> float:
        """Share of what devices could do, while the busiest works, that is not needed."""
        return report.idle_share(self)

    @property
    def num_matrices(self) -> int:
        return sum(x.num_parcels * len(x.matrix_shapes) for x in self.leaves)

    def digest(self) -> str:
        """A hash that is equal on processes that hold the same plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def exchange_bytes(self) -> "report.ExchangeBytes":
        """What the exchange of one step moves, in buffer bytes per device."""
        return report.exchange_bytes(self)

    def to_json(self) -> str:
        """The plan as JSON text; ``Plan.from_json`` reads it back."""
        data = dataclasses.asdict(self)
        return json.dumps({"format": FORMAT, **data}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads ``to_json``'s text.

        Raises:
          ValueError: if the text is not a plan, is of another format, or breaks a rule.
        """
        return plan_from_json(text)

    def summary(self) -> str:
        """The plan as a readable table."""
        return report.summary(self)

    def plot(self) -> "Figure":
        """The load of each owner as stacked bars, coloured by shape of matrix.

        Returns:
          A matplotlib figure, which must be installed.
        """
        from dmuon_jax.plan_plot import plan_figure

        return plan_figure(self)


def check_plan(plan: Plan) -> None:
    """Raises ``ValueError`` unless every parcel has exactly one owner and one place."""
    times = (*plan.owner_load_us, plan.exchange_us, plan.lower_bound_us, plan.gap)
    if min(times) < 0:
        raise ValueError(f"times and gap must not be negative, got {min(times)}")
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
    placed = sorted(index for group in plan.groups for index in group.leaves)
    if placed != list(range(len(plan.leaves))):
        raise ValueError(f"groups must hold each leaf once, got positions {placed}")
    for group in plan.groups:
        check_group(plan, group)
    check_buffers(plan)
    pieces = sorted((m.group, m.part, m.piece) for b in plan.buckets for m in b.members)
    wanted = [
        (index, part, piece)
        for index, group in enumerate(plan.groups)
        for part in range(len(group.parts))
        for piece in range(len(plan.leaves[group.leaves[0]].matrix_shapes))
    ]
    if pieces != wanted:
        raise ValueError(f"buckets must hold each piece of a part once, got {pieces}")
    for bucket in plan.buckets:
        check_bucket(plan, bucket)


def check_group(plan: Plan, group: Group) -> None:
    layouts = [plan.layouts[index] for index in group.leaves]
    paths = [plan.leaves[index].path for index in group.leaves]
    check_dtype("exchange_dtype", group.exchange_dtype)
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


def check_buffers(plan: Plan) -> None:
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


def check_bucket(plan: Plan, bucket: Bucket) -> None:
    where = f"in the bucket of {bucket.shape}"
    check_dtype("compute_dtype", bucket.compute_dtype)
    if bucket.method not in ("direct", "gram"):
        raise ValueError(
            f"method must be direct or gram, got {bucket.method!r} {where}"
        )
    layouts = [plan.group_layout(plan.groups[m.group]) for m in bucket.members]
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


def plan_from_json(text: str) -> Plan:
    data = read_json(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"a plan must have format {FORMAT}, got {found!r}")
    del data["format"]
    return read(Plan, data, "a plan")
