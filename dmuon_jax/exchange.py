"""The exchange: blocks of leaves to whole parcels on owners, and back.

Runs inside ``jax.shard_map``. The only module that calls collectives: for each buffer at
most one all-to-all and one all-gather each way (the table is in ``layout.py``).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dmuon_jax.blocks import join, pack, reorder, sizes, split, spread
from dmuon_jax.layout import Layout, LeafLayout, Side
from dmuon_jax.matrices import Axes
from dmuon_jax.scales import power_of_two
from dmuon_jax.wire import align, decode, encode


@dataclasses.dataclass(frozen=True)
class Cargo:
    """Slots of one exchange group that travel together.

    Attributes:
      leaves: layouts of the group's leaves, equal but for batch dimensions.
      counts: parcels of the group on each free owner.
      slots: which of the owners' slots, ``max(counts)`` in all.
      dtype: dtype in which blocks travel.
    """

    leaves: tuple[LeafLayout, ...]
    counts: tuple[int, ...]
    slots: slice
    dtype: str

    @property
    def layout(self) -> Layout:
        return self.leaves[0].layout

    @property
    def held(self) -> np.ndarray:
        """Bool, one dimension for each free axis: which owners have parcels of it."""
        side = self.layout.side("in")
        return np.reshape(self.counts, sizes(side, self.layout.free)) > 0


def to_owners(
    blocks: Sequence[Sequence[jax.Array]], cargos: Sequence[Cargo]
) -> list[tuple[jax.Array, jax.Array | None]]:
    """Brings parcels whole to their owners, all in one buffer.

    Args:
      blocks: for each cargo the local block of each leaf, in the momentum's sharding.
      cargos: what travels; no two have parcels on one owner.

    Returns:
      For each cargo ``x`` ``[slots, fan_in, fan_out]``, those of this device, EMPTY ones
      zero; and either None or int32 exponents ``e`` ``[slots, 1, 1]``: the parcels are
      then ``x * 2^e``, with the largest entry of each x in [1/2, 1).
    """
    sent = [wrap(mine, cargo) for mine, cargo in zip(blocks, cargos, strict=True)]
    side = cargos[0].layout.side("in")
    if len(cargos) == 1 or not side.travels:
        arrived = [move(x, side) for x in sent]
    else:
        rows = [row_owners(cargo) for cargo in cargos]
        arrived = [
            jnp.where(owned_here(cargo), x, jnp.zeros((), x.dtype))
            for x, cargo in zip(move_together(sent, rows, side), cargos, strict=True)
        ]
    return [unwrap(x, cargo) for x, cargo in zip(arrived, cargos, strict=True)]


def encodes(dtype: jax.typing.DTypeLike, cargo: Cargo, side: Side) -> bool:
    """Whether blocks of ``dtype`` travel with exponents."""
    return side.travels and cargo.dtype == "float16" and dtype != jnp.float16


def wrap(blocks: Sequence[jax.Array], cargo: Cargo) -> jax.Array:
    """Blocks as they are sent: ``[exchanged, slot, ...]`` in the dtype they travel in."""
    side = cargo.layout.side("in")
    packed = [pack(x, leaf) for x, leaf in zip(blocks, cargo.leaves, strict=True)]
    x = deal(packed, cargo)
    if not encodes(x.dtype, cargo, side):
        return x.astype(cargo.dtype) if side.travels else x
    # Leaf by leaf, so that it can be one pass with what makes a leaf's block.
    tops = [jnp.max(jnp.abs(x), axis=-1, keepdims=True) for x in packed]
    return encode(x, deal(tops, cargo), len(side.dims))


def unwrap(x: jax.Array, cargo: Cargo) -> tuple[jax.Array, jax.Array | None]:
    """Whole parcels of what ``wrap`` sent; see ``to_owners``."""
    side = cargo.layout.side("in")
    if not encodes(cargo.layout.dtype, cargo, side):
        return join(x, side), None
    x, exponent = align(x, side)
    return join(x, side), exponent


def deal(packed: Sequence[jax.Array], cargo: Cargo) -> jax.Array:
    """What ``pack`` gave of each leaf as this device sends it, for the slots of a cargo.

    Returns:
      ``[exchanged, slot, *parcel block]``.
    """
    layout, side = cargo.layout, cargo.layout.side("in")
    x = spread(jnp.concatenate(packed, axis=1), cargo.counts)[:, :, cargo.slots]
    names = layout.forced_out + layout.free
    x = x.reshape(*sizes(side, names), *x.shape[2:])
    x = reorder(x, names, side.sliced + side.exchanged)
    return take_own(x, side.sliced, side)


def from_owners(
    parcels: Sequence[jax.Array], cargos: Sequence[Cargo]
) -> list[jax.Array]:
    """Brings blocks of parcels from their owners to where the parameter has them.

    Args:
      parcels: for each cargo ``[slots, fan_in, fan_out]``, slots of this device.
      cargos: as ``to_owners`` got them.

    Returns:
      For each cargo ``[forced, owner, slot, *block]``: what ``unpack_all`` takes.
    """
    side = cargos[0].layout.side("out")
    sent = [wrap_back(x, cargo) for x, cargo in zip(parcels, cargos, strict=True)]
    if len(cargos) == 1 or not side.travels:
        arrived = [move(x, side) for x in sent]
    else:
        arrived = move_together(sent, [owned_here(cargo) for cargo in cargos], side)
    dtypes = [x.dtype for x in parcels]
    return list(map(unwrap_back, arrived, dtypes, cargos))


def wrap_back(parcels: jax.Array, cargo: Cargo) -> jax.Array:
    """As ``wrap``, on the way back."""
    side = cargo.layout.side("out")
    x = take_own(split(parcels, side), side.sliced, side)
    if encodes(x.dtype, cargo, side):
        return encode(x, jnp.abs(x), len(side.dims))
    return x.astype(cargo.dtype) if side.travels else x


def unwrap_back(
    x: jax.Array, dtype: jax.typing.DTypeLike, cargo: Cargo
) -> jax.Array:
    """What ``wrap_back`` sent of parcels of ``dtype``, ``[forced, owner, slot, *block]``."""
    layout, side = cargo.layout, cargo.layout.side("out")
    if encodes(dtype, cargo, side):
        x, exponent = decode(x, side)
        x = power_of_two(x.astype(jnp.float32), exponent)
    names = layout.forced_in + layout.free
    x = reorder(x, side.gathered + side.exchanged, names)
    forced = side.mesh.size(layout.forced_in)
    return x.reshape(forced, layout.num_owners, *x.shape[len(names) :])


def move_together(
    sent: Sequence[jax.Array], mine: Sequence[jax.Array], side: Side
) -> list[jax.Array]:
    """``move`` of several arrays in one buffer.

    Args:
      sent: ``[exchanged, slot, ...]`` each, of one dtype.
      mine: bool, broadcasting with ``[exchanged]``: which rows of the buffer hold which
        array; of a row at most one.
      side: the way they go.

    Returns:
      What ``move`` gives of each, in its own rows; other rows hold anything.
    """
    lead = len(side.exchanged)
    rows = [x.reshape(*x.shape[:lead], -1) for x in sent]
    length = max(row.shape[-1] for row in rows)
    buffer = jnp.zeros((), sent[0].dtype)
    for row, here in zip(rows, mine, strict=True):
        rest = [(0, 0)] * lead + [(0, length - row.shape[-1])]
        buffer = jnp.where(here[..., None], jnp.pad(row, rest), buffer)
    buffer = move(buffer, side)
    return [
        buffer[..., : row.shape[-1]].reshape(*buffer.shape[:-1], *x.shape[lead:])
        for row, x in zip(rows, sent, strict=True)
    ]


def row_owners(cargo: Cargo) -> jax.Array:
    """Bool ``[exchanged]``: whether the owner of a row has parcels of ``cargo``."""
    layout, side = cargo.layout, cargo.layout.side("in")
    names = layout.forced_out + layout.free
    x = jnp.asarray(np.broadcast_to(cargo.held, sizes(side, names)))
    return take_own(reorder(x, names, side.sliced + side.exchanged), side.sliced, side)


def owned_here(cargo: Cargo) -> jax.Array:
    """Whether this device has parcels of ``cargo``."""
    layout = cargo.layout
    return take_own(jnp.asarray(cargo.held), layout.free, layout.side("in"))


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
