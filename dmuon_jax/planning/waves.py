"""Waves that bound memory: which leaves are on their owners at the same time."""

import math
from collections.abc import Sequence

from dmuon_jax.layout import Layout, LeafLayout
from dmuon_jax.matrices import MeshShape
from dmuon_jax.planning.problem import MemoryLimitError, Task


def assign_waves(layouts: Sequence[LeafLayout], limit: int | None) -> list[int]:
    """The wave of each leaf: leaves of one layout together, each wave up to ``limit``.

    Raises:
      ValueError: if one leaf alone is above the limit.
    """
    if limit is None:
        return [0] * len(layouts)
    first: dict[Layout, int] = {}
    for index, item in enumerate(layouts):
        first.setdefault(item.layout, index)
    waves, wave = [0] * len(layouts), 0
    cores: dict[Layout, int] = {}

    def held(added: LeafLayout) -> int:
        """Bytes of a wave's slots, were ``added`` one of its leaves."""
        together = {**cores, added.layout: cores.get(added.layout, 0) + added.core}
        return sum(
            4 * -(-core // layout.num_owners) * math.prod(layout.parcel_shape)
            for layout, core in together.items()
        )

    for index in sorted(range(len(layouts)), key=lambda i: first[layouts[i].layout]):
        item = layouts[index]
        if cores and held(item) > limit:
            wave, cores = wave + 1, {}
        if held(item) > limit:
            raise MemoryLimitError(
                f"max_wave_bytes must hold the share of each leaf, {held(item)} bytes, got "
                f"{limit} at {item.leaf.path}"
            )
        waves[index] = wave
        cores[item.layout] = cores.get(item.layout, 0) + item.core
    return waves


def owner_limit(
    tasks: Sequence[Task],
    mesh: MeshShape,
    max_wave_bytes: int | None,
    max_owner_bytes: int | None,
) -> int | None:
    """Limit on an owner's slots; waves of limited size leave room for an even spread only."""
    if max_wave_bytes is None:
        return max_owner_bytes
    even = sum(
        -(-task.num_parcels // mesh.size(task.free_axes)) * task.parcel_bytes
        for task in tasks
    )
    return even if max_owner_bytes is None else min(max_owner_bytes, even)
