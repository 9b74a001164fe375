"""The exchange: blocks of leaves to whole parcels on owners, and back.

Runs inside ``jax.shard_map``. The only module that calls collectives: for each part of an
exchange group at most one all-to-all and one all-gather each way (the table is in
``layout.py``).

Array dimensions here are ``[one per mesh axis ..., slot, block ...]``; the names of the
leading ones are carried beside the array.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dmuon_jax.layout import Layout, LeafLayout, Side
from dmuon_jax.matrices import Axes
from dmuon_jax.scales import power_of_two


def to_owners(
    blocks: Sequence[jax.Array],
    leaves: Sequence[LeafLayout],
    counts: Sequence[int],
    slots: slice,
    dtype: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Brings parcels of one exchange group whole to their owners.

    Args:
      blocks: the local block of each leaf, in the momentum's sharding.
      leaves: their layouts, equal but for batch dimensions.
      counts: parcels on each free owner.
      slots: which of the owners' slots, ``max(counts)`` in all.
      dtype: dtype in which blocks travel.

    Returns:
      ``x`` ``[slots, fan_in, fan_out]``, those of this device, EMPTY ones zero; and
      either None or int32 exponents ``e`` ``[slots, 1, 1]``: the parcels are then
      ``x * 2^e``, with the largest entry of each x in [1/2, 1).
    """
    layout = leaves[0].layout
    side = layout.side("in")
    packed = [pack(x, leaf) for x, leaf in zip(blocks, leaves, strict=True)]
    x = deal(packed, layout, counts, slots)

    if not side.travels or x.dtype == jnp.dtype(dtype):
        return join(move(x, side), side), None
    if dtype != "float16":
        return join(move(x.astype(dtype), side), side), None
    # Leaf by leaf, so that it can be one pass with what makes a leaf's block.
    tops = [jnp.max(jnp.abs(x), axis=-1, keepdims=True) for x in packed]
    sent = encode(x, deal(tops, layout, counts, slots), len(side.dims))
    x, exponent = align(move(sent, side), side)
    return join(x, side), exponent


def deal(
    packed: Sequence[jax.Array], layout: Layout, counts: Sequence[int], slots: slice
) -> jax.Array:
    """What ``pack`` gave of each leaf as this device sends it, for some slots of owners.

    Returns:
      ``[exchanged, slot, *parcel block]``.
    """
    side = layout.side("in")
    x = spread(jnp.concatenate(packed, axis=1), counts)[:, :, slots]
    names = layout.forced_out + layout.free
    x = x.reshape(*sizes(side, names), *x.shape[2:])
    x = reorder(x, names, side.sliced + side.exchanged)
    return take_own(x, side.sliced, side)


def from_owners(parcels: jax.Array, layout: Layout, dtype: str) -> jax.Array:
    """Brings blocks of parcels from their owners to where the parameter has them.

    Args:
      parcels: ``[slots, fan_in, fan_out]``, some of this device's slots.
      layout: the layout of their group.
      dtype: dtype in which blocks travel.

    Returns:
      ``[forced, owner, slot, *block]``: what ``unpack_all`` takes.
    """
    side = layout.side("out")
    x = take_own(split(parcels, side), side.sliced, side)

    if not side.travels or x.dtype == jnp.dtype(dtype):
        x = move(x, side)
    elif dtype != "float16":
        x = move(x.astype(dtype), side)
    else:
        sent = encode(x, jnp.abs(x), len(side.dims))
        x, exponent = decode(move(sent, side), side)
        x = power_of_two(x.astype(jnp.float32), exponent)
    names = layout.forced_in + layout.free
    x = reorder(x, side.gathered + side.exchanged, names)
    forced = side.mesh.size(layout.forced_in)
    return x.reshape(forced, layout.num_owners, *x.shape[len(names) :])


def unpack_all(
    parts: Sequence[jax.Array], leaves: Sequence[LeafLayout], counts: Sequence[int]
) -> list[jax.Array]:
    """Each leaf's block, in the parameter's sharding: undoes ``to_owners``.

    Args:
      parts: what ``from_owners`` gives, all slots of the group in order.
      leaves: layouts of the group's leaves.
      counts: parcels on each free owner.
    """
    x = collect(jnp.concatenate(parts, axis=2), counts)
    ends = list(itertools.accumulate(leaf.core for leaf in leaves))
    parts = jnp.split(x, ends[:-1], axis=1)
    return [unpack(part, leaf) for part, leaf in zip(parts, leaves, strict=True)]


