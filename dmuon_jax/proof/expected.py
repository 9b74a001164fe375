"""What a plan says a compiled update must do, to compare an audit with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from dmuon_jax.planning.cost import iteration_flops
from dmuon_jax.planning.groups import Bucket
from dmuon_jax.planning.plan import Plan
from dmuon_jax.proof.flops import Conditional
from dmuon_jax.proof.hlo import Module

# The switch of a bucket stands in the scope that `owners.iterate` gives it, directly:
# what its branches hold has longer paths.
SWITCH = re.compile(r"\bnewton_schulz/bucket(\d+)/[^/]+$")
# Kernels that compute half of a product; see `own_kernels`.
HALF = re.compile(r"\bnewton_schulz/bucket(\d+)/(?:.*/)?(?:gram|symmetric_matmul)/")


@dataclasses.dataclass(frozen=True)
class Expected:
    """Figures of one device and one step.

    Attributes:
      ideal_flops: matmul FLOPs if every matrix were orthogonalized once, spread evenly
        over the owners.
      exchange_bytes: buffer bytes of the exchange.
    """

    ideal_flops: float
    exchange_bytes: int


def expect(
    plan: Plan, *, steps: int = 5, restarts: int = 1, halved: Collection[int] = ()
) -> Expected:
    """The figures of a plan.

    Args:
      plan: of the update.
      steps: Newton-Schulz steps.
      restarts: restarts of the Gram form.
      halved: positions of the buckets whose kernels compute half of symmetric products.
    """
    useful = 0.0
    for number, bucket in enumerate(plan.buckets):
        flops = iteration_flops(
            bucket.shape,
            bucket.method,
            steps=steps,
            restarts=restarts,
            symmetric=number in halved,
        )
        for member in bucket.members:
            group = plan.groups[member.group]
            share = sum(group.part_counts(member.part)) / sum(group.counts)
            parcels = sum(plan.leaves[i].num_parcels for i in group.leaves)
            useful += flops * parcels * share
    return Expected(
        ideal_flops=useful / plan.mesh.size(plan.owner_axes),
        exchange_bytes=plan.exchange_bytes.total,
    )


def halved_buckets(module: Module) -> frozenset[int]:
    """Positions of the buckets whose symmetric products are this package's kernels."""
    found = (
        HALF.search(item.op_name)
        for computation in module.computations.values()
        for item in computation.instructions
        if item.opcode == "custom-call"
    )
    return frozenset(int(match.group(1)) for match in found if match)


def device_branches(plan: Plan, bucket: Bucket) -> tuple[int, ...]:
    """The branch of a bucket that each device runs, row-major over the mesh."""
    varying = plan.group_layout(plan.groups[bucket.members[0].group]).varying
    places = map(plan.mesh.coordinates, range(plan.mesh.num_devices))
    return tuple(bucket.branch_of[plan.mesh.index(place, varying)] for place in places)


def told_branches(module: Module, plan: Plan) -> dict[str, tuple[int, ...]]:
    """The branch that each device runs, by name of conditional.

    Conditionals that are no bucket's switch are left out.

    Args:
      module: the program.
      plan: of the update in it.

    Raises:
      ValueError: a bucket of the program is none of the plan's, or has other branches.
    """
    found, wrong = {}, []
    for computation in module.computations.values():
        for item in computation.instructions:
            match = (
                SWITCH.search(item.op_name) if item.opcode == "conditional" else None
            )
            if match is None:
                continue
            number = int(match.group(1))
            branches = 0
            if number < len(plan.buckets):
                branches = len(plan.buckets[number].branches)
                found[item.name] = device_branches(plan, plan.buckets[number])
            if branches != len(item.branches):
                wrong.append(
                    f"bucket {number} has {branches} branches, the program's "
                    f"{len(item.branches)}, at {item.name}"
                )
    if wrong:
        raise ValueError("plan must be that of the program: " + "; ".join(wrong))
    return found


def weights(
    conditionals: Sequence[Conditional], told: Mapping[str, Sequence[int]]
) -> dict[str, tuple[float, ...]]:
    """The share of devices on each branch, by name of conditional.

    Args:
      conditionals: of a program; those that are not told are left out.
      told: the branch of each device, by name of conditional.
    """
    return {
        item.name: tuple(
            told[item.name].count(number) / len(told[item.name])
            for number in range(len(item.branches))
        )
        for item in conditionals
        if item.name in told
    }
