"""What a plan says a compiled update must do, to compare an audit with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dmuon_jax.planning.cost import iteration_flops
from dmuon_jax.planning.groups import Bucket
from dmuon_jax.planning.plan import Plan
from dmuon_jax.proof.flops import Conditional

TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Expected:
    """Figures of one device and one step.

    Attributes:
      ideal_flops: matmul FLOPs if every matrix were orthogonalized once, spread evenly
        over the owners.
      exchange_bytes: buffer bytes of the exchange.
      branch_flops: FLOPs of each branch of the buckets that have several.
      branch_shares: share of the devices that run each of those branches.
    """

    ideal_flops: float
    exchange_bytes: int
    branch_flops: tuple[tuple[float, ...], ...]
    branch_shares: tuple[tuple[float, ...], ...]

    def weights(
        self, conditionals: tuple[Conditional, ...]
    ) -> Mapping[str, tuple[float, ...]]:
        """Weights for the conditionals that belong to a bucket, by name.

        A conditional belongs to the first bucket whose branches cost the same up to
        the few FLOPs that norms add; each bucket has one conditional.
        """
        found = {}
        left = list(zip(self.branch_flops, self.branch_shares, strict=True))
        for item in conditionals:
            for number, (flops, shares) in enumerate(left):
                if alike(item.branches, flops):
                    found[item.name] = shares
                    del left[number]
                    break
        return found


def alike(found: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    """Whether branch costs agree within `TOLERANCE` of the largest."""
    if len(found) != len(expected):
        return False
    slack = TOLERANCE * max(expected)
    return all(abs(a - b) <= slack for a, b in zip(found, expected, strict=True))


def bucket_branches(bucket: Bucket, matrix_flops: float) -> tuple[float, ...]:
    """FLOPs of each branch of a bucket."""
    return tuple(sum(counts) * matrix_flops for counts in bucket.branches)


def shares(bucket: Bucket) -> tuple[float, ...]:
    """Share of devices on each branch of a bucket."""
    total = len(bucket.branch_of)
    numbers = range(len(bucket.branches))
    return tuple(bucket.branch_of.count(number) / total for number in numbers)


def expect(
    plan: Plan, *, steps: int = 5, restarts: int = 1, symmetric: bool = False
) -> Expected:
    """The figures of a plan.

    Args:
      plan: of the update.
      steps: Newton-Schulz steps.
      restarts: restarts of the Gram form.
      symmetric: whether kernels compute half of symmetric products. Products inside
        custom kernels are not in a program's text; see `kernel_flops` of `audit`.
    """
    useful = 0.0
    several: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for bucket in plan.buckets:
        flops = iteration_flops(
            bucket.shape,
            bucket.method,
            steps=steps,
            restarts=restarts,
            symmetric=symmetric,
        )
        for member in bucket.members:
            leaves = plan.groups[member.group].leaves
            useful += flops * sum(plan.leaves[i].num_parcels for i in leaves)
        if len(bucket.branches) > 1:
            several.append((bucket_branches(bucket, flops), shares(bucket)))
    return Expected(
        ideal_flops=useful / plan.mesh.size(plan.owner_axes),
        exchange_bytes=plan.exchange_bytes.total,
        branch_flops=tuple(flops for flops, _ in several),
        branch_shares=tuple(share for _, share in several),
    )
