"""Runs a function of matrices on their owners: exchange, compute, exchange back."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dmuon_jax.blocks import unpack_all
from dmuon_jax.exchange import Cargo, from_owners, to_owners
from dmuon_jax.matrices import Leaf, Piece
from dmuon_jax.planning.groups import Bucket
from dmuon_jax.planning.plan import Plan
from dmuon_jax.scales import restored
from dmuon_jax.shardings import partition_spec

MatrixFn = Callable[[jax.Array, jax.Array | None, Bucket, Any], jax.Array]
"""``(x, exponent, bucket, operands) -> [batch, s, l]``: each matrix of x ``[batch, s, l]`` on
its own, zeros to zeros; with an exponent, int32 ``[batch, 1, 1]``, the matrices are
``x * 2^exponent``."""

BucketFn = Callable[[jax.Array, jax.Array | None, Bucket], jax.Array]


def map_owners(
    fn: MatrixFn,
    arrays: Sequence[jax.Array],
    plan: Plan,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    operands: Any = None,
) -> list[jax.Array]:
    """Applies ``fn`` to every matrix of every leaf, each on its owner.

    Args:
      fn: the function; gets oriented matrices, in the dtype they travelled in or wider.
      arrays: one per ``plan.leaves``, float32 or wider, in the momentum's sharding.
      plan: the plan.
      mesh: the mesh that carries them; None where there is only one device.
      operands: a tree of replicated arrays that ``fn`` gets as its last argument.

    Returns:
      One array per leaf, in the parameter's sharding and the dtype of its input.
    """

    def body(operands, *blocks):
        bound = functools.partial(call_last, fn, operands)
        return tuple(owner_step(bound, blocks, plan))

    if mesh is None:
        return list(body(operands, *arrays))
    specs_in = tuple(partition_spec(x.leaf.spec_in) for x in plan.layouts)
    specs_out = tuple(partition_spec(x.leaf.spec_out) for x in plan.layouts)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(PartitionSpec(), *specs_in), out_specs=specs_out
    )
    return list(mapped(operands, *arrays))


def call_last(
    fn: MatrixFn,
    operands: Any,
    x: jax.Array,
    exponent: jax.Array | None,
    bucket: Bucket,
) -> jax.Array:
    return fn(x, exponent, bucket, operands)


def owner_step(
    fn: BucketFn,
    blocks: Sequence[jax.Array],
    plan: Plan,
) -> list[jax.Array]:
    """What one device does with its blocks, wave after wave."""
    returned: dict[tuple[int, int], jax.Array] = {}
    ended: list[list[jax.Array]] = []
    for wave, buffers in enumerate(plan.waves):
        # Where memory is bounded two waves are under way at most: one starts when the
        # last but one ends. Else the compiler may start all at once.
        before = ended[wave - 2] if plan.bounded and wave > 1 else []
        arrived: dict[tuple[int, int], tuple[jax.Array, jax.Array | None]] = {}
        for parts in buffers:
            arrived |= zip(parts, arrive(blocks, plan, parts, before), strict=True)
        pieces = iterate(fn, arrived, plan, wave)
        ended.append([])
        for parts in buffers:
            with jax.named_scope("from_owners"):
                parcels = [assemble(pieces[x], group_leaf(plan, x[0])) for x in parts]
                back = from_owners(parcels, [cargo(plan, *x) for x in parts])
            returned |= zip(parts, back, strict=True)
            ended[wave] += back
    results: list[jax.Array] = list(blocks)
    for number, group in enumerate(plan.groups):
        layouts = [plan.layouts[i] for i in group.leaves]
        parts = [returned[number, part] for part in range(len(group.parts))]
        with jax.named_scope("from_owners"):
            back = unpack_all(parts, layouts, group.counts)
        for index, block in zip(group.leaves, back, strict=True):
            results[index] = block.astype(blocks[index].dtype)
    return results


def cargo(plan: Plan, number: int, part: int) -> Cargo:
    """One part of a group, as it travels."""
    group = plan.groups[number]
    layouts = tuple(plan.layouts[i] for i in group.leaves)
    return Cargo(layouts, group.counts, group.part_slots(part), group.exchange_dtype)


def after(x: jax.Array, done: Sequence[jax.Array]) -> jax.Array:
    """``x``, bit for bit, in a way that cannot be computed before ``done``.

    Compilers drop ``optimization_barrier`` before they schedule. This factor of 1 is one
    that they do not see through: no bit is set and clear at once.
    """
    one = jnp.ones((), x.dtype)
    for block in done:
        bits = jnp.int32(jnp.signbit(block.real.reshape(-1)[0]))
        one = one * (1 + ((bits & 1) * ((bits ^ 1) & 1)).astype(x.dtype))
    return x * one


def arrive(
    blocks: Sequence[jax.Array],
    plan: Plan,
    parts: Sequence[tuple[int, int]],
    before: Sequence[jax.Array],
) -> list[tuple[jax.Array, jax.Array | None]]:
    """The parts (group, part) of a buffer on their owners, sent after ``before``."""
    with jax.named_scope("to_owners"):
        sent = [
            [after(blocks[i], before) for i in plan.groups[number].leaves]
            for number, _ in parts
        ]
        return to_owners(sent, [cargo(plan, *x) for x in parts])


def iterate(
    fn: BucketFn,
    arrived: Mapping[tuple[int, int], tuple[jax.Array, jax.Array | None]],
    plan: Plan,
    wave: int,
) -> dict[tuple[int, int], list[jax.Array]]:
    """The buckets of one wave: results of each part (group, part), by piece."""
    pieces = {}
    for position, bucket in enumerate(plan.buckets):
        if plan.wave_of(bucket) != wave:
            continue
        stacks, exponents = [], []
        for m in bucket.members:
            parcels, exponent = arrived[m.group, m.part]
            stacks.append(cut(parcels, group_leaf(plan, m.group), m.piece))
            exponents.append(exponent)
        with jax.named_scope(f"newton_schulz/bucket{position}"):
            done = run_bucket(fn, bucket, plan, stacks, exponents)
        for m, result in zip(bucket.members, done, strict=True):
            pieces[m.group, m.part, m.piece] = result
    return {
        (number, part): [
            pieces[number, part, piece]
            for piece in range(len(group_leaf(plan, number).matrix_shapes))
        ]
        for number, part in arrived
    }


def group_leaf(plan: Plan, group: int) -> Leaf:
    return plan.leaves[plan.groups[group].leaves[0]]


def run_bucket(
    fn: BucketFn,
    bucket: Bucket,
    plan: Plan,
    stacks: Sequence[jax.Array],
    exponents: Sequence[jax.Array | None],
) -> list[jax.Array]:
    """``fn`` on the matrices of a bucket that this device computes; EMPTY ones are zero.

    Args:
      fn: the function.
      bucket: the bucket.
      plan: its plan.
      stacks: ``[slots, s, l]`` of each member.
      exponents: see ``to_owners``, of each member.

    Returns:
      Arrays shaped like ``stacks``, in the dtype that ``fn`` gives.
    """
    if any(exponent is None for exponent in exponents):
        stacks = [restored(x, e) for x, e in zip(stacks, exponents, strict=True)]
        exponents = ()
    dtype = jnp.result_type(*stacks)
    stacks = [x.astype(dtype) for x in stacks]

    def batch_of(counts, stacks, exponents):
        batch = [x[:count] for x, count in zip(stacks, counts, strict=True)]
        scales = [e[:count] for e, count in zip(exponents, counts, strict=False)]
        return jnp.concatenate(batch), jnp.concatenate(scales) if scales else None

    def branch(counts):
        def compute(stacks, exponents):
            if not sum(counts):
                return tuple(jnp.zeros_like(x, result.dtype) for x in stacks)
            done = fn(*batch_of(counts, stacks, exponents), bucket)
            ends = [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
            return tuple(
                jnp.pad(part, ((0, len(x) - len(part)), (0, 0), (0, 0)))
                for part, x in zip(jnp.split(done, ends), stacks, strict=True)
            )

        return compute

    most = max(bucket.branches, key=sum)
    result = jax.eval_shape(
        lambda stacks, exponents: fn(*batch_of(most, stacks, exponents), bucket),
        stacks,
        exponents,
    )
    computes = [branch(counts) for counts in bucket.branches]
    if len(computes) == 1:
        return list(computes[0](stacks, exponents))
    layout = plan.group_layout(plan.groups[bucket.members[0].group])
    index = jnp.asarray(bucket.branch_of)[jax.lax.axis_index(layout.varying)]
    return list(jax.lax.switch(index, computes, stacks, exponents))


def cut(parcels: jax.Array, leaf: Leaf, piece: int) -> jax.Array:
    """One piece of each parcel, oriented: ``[slots, s, l]``."""
    if leaf.pieces:
        part = leaf.pieces[piece]
        parcels = parcels[(slice(None), *piece_index(part))]
    return transpose(parcels) if parcels.shape[-2] > parcels.shape[-1] else parcels


def assemble(parts: Sequence[jax.Array], leaf: Leaf) -> jax.Array:
    """Undoes ``cut`` for all pieces: ``[slots, fan_in, fan_out]``."""
    shapes = leaf.matrix_shapes
    parts = [
        transpose(part) if shape[0] > shape[1] else part
        for part, shape in zip(parts, shapes, strict=True)
    ]
    if not leaf.pieces:
        return parts[0]
    whole = jnp.zeros((len(parts[0]), *leaf.parcel_shape), parts[0].dtype)
    for part, piece in zip(parts, leaf.pieces, strict=True):
        whole = whole.at[(slice(None), *piece_index(piece))].set(part)
    return whole


def piece_index(piece: Piece) -> tuple[slice, slice]:
    stop = piece.start + (piece.size - 1) * piece.stride + 1
    cut_ = slice(piece.start, stop, piece.stride)
    return (cut_, slice(None)) if piece.axis == 0 else (slice(None), cut_)


def transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)
