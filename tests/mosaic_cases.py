"""Runs the Hopper kernels in Mosaic's interpreter; prints one JSON line per case.

A script, so that the tests can stop it: the interpreter can hang on a faulty kernel.
The interpreter's race detector sees only what runs, so few programs share the tiles.
"""

import json
import sys

import jax.numpy as jnp
import numpy as np

# The detector's results are not public.
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from dmuon_jax.kernels import pallas_mosaic_sm90, xla
from dmuon_jax.kernels.tiles import TileConfig
from tests import kernel_cases as cases

COEFFICIENTS = np.array([0.75, -1.5, 0.25], np.float32)
SQUARE = TileConfig(128, 128, num_stages=2)
WIDE = TileConfig(256, 128, num_stages=2)
NARROW = TileConfig(128, 64, num_stages=3)

# name: config, dtype, size, depth, with an EMPTY slot, with c
CASES = {
    "square": (SQUARE, "float16", 256, 192, True, True),
    "wide": (WIDE, "bfloat16", 512, 256, False, True),
    "narrow": (NARROW, "float16", 256, 128, True, False),
    "one slice": (SQUARE, "float16", 128, 64, False, True),
}

# name: what to replace in the source, and by what
FAULTS = {
    "race": (
        """    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.tile[...] = tile
""",
        "    shared.tile[...] = tile\n",
    ),
    "uncommitted": (
        """    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.tile""",
        "    plgpu.copy_smem_to_gmem(shared.tile",
    ),
    "unwritten tile": ("@pl.when(place.is_mirrored)", "@pl.when(place.slot < 0)"),
    "transposed tile": ("shared.mirror.T[...] = tile", "shared.mirror[...] = tile"),
}

# The config each fault is planted in; it must leave the kernel well-formed.
FAULTY_CONFIGS = {
    "race": SQUARE,
    "uncommitted": SQUARE,
    "unwritten tile": NARROW,
    "transposed tile": NARROW,
}


def measure(module, config, dtype, size, depth, flags, with_c):
    """Errors of both products, XLA's on the same operands, and whether races ran."""
    batch = 2 if flags else 1
    x = cases.matrices((batch, size, depth), dtype)
    valid, kept = None, np.arange(batch)
    if flags:
        valid, kept = jnp.array([False, True]), np.array([1])
        x = x.at[0].set(jnp.nan)
    given = {
        "config": config,
        "interpret": plgpu.InterpretGPUParams(detect_races=True),
        "num_cores": 2,
    }
    r = module.gram(x, valid, **given)
    races = gpu_callbacks.get_races().races_found
    expected = xla.gram(x)
    c = expected if with_c else None
    d = module.symmetric_matmul(expected, expected, c, COEFFICIENTS, valid, **given)
    races |= gpu_callbacks.get_races().races_found
    x, b = x[kept], expected[kept]
    c = b if with_c else None
    product = cases.symmetric_matmul(b, b, c, COEFFICIENTS)
    empty = np.setdiff1d(np.arange(batch), kept)
    return {
        "gram": cases.relative_error(r[kept], cases.gram(x)),
        "gram_xla": cases.relative_error(b, cases.gram(x)),
        "product": cases.relative_error(d[kept], product),
        "product_xla": cases.relative_error(
            xla.symmetric_matmul(b, b, c, COEFFICIENTS), product
        ),
        "zeros": not (np.any(r[empty]) or np.any(d[empty])),
        "races": bool(races),
    }


def main():
    kind, name = sys.argv[1:]
    if kind == "case":
        result = measure(pallas_mosaic_sm90, *CASES[name])
    else:
        module = cases.faulty(pallas_mosaic_sm90, *FAULTS[name])
        result = measure(module, FAULTY_CONFIGS[name], "float16", 256, 128, False, True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