def pack(block: jax.Array, leaf: LeafLayout) -> jax.Array:
    """A local block as ``[forced, core, *parcel block]`` for the other side's forced axes."""
    mesh = leaf.layout.mesh
    forced = leaf.layout.forced_out
    order = local_order(leaf, "in")
    x = jnp.transpose(block, leaf.leaf.batch_axes + matrix_axes(leaf))
    block_shape = x.shape[len(leaf.batch) :]
    shape = [mesh.size((name,)) if isinstance(name, str) else name for name in order]
    x = x.reshape(*shape, *block_shape)
    front = [order.index(name) for name in forced]
    rest = [i for i, name in enumerate(order) if not isinstance(name, str)]
    tail = range(len(order), x.ndim)
    x = jnp.transpose(x, (*front, *rest, *tail))
    return x.reshape(mesh.size(forced), leaf.core, *block_shape)


def unpack(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    """Undoes ``pack`` on the way out: ``[forced, core, *parcel block]`` to a block."""
    mesh = leaf.layout.mesh
    forced = leaf.layout.forced_in
    order = local_order(leaf, "out")
    block_shape = x.shape[2:]
    rests = [name for name in order if not isinstance(name, str)]
    x = x.reshape(*(mesh.size((name,)) for name in forced), *rests, *block_shape)
    position = {name: i for i, name in enumerate(forced)}
    places, next_rest = [], len(forced)
    for name in order:
        if isinstance(name, str):
            places.append(position[name])
        else:
            places.append(next_rest)
            next_rest += 1
    x = jnp.transpose(x, (*places, *range(len(order), x.ndim)))
    batch = [mesh.size(dim.extra_in) * dim.rest for dim in leaf.batch]
    x = x.reshape(*batch, *block_shape)
    axes = leaf.leaf.batch_axes + matrix_axes(leaf)
    return jnp.transpose(x, [axes.index(i) for i in range(len(axes))])


def matrix_axes(leaf: LeafLayout) -> tuple[int, ...]:
    return leaf.leaf.reduction_axes + leaf.leaf.output_axes


def local_order(leaf: LeafLayout, way: str) -> list[str | int]:
    """Factors of the local batch dimensions, in order: axis names, and sizes of rests."""
    order: list[str | int] = []
    for dim in leaf.batch:
        order += [*(dim.extra_out if way == "in" else dim.extra_in), dim.rest]
    return order


def spread(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """``[forced, core, ...]`` to ``[forced, owner, slot, ...]``; EMPTY slots are zero."""
    slots = max(counts)
    parts, start = [], 0
    for count, run in itertools.groupby(counts):
        owners = len(list(run))
        part = x[:, start : start + owners * count]
        part = part.reshape(x.shape[0], owners, count, *x.shape[2:])
        start += owners * count
        empty = [(0, 0)] * part.ndim
        empty[2] = (0, slots - count)
        parts.append(jnp.pad(part, empty))
    return jnp.concatenate(parts, axis=1)


def collect(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Undoes ``spread``: ``[forced, owner, slot, ...]`` to ``[forced, core, ...]``."""
    parts, start = [], 0
    for count, run in itertools.groupby(counts):
        owners = len(list(run))
        part = x[:, start : start + owners, :count]
        parts.append(part.reshape(x.shape[0], owners * count, *x.shape[3:]))
        start += owners
    return jnp.concatenate(parts, axis=1)


def sizes(side: Side, names: Axes) -> tuple[int, ...]:
    return tuple(side.mesh.size((name,)) for name in names)


def reorder(x: jax.Array, names: Axes, wanted: Axes) -> jax.Array:
    """Transposes the leading dimensions, named ``names``, into the order ``wanted``."""
    lead = [names.index(name) for name in wanted]
    return jnp.transpose(x, (*lead, *range(len(names), x.ndim)))


def take_own(x: jax.Array, names: Axes, side: Side) -> jax.Array:
    """Keeps this device's share of the leading dimensions, which are named ``names``."""
    if not names:
        return x
    x = x.reshape(side.mesh.size(names), *x.shape[len(names) :])
    index = jax.lax.axis_index(names)
    return jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)


def all_to_all(x: jax.Array, side: Side) -> jax.Array:
    """Exchanges the leading dimensions, one for each exchanged axis."""
    names = side.exchanged
    if side.mesh.size(names) == 1:
        return x
    flat = x.reshape(side.mesh.size(names), *x.shape[len(names) :])
    # XLA:CPU would else take EMPTY blocks apart from the others, give them another layout,
    # and refuse its own program.
    flat = jax.lax.optimization_barrier(flat)
    flat = jax.lax.all_to_all(flat, names, split_axis=0, concat_axis=0, tiled=True)
    return flat.reshape(x.shape)


def gather(x: jax.Array, side: Side) -> jax.Array:
    """Puts the blocks of all devices along the gathered axes in front."""
    names = side.gathered
    if not names:
        return x
    flat = jax.lax.all_gather(x, names, axis=0, to="invarying")
    return flat.reshape(*sizes(side, names), *x.shape)


def move(x: jax.Array, side: Side) -> jax.Array:
    """Both collectives of one way."""
    return gather(all_to_all(x, side), side)


NOTHING = -1000
"""Exponent that stands for a block of zeros; float16 holds it exactly."""


def encode(x: jax.Array, tops: jax.Array, block_ndim: int) -> jax.Array:
    """Blocks (the trailing dimensions) as float16, each with its exponent behind it.

    A block is divided by the power of two just above its largest entry, which is also the
    largest of *tops*; the exponent is an integer that float16 holds exactly.
    """
    lead = x.shape[: x.ndim - block_ndim]
    flat = x.reshape(*lead, math.prod(x.shape[len(lead) :]))
    flat = flat.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(tops.reshape(*lead, -1), axis=-1, keepdims=True)
    largest = largest.astype(flat.dtype)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1))
    exponent = jnp.where(largest == 0, NOTHING, exponent)
    small = power_of_two(flat, -jnp.where(largest == 0, 0, exponent))
    sent = jnp.concatenate([small, exponent.astype(flat.dtype)], axis=-1)
    return sent.astype(jnp.float16)


