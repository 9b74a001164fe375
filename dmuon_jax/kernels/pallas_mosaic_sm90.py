"""Products with symmetric results on Hopper: wgmma, TMA, warp specialisation.

A persistent kernel: one program per multiprocessor walks its share of the tiles that
touch the lower triangle. One warpgroup loads slices of the operands by TMA, the others
multiply, each its own rows of the tile, and store the tile and its mirror image by TMA.

Roofline: as in `pallas_triton`, with 128 x 128 tiles at 64 FLOPs per byte through L2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dmuon_jax.kernels.pallas_common import varying_together
from dmuon_jax.kernels.support import target_device
from dmuon_jax.kernels.tiles import TileConfig, triangle_order

# Elements of 16 bits in the 128-byte rows that TMA and wgmma swizzle.
_SWIZZLE = 64
_LOADER_REGISTERS = 40
# Two lines that pyright reads in its own way: the classes are protocols to it, and ACC is
# exported without saying so.
_TRANSFORMS = (
    plgpu.TilingTransform((8, _SWIZZLE)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
_sums = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def _pipeline(body, context, config: TileConfig, is_gram: bool, num_steps: int):
    """The loop over slices of the contracted axis, loads running ahead of products."""
    right = (
        (config.columns, config.depth) if is_gram else (config.depth, config.columns)
    )
    spec = functools.partial(
        plgpu.BlockSpec,
        transforms=_TRANSFORMS,
        memory_space=plgpu.SMEM,
        delay_release=1 if num_steps > 1 else 0,
    )
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(num_steps,),
        memory_registers=_LOADER_REGISTERS,
        in_specs=[
            spec((config.rows, config.depth), lambda k: (0, k)),
            spec(right, (lambda k: (0, k)) if is_gram else (lambda k: (k, 0))),
        ],
        wg_axis="warpgroup",
        num_compute_wgs=config.num_warps // 4,
        max_concurrent_steps=config.num_stages,
        compute_context=context,
    )


def _ignore(*args, **kwargs):
    del args, kwargs


@dataclasses.dataclass(frozen=True)
class _Global:
    """What a kernel is given, in global memory; None where it has no such operand."""

    order: Any
    valid: Any
    coefficients: Any
    a: Any
    b: Any
    c: Any
    d: Any

    @property
    def is_gram(self) -> bool:
        """Whether the product is `a b^T`, without coefficients."""
        return self.coefficients is None

    def num_steps(self, config: TileConfig) -> int:
        """Slices of the contracted axis."""
        return self.a.shape[2] // config.depth


@dataclasses.dataclass(frozen=True)
class _Shared:
    """A warpgroup's shared memory.

    Attributes:
      slices: of the operands, in flight; common to all warpgroups.
      tile: its rows of a tile: of c, then of the result.
      mirror: their mirror image; the same memory as *tile* where that is square.
      arrived: the barrier that c in *tile* passes; None without c.
    """

    slices: Any
    tile: Any
    mirror: Any
    arrived: Any


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tile, and this warpgroup's rows of it, lie in the result."""

    slot: Any
    rows: Any
    own: Any
    columns: Any
    is_mirrored: Any


def _group_rows(config: TileConfig) -> int:
    """Rows of a tile that one warpgroup computes."""
    return config.rows // (config.num_warps // 4)


def _place(loop, group, order, config: TileConfig) -> _Place:
    """The place of the tile that a turn of the persistent loop is for."""
    slot, step = loop.index
    i, j = order[step, 0], order[step, 1]
    group_rows = _group_rows(config)
    return _Place(
        slot=slot,
        rows=pl.ds(i * config.rows, config.rows),
        own=pl.ds(i * config.rows + group * group_rows, group_rows),
        columns=pl.ds(j * config.columns, config.columns),
        is_mirrored=j < config.ratio * i,
    )


def _scratch(given: _Global, config: TileConfig) -> dict[str, Any]:
    """The shared memory of all warpgroups; no "mirrors" where those share "tiles"."""
    num_groups = config.num_warps // 4
    shape = (_group_rows(config), config.columns)
    tile_buffer = functools.partial(
        plgpu.SMEM, dtype=given.d.dtype, transforms=_TRANSFORMS
    )
    pipeline = _pipeline(
        _ignore, _ignore, config, given.is_gram, given.num_steps(config)
    )
    scratch = {
        "slices": pipeline.get_allocations(given.a.at[0], given.b.at[0]),
        "tiles": tile_buffer((num_groups, *shape)),
    }
    if shape[0] != shape[1]:
        scratch["mirrors"] = tile_buffer((num_groups, *shape[::-1]))
    if given.c is not None:
        scratch["arrived"] = plgpu.Barrier(num_barriers=num_groups)
    return scratch


