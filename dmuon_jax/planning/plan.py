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
from dmuon_jax.matrices import Axes, Leaf, MeshShape
from dmuon_jax.planning import report
from dmuon_jax.planning.groups import Bucket, Group
from dmuon_jax.planning.plan_json import read, read_json
from dmuon_jax.planning.rules import check_plan

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
          TypeError: if ``text`` is no string.
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


def plan_from_json(text: str) -> Plan:
    data = read_json(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"a plan must have format {FORMAT}, got {found!r}")
    del data["format"]
    return read(Plan, data, "a plan")
