"""The iteration, direct and in Gram space, against float64 NumPy and against optax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmuon_jax.coefficients import YOU
from dmuon_jax.gram import default_restarts, gram_iterations
from dmuon_jax.newton_schulz import PRECONDITIONINGS, orthogonalize_batch
from dmuon_jax.polar_express import polar_express
from tests import kernel_cases as cases
from tests.references import (
    JORDAN,
    normal,
    relative,
    textbook_newton_schulz,
    with_spectrum,
)

ROWS, COLUMNS = 64, 256
SPECTRA = {
    "gaussian": None,
    "flat": np.ones(ROWS),
    "clustered": np.where(np.arange(ROWS) < ROWS // 2, 1, 1e-2),
    "to 1e-2": np.geomspace(1, 1e-2, ROWS),
    "to 1e-4": np.geomspace(1, 1e-4, ROWS),
    "to 1e-6": np.geomspace(1, 1e-6, ROWS),
    "few": np.where(np.arange(ROWS) < 8, 1, 1e-2),
}
EASY = ("gaussian", "flat")
# The sum of what rounding the input costs and what the iteration adds.
TOLERANCES = {
    # (method, compute_dtype): (easy spectra, hard spectra)
    ("direct", "float32"): (1e-5, 2e-5),
    ("gram", "float32"): (1e-5, 1e-3),
    ("direct", "float16"): (3e-3, 3e-2),
    ("gram", "float16"): (8e-3, 3e-2),
    ("direct", "bfloat16"): (2e-2, 2e-1),
}
TABLES = {
    "jordan": (JORDAN,) * 5,
    "you": YOU,
    "polar_express": polar_express(5),
}


@functools.partial(
    jax.jit,
    static_argnames=(
        "steps",
        "method",
        "compute_dtype",
        "preconditioning",
        "restarts",
        "implementation",
    ),
)
def iterate(x, table, steps=5, **options):
    return orthogonalize_batch(x, jnp.asarray(table), steps, **options)


@functools.partial(jax.jit, static_argnames="preconditioning")
def optax_newton_schulz(x, preconditioning="frobenius"):
    """What ``optax.contrib`` makes of ``x``: a step without momentum."""
    tx = optax.contrib.scale_by_muon(
        beta=0.0,
        nesterov=False,
        preconditioning=preconditioning,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(),
    )
    return tx.update(x, tx.init(x))[0]


@functools.cache
def hard_batch():
    """``[spectrum, ROWS, COLUMNS]`` in float64."""
    return np.stack(
        [
            normal(ROWS, COLUMNS) if s is None else with_spectrum(s, COLUMNS)
            for s in SPECTRA.values()
        ]
    )


@functools.cache
def textbook_batch(name):
    return [textbook_newton_schulz(x, TABLES[name]) for x in hard_batch()]


def errors(found, name="jordan"):
    right = textbook_batch(name)
    return {
        spectrum: relative(x, y)
        for spectrum, x, y in zip(SPECTRA, found, right, strict=True)
    }


@pytest.mark.parametrize("method, dtype", TOLERANCES)
@pytest.mark.parametrize("name", TABLES)
def test_hard_spectra(method, dtype, name):
    x = jnp.asarray(hard_batch(), jnp.float32)
    table = np.asarray(TABLES[name], np.float32)
    found = iterate(x, table, method=method, compute_dtype=dtype)
    assert found.dtype == dtype
    easy, hard = TOLERANCES[method, dtype]
    # Steeper at zero, Polar Express and You's table lift more of the rounding noise.
    factor = 1.0 if name == "jordan" else 1.6
    for spectrum, error in errors(found, name).items():
        limit = easy if spectrum in EASY else hard
        assert error <= factor * limit, (spectrum, error)


def test_gram_in_half_precision_needs_its_restart():
    x = jnp.asarray(hard_batch(), jnp.float32)
    run = functools.partial(iterate, x, method="gram", compute_dtype="float16")
    table = np.asarray((JORDAN,) * 5, np.float32)
    default = errors(run(table))
    without = errors(run(table, restarts=()))
    named = errors(run(table, restarts=(2,)))
    assert default == named
    assert without["to 1e-6"] > 10 * default["to 1e-6"]
    assert without["to 1e-4"] > 10 * default["to 1e-4"]


def test_default_restarts():
    assert [default_restarts(n) for n in (1, 2, 5, 6, 9)] == [
        (),
        (),
        (2,),
        (2, 5),
        (2, 5, 8),
    ]


@pytest.mark.parametrize("restarts", [(0,), (5,), (2, -1)])
def test_restarts_outside_the_iteration_are_refused(restarts):
    table = jnp.asarray((JORDAN,) * 5)
    with pytest.raises(ValueError, match="restarts must lie in 1..4"):
        gram_iterations(jnp.eye(4)[None], table, 5, restarts)


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_preconditioning(preconditioning, kind):
    x = hard_batch()[[0, 3]][:, :24, :40]
    if kind == "complex":
        x = x + 1j * hard_batch()[[1, 4]][:, 24:48, 40:80]
    x = jnp.asarray(x, jnp.complex64 if kind == "complex" else jnp.float32)
    options = {"preconditioning": preconditioning}
    direct = iterate(x, JORDAN, **options)
    gram = iterate(x, JORDAN, method="gram", **options)
    for one, found, found_gram in zip(x, direct, gram, strict=True):
        right = textbook_newton_schulz(one, **options)
        assert relative(found, right) < 1e-5
        assert relative(found_gram, right) < 1e-3
        if kind == "complex" and preconditioning == "schatten":
            continue  # optax multiplies by the plain transpose there
        theirs = optax_newton_schulz(one, preconditioning=preconditioning)
        assert relative(found, theirs) < 1e-5


@pytest.mark.parametrize("preconditioning", ["aol", "schatten"])
def test_preconditioning_in_half_precision_keeps_small_rows(preconditioning):
    x = normal(16, 64) * np.geomspace(1, 1e-3, 16, dtype=np.float32)[:, None]
    right = textbook_newton_schulz(x, preconditioning=preconditioning)
    options = {"preconditioning": preconditioning, "compute_dtype": "float16"}
    found = iterate(x[None], JORDAN, **options)[0]
    assert relative(found, right) < 2e-2


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_traced_steps_are_the_static_ones(method):
    x = jnp.asarray(hard_batch()[:4, :16, :32], jnp.float32)
    traced = jax.jit(
        lambda x, steps: orthogonalize_batch(
            x, jnp.asarray(JORDAN), steps, method=method
        )
    )
    for steps in (1, 2, 3, 6, 9):
        right = [textbook_newton_schulz(one, (JORDAN,) * steps) for one in x]
        found = traced(x, steps)
        assert relative(found, right) < 2e-4
    assert traced._cache_size() == 1


def test_traced_steps_restart_as_often():
    """Nine steps in fp16 diverge on this spectrum with only the first restart."""
    x = jnp.asarray(hard_batch()[4:5], jnp.float32)
    options = {"method": "gram", "compute_dtype": "float16"}
    static = iterate(x, JORDAN, 9, **options)
    traced = jax.jit(
        lambda x, n: orthogonalize_batch(x, jnp.asarray(JORDAN), n, **options)
    )(x, 9)
    once = iterate(x, JORDAN, 9, restarts=(2,), **options)
    right = textbook_newton_schulz(hard_batch()[4], (JORDAN,) * 9)
    assert relative(static[0], right) < 0.2
    assert relative(traced[0], right) < 0.2
    assert not relative(once[0], right) < 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("method", ["direct", "gram"])
def test_special_matrices(method, dtype):
    rank_one = np.outer(normal(8), normal(12, seed=1))
    one_row = np.zeros((8, 12))
    one_row[0] = normal(12, seed=2)
    wide = np.stack([rank_one, one_row, np.zeros((8, 12))]).astype(np.float32)
    for eps in (1e-8, 0.0):
        found = orthogonalize_batch(
            wide, jnp.asarray(JORDAN), 5, method=method, compute_dtype=dtype, eps=eps
        )
        found = np.asarray(found, np.float64)
        tolerance = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 6e-2}[dtype]
        top = np.linalg.norm(found[0], 2)
        assert abs(top - 0.69644) < max(tolerance, 5e-3)
        right = 0.69644 * one_row / np.linalg.norm(one_row)
        assert relative(found[1], right) < tolerance
        assert np.all(found[1, 1:] == 0)
        assert np.all(found[2] == 0)


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scale_does_not_matter_without_eps(dtype, preconditioning):
    g = normal(16, 48)
    batch = np.stack([g, g * 1e30, g * 1e-20, g * 2.0**-100, g * 2.0**120])
    options = {"preconditioning": preconditioning, "compute_dtype": dtype}
    found = np.asarray(iterate(batch, JORDAN, eps=0.0, **options), np.float64)
    right = textbook_newton_schulz(g, preconditioning=preconditioning)
    assert relative(found[0], right) < {"float32": 1e-5, "float16": 3e-3}[dtype]
    for other in found[1:3]:
        assert relative(other, found[0]) < {"float32": 2e-6, "float16": 3e-3}[dtype]
    for other in found[3:]:
        np.testing.assert_array_equal(other, found[0])


def test_eps_is_optax_eps_at_any_scale():
    unit = normal(64, 64) / np.linalg.norm(normal(64, 64))
    sizes = np.array([1, 1e-9, 1e-10, 1e-12], np.float32)
    found = iterate(unit * sizes[:, None, None], JORDAN, eps=1e-8)
    for x, one in zip(unit * sizes[:, None, None], found, strict=True):
        assert relative(one, optax_newton_schulz(jnp.asarray(x))) < 1e-5
    norms = np.linalg.norm(found, axis=(1, 2))
    assert np.all(np.diff(norms) < 0) and norms[-1] < norms[0] / 100
    huge = iterate(unit[None] * np.float32(1e30), JORDAN, eps=1e-8)[0]
    assert relative(huge, found[0]) < 1e-5


@pytest.mark.parametrize("scale", [3e3, 1e-3])
def test_half_precision_gradients_do_not_overflow(scale):
    g = (scale * normal(64, 64)).astype(np.float16)
    limits = np.finfo(np.float16)
    square = np.sum(g.astype(np.float64) ** 2)
    assert square > limits.max or g.min() ** 2 < limits.tiny
    found = iterate(g[None], JORDAN, compute_dtype="float16")[0]
    assert relative(found, textbook_newton_schulz(g)) < 2e-2


@pytest.mark.parametrize(
    "method, preconditioning",
    [*(("direct", each) for each in PRECONDITIONINGS), ("gram", "frobenius")],
)
def test_a_bad_matrix_poisons_only_itself(method, preconditioning):
    good = hard_batch()[:4, :8, :16].astype(np.float32)
    bad = good.copy()
    bad[1, 0, 0], bad[2, 3, 4] = np.nan, np.inf
    options = {"method": method, "preconditioning": preconditioning}
    found = np.asarray(iterate(bad, JORDAN, **options))
    right = np.asarray(iterate(good, JORDAN, **options))
    np.testing.assert_array_equal(found[[0, 3]], right[[0, 3]])
    assert not np.isfinite(found[1]).all()
    assert not np.isfinite(found[2]).all()


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_a_matrix_does_not_depend_on_its_neighbours(method):
    x = hard_batch()[:4, :16, :32].astype(np.float32)
    together = iterate(x, JORDAN, method=method)
    np.testing.assert_array_equal(together, iterate(x, JORDAN, method=method))
    turned = iterate(x[::-1].copy(), JORDAN, method=method)[::-1]
    np.testing.assert_array_equal(turned, together)
    for one, found in zip(x, together, strict=True):
        assert relative(iterate(one[None], JORDAN, method=method)[0], found) < 1e-5


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_zero_rows_and_columns_are_neutral(method):
    x = normal(10, 40)
    padded = np.zeros((16, 64), np.float32)
    padded[:10, :40] = x
    found = iterate(padded[None], JORDAN, method=method)[0]
    right = textbook_newton_schulz(x)
    assert relative(found[:10, :40], right) < 1e-4
    assert np.all(found[10:] == 0) and np.all(found[:, 40:] == 0)


@pytest.mark.parametrize("method, traced", [("gram", False), ("direct", True)])
def test_memory_does_not_grow_with_the_steps(method, traced):
    x = jax.ShapeDtypeStruct((1, 128, 512), jnp.float32)
    table = jax.ShapeDtypeStruct((3,), jnp.float32)

    def temporary_bytes(steps):
        def run(x, table):
            number = jnp.asarray(steps) if traced else steps
            return orthogonalize_batch(x, table, number, method=method)

        compiled = jax.jit(run).lower(x, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few = temporary_bytes(5)
    assert 0 < few
    assert temporary_bytes(20) <= few + 4096  # the constants of the extra steps


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_no_product_is_left_to_the_default_precision(method):
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    for preconditioning in ("frobenius", "aol"):
        text = iterate.lower(
            x, np.asarray(JORDAN), method=method, preconditioning=preconditioning
        ).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert products
        for line in products:
            assert re.search(r"precision = \[HIGHEST, HIGHEST\]", line), line


def test_half_precision_products_accumulate_in_float32():
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float16)
    text = iterate.lower(x, np.asarray(JORDAN), compute_dtype="float16").as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(line.rstrip().endswith("xf32>") for line in products), products


def test_double_precision():
    with jax.enable_x64(True):
        x = jnp.asarray(hard_batch()[:3, :16, :32])
        assert x.dtype == jnp.float64
        found = orthogonalize_batch(
            x, jnp.asarray(JORDAN), 5, compute_dtype=jnp.float64
        )
        right = [textbook_newton_schulz(one) for one in x]
        assert found.dtype == jnp.float64
        # The kernels keep the coefficients in float32.
        assert relative(found, right) < 1e-6


@pytest.mark.parametrize("shape", [(1, 32, 64), (2, 32, 64)])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("method", ["direct", "gram"])
def test_memory_does_not_grow_with_the_number_of_steps(method, dtype, shape):
    def temporary(steps):
        def run(x, row):
            return orthogonalize_batch(
                x, row, steps, method=method, compute_dtype=dtype
            )

        compiled = jax.jit(run).lower(jnp.ones(shape), jnp.ones(3)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # 16 coefficients a step beside the matrices.
    assert temporary(20) <= temporary(5) + 15 * 16 * 4


@pytest.mark.parametrize("method", ["direct", "gram"])
@pytest.mark.parametrize("shape", [(2, 300, 700), (1, 257, 257)])
def test_matrices_are_padded_once(method, shape):
    """For a GPU whose kernels want multiples of their tiles; nothing else is padded."""
    mesh = cases.abstract_mesh("NVIDIA A100", 108)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(
            lambda x, row: orthogonalize_batch(
                x, row, 5, method=method, compute_dtype=jnp.float16
            )
        )(jnp.ones(shape), jnp.ones(3))
    text = str(jaxpr)
    assert text.count("pallas_call") >= 2 and text.count(" pad[") == 1


def test_padding_changes_nothing():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 70, 100)), jnp.float32)
    found = {
        implementation: orthogonalize_batch(
            x,
            jnp.asarray(JORDAN),
            5,
            method="gram",
            compute_dtype=jnp.float16,
            implementation=implementation,
        )
        for implementation in ("xla", "pallas_triton_interpret")
    }
    first, second = (np.asarray(y, np.float64) for y in found.values())
    assert first.shape == second.shape == x.shape
    assert relative(second, first) < 5e-3