def _store(tile, place: _Place, shared: _Shared, d):
    """Stores a warpgroup's rows, and their mirror image where that is no other tile."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.tile[...] = tile
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.tile, d.at[place.slot, place.own, place.columns])

    @pl.when(place.is_mirrored)
    def _():
        if shared.mirror is shared.tile:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.mirror.T[...] = tile
        plgpu.commit_smem()
        to = d.at[place.slot, place.columns, place.own]
        plgpu.copy_smem_to_gmem(shared.mirror, to)


def _epilogue(total, place: _Place, given: _Global, shared: _Shared):
    """`alpha total + beta c + gamma I`, the latter two where they pass the tile."""
    total = total * given.coefficients[0]
    if given.c is not None:
        plgpu.barrier_wait(shared.arrived)
        total += given.coefficients[1] * shared.tile[...].astype(jnp.float32)
    iota = functools.partial(
        plgpu.broadcasted_iota, jnp.int32, total.shape, layout=plgpu.Layout.WGMMA
    )
    row = place.own.start + iota(dimension=0)
    column = place.columns.start + iota(dimension=1)
    return total + jnp.where(row == column, given.coefficients[2], 0.0)


def _compute(place: _Place, group, given: _Global, shared: _Shared, config):
    """One tile: all products along the contracted axis, the epilogue, the stores."""
    shape = (_group_rows(config), config.columns)
    is_gram, num_steps = given.is_gram, given.num_steps(config)

    def context(run_pipeline):
        if given.c is not None:
            # To where the result will be put, once the tile before has left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own = given.c.at[place.slot, place.own, place.columns]
            plgpu.copy_gmem_to_smem(own, shared.tile, shared.arrived)

        @functools.partial(pl.run_scoped, sums=_sums(shape, jnp.float32))
        def _(sums):
            run_pipeline(sums)
            total = sums[...]
            if not is_gram:
                total = _epilogue(total, place, given, shared)
            _store(total.astype(given.d.dtype), place, shared, given.d)

    def multiply(_, left, right, sums):
        left = left.at[pl.ds(group * shape[0], shape[0])]
        plgpu.wgmma(sums, left, right.T if is_gram else right)
        plgpu.wgmma_wait(1 if num_steps > 1 else 0)
        return sums

    columns = (place.columns,) if is_gram else (slice(None), place.columns)
    _pipeline(multiply, context, config, is_gram, num_steps)(
        given.a.at[place.slot, place.rows],
        given.b.at[(place.slot, *columns)],
        allocations=shared.slices,
    )


def _kernel(given: _Global, config: TileConfig):
    """All tiles this program computes."""
    num_groups = config.num_warps // 4
    scratch = _scratch(given, config)

    @functools.partial(pl.run_scoped, **scratch, collective_axes="warpgroup")
    def _(slices, tiles, mirrors: Any = None, arrived: Any = None):
        group = jax.lax.axis_index("warpgroup")
        tile = tiles.at[group]
        shared = _Shared(
            slices=slices,
            tile=tile,
            mirror=tile if mirrors is None else mirrors.at[group],
            arrived=None if arrived is None else arrived.at[group],
        )
        turns = (given.d.shape[0], given.order.shape[0])

        @plgpu.nd_loop(turns, collective_axes="multiprocessor")
        def _(loop):
            place = _place(loop, group, given.order, config)
            compute = functools.partial(_compute, place, group, given, shared, config)
            if given.valid is None:
                compute()
                return
            is_valid = given.valid[place.slot] != 0
            pl.when(is_valid)(compute)

            @pl.when(jnp.logical_not(is_valid) & (group < num_groups))
            def _():
                zeros = jnp.zeros(tile.shape, given.d.dtype)
                zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                _store(zeros, place, shared, given.d)

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "num_cores", "interpret"))
def _product(a, b, c, coefficients, valid, *, config, num_cores, interpret):
    batch, size, _ = a.shape
    order = jnp.asarray(triangle_order(size // config.rows, config))
    operands = {"order": order, "a": a, "b": b, "c": c}
    if valid is not None:
        operands["valid"] = valid.astype(jnp.int32)
    if coefficients is not None:
        operands["coefficients"] = coefficients.astype(jnp.float32)
    names = [name for name, operand in operands.items() if operand is not None]
    arrays = varying_together(*(operands[name] for name in names))

    def body(*refs):
        given: dict[str, Any] = dict.fromkeys(
            ("order", "valid", "coefficients", "a", "b", "c")
        )
        given.update(zip([*names, "d"], refs, strict=True))
        _kernel(_Global(**given), config)

    result = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, size, size), a.dtype),
        grid=(min(num_cores, batch * order.shape[0]),),
        grid_names=("multiprocessor",),
        num_threads=config.num_warps // 4 + 1,
        thread_name="warpgroup",
        kernel_name="gram" if coefficients is None else "symmetric_matmul",
        **({"interpret": interpret} if interpret else {}),
    )(*arrays)
    return varying_together(result, arrays[0])[0]


def _num_cores(num_cores: int | None) -> int:
    return num_cores or target_device().num_cores or 132


def gram(
    x: jax.Array,
    valid: jax.Array | None,
    config: TileConfig,
    interpret: object = False,
    num_cores: int | None = None,
) -> jax.Array:
    """`x @ x^T` for 16-bit *x* `[batch, s, l]`, s and l multiples of the tile's rows.

    Args:
      x: The matrices.
      valid: bool `[batch]`, or None.
      config: Tile sizes; warpgroups get `4 rows / num_warps` rows, 64 or 128.
      interpret: False, or Pallas' `InterpretGPUParams` (jax 0.11 and newer).
      num_cores: Programs launched; None for one per multiprocessor.
    """
    return _product(
        x,
        x,
        None,
        None,
        valid,
        config=config,
        num_cores=_num_cores(num_cores),
        interpret=interpret,
    )


def symmetric_matmul(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None,
    coefficients: jax.Array,
    valid: jax.Array | None,
    config: TileConfig,
    interpret: object = False,
    num_cores: int | None = None,
) -> jax.Array:
    """`alpha a b + beta c + gamma I` for 16-bit `[batch, s, s]`; the rest as `gram`."""
    return _product(
        a,
        b,
        c,
        coefficients,
        valid,
        config=config,
        num_cores=_num_cores(num_cores),
        interpret=interpret,
    )
