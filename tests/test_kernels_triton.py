"""The Triton kernels in Pallas' interpreter, against float64; and planted faults.

The interpreter fills results with NaN before the kernel runs, so a tile that is never
written shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmuon_jax import kernels
from dmuon_jax.kernels import pallas_triton, pallas_triton_small, xla
from dmuon_jax.kernels.select import TILES
from dmuon_jax.kernels.tiles import TileConfig
from tests import kernel_cases as cases

INTERPRETED = "pallas_triton_interpret"
COEFFICIENTS = np.array([0.75, -1.5, 0.25], np.float32)
STEPS = np.array(
    [[3.4445, -4.7750, 2.0315], [2.5, -2.0, 0.5], [1.875, -1.25, 0.375]], np.float32
)
VALID = jnp.array([True, False, True])


def ratio(value, baseline, reference):
    """The error over that of XLA, which also rounds once to 16 bits."""
    error = cases.relative_error(value, reference)
    return error / cases.relative_error(baseline, reference)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *((config, "float16") for config in TILES["pallas_triton"]),
        (TILES["pallas_triton"][-1], "bfloat16"),
    ],
)
def test_products_for_every_config(config, dtype):
    """Three slots, the EMPTY one full of NaN; tiles on and off the diagonal."""
    size, depth = 3 * config.rows, 2 * config.rows
    x = cases.matrices((3, size, depth), dtype).at[1].set(jnp.nan)
    r = pallas_triton.gram(x, VALID, config, True)
    assert r.dtype == x.dtype and not np.any(r[1])
    kept = np.array([0, 2])
    assert ratio(r[kept], xla.gram(x[kept]), cases.gram(x[kept])) <= 1.5
    r = r.at[1].set(jnp.nan)
    d = pallas_triton.symmetric_matmul(r, r, r, COEFFICIENTS, VALID, config, True)
    assert d.dtype == x.dtype and not np.any(d[1])
    r = r[kept]
    baseline = xla.symmetric_matmul(r, r, r, COEFFICIENTS)
    reference = cases.symmetric_matmul(r, r, r, COEFFICIENTS)
    assert ratio(d[kept], baseline, reference) <= 1.5


def test_products_without_flags_and_without_c():
    config = TileConfig(64, 64, num_warps=4)
    x = cases.matrices((1, 128, 64), "float16")
    r = pallas_triton.gram(x, None, config, True)
    d = pallas_triton.symmetric_matmul(r, r, None, COEFFICIENTS, None, config, True)
    reference = cases.symmetric_matmul(r, r, None, COEFFICIENTS)
    assert ratio(d, xla.symmetric_matmul(r, r, None, COEFFICIENTS), reference) <= 1.5


@pytest.mark.parametrize(
    ("batch", "size", "depth"), [((), 33, 130), ((2, 3), 100, 70), ((1,), 1, 1)]
)
def test_ragged_shapes_through_the_entry_points(batch, size, depth):
    x = cases.matrices((*batch, size, depth), "float16")
    r = kernels.gram(x, implementation=INTERPRETED)
    assert r.shape == (*batch, size, size)
    assert ratio(r, kernels.gram(x), cases.gram(x)) <= 1.5
    d = kernels.symmetric_matmul(r, r, r, COEFFICIENTS, implementation=INTERPRETED)
    baseline = kernels.symmetric_matmul(r, r, r, COEFFICIENTS)
    reference = cases.symmetric_matmul(r, r, r, COEFFICIENTS)
    assert ratio(d, baseline, reference) <= 1.5


@pytest.mark.parametrize(
    ("size", "depth", "dtype"),
    [(64, 64, "float16"), (20, 130, "bfloat16"), (128, 100, "float16")],
)
def test_chains_on_chip(size, depth, dtype):
    x = cases.matrices((3, size, depth), dtype).at[1].set(jnp.nan)
    kept = np.array([0, 2])
    y = kernels.direct_chain(x, STEPS, valid=VALID, implementation=INTERPRETED)
    assert y.shape == x.shape and y.dtype == x.dtype and not np.any(y[1])
    x = x[kept]
    baseline, reference = kernels.direct_chain(x, STEPS), cases.direct_chain(x, STEPS)
    assert ratio(y[kept], baseline, reference) <= 1.5
    r = kernels.gram(x)
    q = kernels.polynomial_chain(r, STEPS, implementation=INTERPRETED)
    baseline = kernels.polynomial_chain(r, STEPS)
    assert ratio(q, baseline, cases.polynomial_chain(r, STEPS)) <= 1.5


def test_large_chains_are_composed_of_tiled_products():
    x = cases.matrices((2, 192, 200), "float16")
    for chain, operand in (
        (kernels.direct_chain, x),
        (kernels.polynomial_chain, kernels.gram(x)),
    ):
        value = chain(operand, STEPS[:2], implementation=INTERPRETED)
        reference = chain(operand.astype(jnp.float32), STEPS[:2])
        assert ratio(value, chain(operand, STEPS[:2]), np.float64(reference)) <= 1.5


def test_a_long_contracted_axis():
    """As long as the largest that shipped models have."""
    x = cases.matrices((1, 64, 18432), "float16")
    r = kernels.gram(x, implementation=INTERPRETED)
    assert ratio(r, kernels.gram(x), cases.gram(x)) <= 1.5


@pytest.mark.parametrize("batch", [1, 4096])
def test_batches_of_any_size(batch):
    x = cases.matrices((batch, 8, 16), "float16")
    y = kernels.direct_chain(x, STEPS, implementation=INTERPRETED)
    assert ratio(y, kernels.direct_chain(x, STEPS), cases.direct_chain(x, STEPS)) <= 1.5


def test_the_interpreted_kernel_is_what_ran():
    x = cases.matrices((2, 64, 64), "float16")

    def run(x):
        return kernels.gram(x, implementation=INTERPRETED)

    assert "pallas_call" in str(jax.make_jaxpr(run)(x))


def test_inside_vmap_and_scan():
    x = cases.matrices((4, 64, 64), "float16")

    def one(x):
        r = kernels.gram(x, implementation=INTERPRETED)

        def body(r, _):
            return kernels.gram(r, implementation=INTERPRETED), None

        return jax.lax.scan(body, r, length=2)[0]

    r = cases.gram(cases.gram(cases.gram(x)))
    assert cases.relative_error(jax.vmap(one)(x), r) < 2e-3


def gram_error(module):
    x = cases.matrices((2, 128, 64), "float16")
    r = module.gram(x, None, TileConfig(64, 64, num_warps=4), True)
    return cases.relative_error(r, cases.gram(x))


def product_error(module):
    """With factors that are symmetric only up to rounding."""
    x = cases.matrices((2, 128, 64), "float16")
    r = kernels.gram(x)
    config = TileConfig(64, 64, num_warps=4)
    d = module.symmetric_matmul(r, r, r, COEFFICIENTS, None, config, True)
    return cases.relative_error(d, cases.symmetric_matmul(r, r, r, COEFFICIENTS))


def chain_error(module):
    x = cases.matrices((2, 64, 64), "float16")
    y = module.direct_chain(x, STEPS, None, 4, True)
    return cases.relative_error(y, cases.direct_chain(x, STEPS))


@pytest.mark.parametrize(
    ("module", "measure", "old", "new"),
    [
        (pallas_triton, gram_error, "d[slot, columns, rows] = tile.T", "pass"),
        (pallas_triton, gram_error, "= tile.T", "= tile"),
        (pallas_triton, gram_error, "d[slot, rows, columns] = tile\n", "\n"),
        (pallas_triton, gram_error, "a.shape[2] // config.depth", "0"),
        (pallas_triton, product_error, "j * config.columns + jax", "jax"),
        (pallas_triton, product_error, "tile *= coefficients[0]", "pass"),
        (
            pallas_triton_small,
            chain_error,
            "_add(b, gram, c * _dot(gram, gram))",
            "gram",
        ),
    ],
    ids=[
        "unwritten mirror",
        "transposed tile",
        "unwritten tile",
        "missing slice",
        "misplaced diagonal",
        "missing coefficient",
        "missing term",
    ],
)
def test_planted_faults_are_caught(module, measure, old, new):
    assert measure(module) < 1e-3
    assert measure(cases.faulty(module, old, new)) > 1e-2
