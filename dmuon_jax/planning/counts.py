"""The numbers of matrices that devices compute: the branches of a bucket."""

import itertools
from collections.abc import Sequence
from typing import Any

from dmuon_jax.layout import Layout


def branches(
    counts: Sequence[tuple[int, ...]], layouts: Sequence[Layout], limit: int
) -> dict[str, Any]:
    """The count patterns that the devices of a bucket compute, at most ``limit``.

    With more patterns than that, patterns are merged into their maxima: a device may
    compute some EMPTY slots.
    """
    mesh, varying = layouts[0].mesh, layouts[0].varying
    sizes = [range(mesh.size((name,))) for name in varying]
    patterns = []
    for place in itertools.product(*sizes):
        coordinates = dict(zip(varying, place, strict=True))
        patterns.append(
            tuple(
                owned[mesh.index(coordinates, layout.free)]
                for owned, layout in zip(counts, layouts, strict=True)
            )
        )
    kept = sorted(set(patterns), reverse=True)
    cover = {pattern: pattern for pattern in kept}
    while len(kept) > limit:
        kept, cover = merge_closest(kept, cover, patterns)
    return {
        "branches": tuple(kept),
        "branch_of": tuple(kept.index(cover[pattern]) for pattern in patterns),
        "padded": any(cover[pattern] != pattern for pattern in patterns),
    }


def merge_closest(
    kept: list[tuple[int, ...]],
    cover: dict[tuple[int, ...], tuple[int, ...]],
    patterns: list[tuple[int, ...]],
) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], tuple[int, ...]]]:
    """Replaces the two patterns whose common maximum adds the least work."""

    def joined(a, b):
        return tuple(map(max, a, b))

    def added(pair):
        top = sum(joined(*pair))
        users = [sum(cover[p]) for p in patterns if cover[p] in pair]
        return top * len(users) - sum(users), pair

    first, second = min(itertools.combinations(kept, 2), key=added)
    top = joined(first, second)
    cover = {p: top if c in (first, second) else c for p, c in cover.items()}
    kept = sorted({c for c in cover.values()}, reverse=True)
    return kept, cover
