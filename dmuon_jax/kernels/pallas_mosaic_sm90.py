"""Products with symmetric results on Hopper: wgmma, TMA, warp specialisation.

A persistent kernel: one program per multiprocessor walks its share of the tiles that
touch the lower triangle. One warpgroup loads slices of the operands by TMA, the others
multiply, each its own rows of the tile, and store the tile and its mirror image by TMA.

Roofline: as in `pallas_triton`, with 128 x 128 tiles at 64 FLOPs per byte through L2.
"""

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


def _kernel(
    order, valid, coefficients, a, b, c, d, *, config: TileConfig, is_gram: bool
):
    """All tiles this program computes; *valid*, *coefficients*, *c* may be None."""
    num_groups = config.num_warps // 4
    group_rows = config.rows // num_groups
    shape = (group_rows, config.columns)
    batch, _, depth = a.shape
    num_steps = depth // config.depth
    tile_buffer = functools.partial(plgpu.SMEM, dtype=d.dtype, transforms=_TRANSFORMS)
    scratch = {
        "slices": _pipeline(
            _ignore, _ignore, config, is_gram, num_steps
        ).get_allocations(a.at[0], b.at[0]),
        "tiles": tile_buffer((num_groups, *shape)),
    }
    is_shared = group_rows == config.columns
    if not is_shared:
        scratch["mirrors"] = tile_buffer((num_groups, *shape[::-1]))
    if c is not None:
        scratch["arrived"] = plgpu.Barrier(num_barriers=num_groups)

    @functools.partial(pl.run_scoped, **scratch, collective_axes="warpgroup")
    def _(slices, tiles, mirrors: Any = None, arrived: Any = None):
        group = jax.lax.axis_index("warpgroup")
        mirror = (tiles if is_shared else mirrors).at[group]

        @plgpu.nd_loop((batch, order.shape[0]), collective_axes="multiprocessor")
        def _(loop):
            slot, step = loop.index
            i, j = order[step, 0], order[step, 1]
            rows = pl.ds(i * config.rows, config.rows)
            own = pl.ds(i * config.rows + group * group_rows, group_rows)
            columns = pl.ds(j * config.columns, config.columns)

            def store(tile):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                tiles[group] = tile
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tiles.at[group], d.at[slot, own, columns])

                @pl.when(j < config.ratio * i)
                def _():
                    if is_shared:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    mirror.T[...] = tile
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(mirror, d.at[slot, columns, own])

            def epilogue(total):
                total = total * coefficients[0]
                if c is not None:
                    plgpu.barrier_wait(arrived.at[group])
                    total += coefficients[1] * tiles[group].astype(jnp.float32)
                iota = functools.partial(
                    plgpu.broadcasted_iota, jnp.int32, shape, layout=plgpu.Layout.WGMMA
                )
                row = own.start + iota(dimension=0)
                column = columns.start + iota(dimension=1)
                return total + jnp.where(row == column, coefficients[2], 0.0)

            def context(run_pipeline):
                if c is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.copy_gmem_to_smem(
                        c.at[slot, own, columns], tiles.at[group], arrived.at[group]
                    )

                @functools.partial(pl.run_scoped, sums=_sums(shape, jnp.float32))
                def _(sums):
                    run_pipeline(sums)
                    total = sums[...]
                    store((total if is_gram else epilogue(total)).astype(d.dtype))

            def multiply(_, left, right, sums):
                left = left.at[pl.ds(group * group_rows, group_rows)]
                plgpu.wgmma(sums, left, right.T if is_gram else right)
                plgpu.wgmma_wait(1 if num_steps > 1 else 0)
                return sums

            def compute():
                _pipeline(multiply, context, config, is_gram, num_steps)(
                    a.at[slot, rows],
                    b.at[slot, columns] if is_gram else b.at[slot, :, columns],
                    allocations=slices,
                )

            if valid is None:
                compute()
                return
            is_valid = valid[slot] != 0
            pl.when(is_valid)(compute)

            @pl.when(jnp.logical_not(is_valid) & (group < num_groups))
            def _():
                zeros = jnp.zeros(shape, d.dtype)
                store(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))

    plgpu.wait_smem_to_gmem(0)


@functools.partial(
    jax.jit, static_argnames=("config", "is_gram", "num_cores", "interpret")
)
def _product(a, b, c, coefficients, valid, *, config, is_gram, num_cores, interpret):
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
        given: dict[str, Any] = dict.fromkeys(("order", "valid", "coefficients", "a", "b", "c"))
        given.update(zip(names, refs, strict=False))
        _kernel(**given, d=refs[-1], config=config, is_gram=is_gram)

    result = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, size, size), a.dtype),
        grid=(min(num_cores, batch * order.shape[0]),),
        grid_names=("multiprocessor",),
        num_threads=config.num_warps // 4 + 1,
        thread_name="warpgroup",
        kernel_name="gram" if is_gram else "symmetric_matmul",
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
        is_gram=True,
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
        is_gram=False,
        num_cores=_num_cores(num_cores),
        interpret=interpret,
    )
