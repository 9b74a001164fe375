"""What a plan is made of: exchange groups in parts, and buckets. Frozen data."""

import dataclasses
from typing import Literal

Method = Literal["direct", "gram"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Slots of a group that travel together, by one collective each way.

    Attributes:
      slots: how many of every owner's, following those of the parts before.
      wave: the wave that they belong to.
    """

    slots: int
    wave: int = 0


@dataclasses.dataclass(frozen=True)
class Group:
    """An exchange group: parcels with one layout.

    Attributes:
      leaves: positions of its leaves in ``Plan.leaves``.
      exchange_dtype: dtype in which blocks travel.
      counts: parcels on each free owner, row-major over the layout's free axes. Every
        owner has ``max(counts)`` slots; those beyond its count are EMPTY.
      parts: its slots, by what travels together.
      buffer: groups with one number never have parcels on one owner, and what they send
        in a wave lies in one buffer: an owner's row of it holds the slots of whichever
        group it has parcels of.
    """

    leaves: tuple[int, ...]
    exchange_dtype: str
    counts: tuple[int, ...]
    parts: tuple[Part, ...]
    buffer: int

    @property
    def slots(self) -> int:
        """Slots of every owner."""
        return max(self.counts)

    def part_slots(self, part: int) -> slice:
        """The slots of one part."""
        start = sum(x.slots for x in self.parts[:part])
        return slice(start, start + self.parts[part].slots)

    def part_counts(self, part: int) -> tuple[int, ...]:
        """Parcels on each free owner in one part."""
        slots = self.part_slots(part)
        return tuple(
            min(max(count - slots.start, 0), self.parts[part].slots)
            for count in self.counts
        )


@dataclasses.dataclass(frozen=True)
class Member:
    """One piece of every parcel of a part of a group, in a bucket."""

    group: int
    piece: int
    part: int = 0


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