def decode(sent: jax.Array, side: Side) -> tuple[jax.Array, jax.Array]:
    """Undoes ``encode``: float16 blocks, and int32 exponents that broadcast with them."""
    block = side.block_shape
    blocks = sent[..., :-1].reshape(*sent.shape[:-1], *block)
    exponent = sent[..., -1].astype(jnp.int32)
    return blocks, exponent.reshape(*exponent.shape, *(1,) * len(block))


def align(sent: jax.Array, side: Side) -> tuple[jax.Array, jax.Array]:
    """Blocks with one exponent for each slot, still in float16, and those exponents.

    What falls below float16 in this is below 2^-24 of the parcel's largest entry.
    """
    blocks, exponent = decode(sent, side)
    ahead = tuple(range(blocks.ndim - len(side.dims) - 1))
    common = jnp.max(exponent, axis=ahead, keepdims=True)
    blocks = power_of_two(blocks.astype(jnp.float32), exponent - common)
    blocks = blocks.astype(jnp.float16)
    common = jnp.where(common == NOTHING, 0, common)
    return blocks, common.reshape(-1, 1, 1)


def join(x: jax.Array, side: Side) -> jax.Array:
    """``[gathered and exchanged axes, slot, *block]`` to ``[slot, fan_in, fan_out]``.

    Restores the logical order of rows and columns.
    """
    names = side.gathered + side.exchanged
    order = [len(names)]
    for i, (_, axes) in enumerate(side.dims):
        order += [names.index(name) for name in axes]
        order.append(len(names) + 1 + i)
    x = jnp.transpose(x, order)
    return x.reshape(x.shape[0], *side.parcel_shape)


def split(x: jax.Array, side: Side) -> jax.Array:
    """Undoes ``join``: ``[slot, fan_in, fan_out]`` to ``[sliced, exchanged, slot, *block]``."""
    names = side.sliced + side.exchanged
    shape, where = [x.shape[0]], {}
    blocks = []
    for size, axes in side.dims:
        for name in axes:
            where[name] = len(shape)
            shape.append(side.mesh.size((name,)))
        blocks.append(len(shape))
        shape.append(size // side.mesh.size(axes))
    order = [*(where[name] for name in names), 0, *blocks]
    return jnp.transpose(x.reshape(shape), order)
