"""Local blocks of leaves, parcels by owner and slot, whole parcels: reshapes, no collectives.

Array dimensions here are ``[one per mesh axis ..., slot, block ...]``; the names of the
leading ones are carried beside the array.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dmuon_jax.layout import LeafLayout, Side
from dmuon_jax.matrices import Axes


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
