"""The plan: who orthogonalizes what, and how. Static, hashable, JSON both ways.

No arrays and no devices. Parcels of one exchange group are interchangeable, so the plan
says only *how many* parcels each free owner takes; which ones follows in order.
"""

import dataclasses
import functools
import hashlib
import json
from typing import TYPE_CHECKING, Literal

from dmuon_jax.layout import LeafLayout, leaf_layout
from dmuon_jax.matrices import Axes, Leaf, MeshShape, oriented
from dmuon_jax.planning import report
from dmuon_jax.planning.leaf_checks import check_dtype, check_leaf
from dmuon_jax.planning.plan_json import read, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Method = Literal["direct", "gram"]
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Group:
    """An exchange group: parcels with one layout, moved by one collective each way.

    Attributes:
      leaves: positions of its leaves in ``Plan.leaves``.
      exchange_dtype: dtype in which blocks travel.
      counts: parcels on each free owner, row-major over the layout's free axes. Every
        owner has ``max(counts)`` slots; those beyond its count are EMPTY.
      wave: waves are worked through one after another, to bound memory.
    """

    leaves: tuple[int, ...]
    exchange_dtype: str
    counts: tuple[int, ...]
    wave: int = 0

    @property
    def slots(self) -> int:
        """Slots of every owner."""
        return max(self.counts)


@dataclasses.dataclass(frozen=True)
class Member:
    """One piece of every parcel of a group, in a bucket."""

    group: int
    piece: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Matrices of one oriented shape and dtype, orthogonalized together on each owner.

    Attributes:
      shape: (short side, long side).
      compute_dtype: dtype in which the matrices are iterated.
      method: form of the iteration.
      members: where its matrices come from, stacked in this order.
      branches: the distinct numbers of matrices that a device computes of each member;
        a device takes the branch ``branch_of[owner]``. One branch means no conditional.
      branch_of: branch index of each device, row-major over the bucket's varying axes.
      padded: whether some device computes EMPTY slots.
    """

    shape: tuple[int, int]
    compute_dtype: str
    method: Method
    members: tuple[Member, ...]
    branches: tuple[tuple[int, ...], ...]
    branch_of: tuple[int, ...]
    padded: bool = False


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

    def __post_init__(self):
        check_plan(self)

    @functools.cached_property
    def layouts(self) -> tuple[LeafLayout, ...]:
        """The layout of each leaf."""
        return tuple(leaf_layout(x, self.mesh, self.owner_axes) for x in self.leaves)

    def group_layout(self, group: Group):
        """The layout that the leaves of ``group`` share."""
        return self.layouts[group.leaves[0]].layout

    @property
    def num_waves(self) -> int:
        return 1 + max((group.wave for group in self.groups), default=0)

    def wave_of(self, bucket: Bucket) -> int:
        """The wave of the groups that feed ``bucket``."""
        return self.groups[bucket.members[0].group].wave

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
    waves = {group.wave for group in plan.groups}
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
    pieces = sorted((m.group, m.piece) for b in plan.buckets for m in b.members)
    wanted = [
        (index, piece)
        for index, group in enumerate(plan.groups)
        for piece in range(len(plan.leaves[group.leaves[0]].matrix_shapes))
    ]
    if pieces != wanted:
        raise ValueError(f"buckets must hold each piece once, got {pieces}")
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
        if plan.groups[member.group].wave != plan.wave_of(bucket):
            raise ValueError(f"members must be of one wave {where}")
    varying = layouts[0].varying
    places = range(len(bucket.branches))
    if any(branch not in places for branch in bucket.branch_of):
        raise ValueError(f"branch_of must name branches, got {bucket.branch_of} {where}")
    if len(bucket.branch_of) != plan.mesh.size(varying):
        raise ValueError(f"branch_of must have an entry for each device {where}")
    for device in range(plan.mesh.num_devices):
        place = plan.mesh.coordinates(device)
        branch = bucket.branches[bucket.branch_of[plan.mesh.index(place, varying)]]
        for member, layout, computed in zip(
            bucket.members, layouts, branch, strict=True
        ):
            group = plan.groups[member.group]
            count = group.counts[plan.mesh.index(place, layout.free)]
            if not count <= computed <= group.slots:
                raise ValueError(
                    f"a branch must compute every matrix that its device owns, got "
                    f"{computed} for {count} of at most {group.slots} {where}"
                )


def plan_from_json(text: str) -> Plan:
    data = read_json(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"a plan must have format {FORMAT}, got {found!r}")
    del data["format"]
    return read(Plan, data, "a plan")
