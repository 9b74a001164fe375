"""The entry points of the kernels: values through XLA, choices, refusals, lowering."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dmuon_jax import kernels
from dmuon_jax.kernels.select import candidates
from dmuon_jax.kernels.support import describe_device
from dmuon_jax.kernels.tiles import ChainConfig, TileConfig, triangle_order
from tests import kernel_cases as cases

COEFFICIENTS = np.array([0.75, -1.5, 0.25], np.float32)
STEPS = np.array([[3.4445, -4.7750, 2.0315], [1.875, -1.25, 0.375]], np.float32)
ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "complex64": 2e-6}

H200 = ("NVIDIA H200", 132)
A100 = ("NVIDIA A100-SXM4-40GB", 108)
B200 = ("NVIDIA B200", 148)
T4 = ("Tesla T4", 40)


def matrices(shape, dtype):
    x = cases.matrices(shape, "float32" if dtype == "complex64" else dtype)
    if dtype == "complex64":
        x = x + 1j * cases.matrices(shape, "float32", seed=1)
    return x


@pytest.mark.parametrize("dtype", ROUNDING)
def test_values(dtype):
    x = matrices((2, 3, 17, 40), dtype)
    r = kernels.gram(x)
    assert r.dtype == x.dtype and r.shape == (2, 3, 17, 17)
    bound = ROUNDING[dtype]
    assert cases.relative_error(r, cases.gram(x)) < bound
    for c in (r, None):
        d = kernels.symmetric_matmul(r, r, c, COEFFICIENTS)
        assert d.dtype == x.dtype
        reference = cases.symmetric_matmul(r, r, c, COEFFICIENTS)
        assert cases.relative_error(d, reference) < bound
    product = kernels.matmul(r, x)
    assert product.dtype == x.dtype
    assert cases.relative_error(product, cases.wide(r) @ cases.wide(x)) < bound
    q = kernels.polynomial_chain(r, STEPS)
    assert q.dtype == x.dtype
    assert cases.relative_error(q, cases.polynomial_chain(r, STEPS)) < 5 * bound
    y = kernels.direct_chain(x, STEPS)
    assert y.dtype == x.dtype
    assert cases.relative_error(y, cases.direct_chain(x, STEPS)) < 5 * bound


def test_empty_slots_give_zeros_whatever_they_hold():
    x = matrices((3, 16, 24), "float32").at[1].set(jnp.nan)
    valid = jnp.array([True, False, True])
    r = kernels.gram(x, valid=valid)
    assert np.all(np.isfinite(r)) and np.all(np.any(r, (1, 2)) == valid)
    nan = r.at[1].set(jnp.nan)
    for result in (
        kernels.symmetric_matmul(nan, nan, nan, COEFFICIENTS, valid=valid),
        kernels.polynomial_chain(nan, STEPS, valid=valid),
        kernels.direct_chain(x, STEPS, valid=valid),
    ):
        assert np.all(np.any(result, (1, 2)) == valid) and np.all(np.isfinite(result))


def test_zeros_stay_zeros():
    assert not np.any(kernels.direct_chain(jnp.zeros((1, 8, 8), jnp.float16), STEPS))


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (TypeError, "x must be floating", lambda k, x: k.gram(x.astype(int))),
        (ValueError, "x must have at least 2", lambda k, x: k.gram(x[0, 0])),
        (TypeError, "valid must be bool", lambda k, x: k.gram(x, valid=jnp.ones(2))),
        (
            ValueError,
            r"valid must have the batch shape \(2,\), got \(3,\)",
            lambda k, x: k.gram(x, valid=jnp.ones(3, bool)),
        ),
        (
            ValueError,
            "implementation must be None.*got 'triton'",
            lambda k, x: k.gram(x, implementation="triton"),
        ),
        (
            ValueError,
            "a must hold square matrices",
            lambda k, x: k.symmetric_matmul(x, x, x, COEFFICIENTS),
        ),
        (
            ValueError,
            "b must have the shape and dtype of a",
            lambda k, x: k.symmetric_matmul(x[:, :, :4], x, None, COEFFICIENTS),
        ),
        (
            ValueError,
            r"coefficients must have shape \(3,\)",
            lambda k, x: k.symmetric_matmul(*[x[:, :, :4]] * 3, STEPS),
        ),
        (
            TypeError,
            "coefficients must be real",
            lambda k, x: k.direct_chain(x, STEPS.astype(int)),
        ),
        (
            NotImplementedError,
            r"pallas_mosaic_sm90 needs CUDA compute capability 9.0, got cpu \(cpu\)",
            lambda k, x: k.gram(x, implementation="pallas_mosaic_sm90"),
        ),
        (
            NotImplementedError,
            "pallas_triton_interpret.* needs .*float16.* got float32",
            lambda k, x: k.gram(x, implementation="pallas_triton_interpret"),
        ),
    ],
)
def test_refusals(error, match, call):
    with pytest.raises(error, match=match):
        call(kernels, jnp.ones((2, 4, 8)))


def chosen(kernel, shape, dtype, device, implementation=None):
    x = jax.ShapeDtypeStruct(shape, dtype)
    with jax.sharding.use_abstract_mesh(cases.abstract_mesh(*device)):
        return kernels.choose(kernels.Problem.of(kernel, x), implementation)


HOPPER = "pallas_mosaic_sm90" if jax.__version_info__ >= (0, 11) else "pallas_triton"


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "device", "expected"),
    [
        ("gram", (2, 2048, 8192), "float16", H200, HOPPER),
        ("symmetric_matmul", (2048, 2048), "bfloat16", H200, HOPPER),
        ("gram", (2, 256, 8192), "float16", H200, "pallas_triton"),
        ("gram", (2, 2048, 8192), "float16", A100, "pallas_triton"),
        ("gram", (2, 2048, 8192), "float16", B200, "pallas_triton"),
        ("gram", (2, 2048, 8192), "float16", T4, "xla"),
        ("gram", (2, 2048, 8192), "float32", H200, "xla"),
        ("gram", (2, 2048, 8192), "complex64", H200, "xla"),
        ("gram", (0, 2048, 8192), "float16", H200, "xla"),
        ("gram", (9, 100, 8192), "float16", H200, "xla"),
        ("direct_chain", (4096, 64, 64), "float16", H200, "pallas_triton"),
        ("direct_chain", (4096, 64, 64), "float16", T4, "xla"),
        ("direct_chain", (9, 128, 256), "float16", H200, "composed"),
        ("polynomial_chain", (9, 100, 100), "float16", H200, "pallas_triton"),
        ("polynomial_chain", (9, 100, 100), "float16", A100, "composed"),
        ("polynomial_chain", (9, 300, 300), "float16", H200, "composed"),
    ],
)
def test_choice(kernel, shape, dtype, device, expected):
    choice = chosen(kernel, shape, dtype, device)
    assert choice.implementation == expected and choice.reason


def test_named_choices_are_honoured_or_refused():
    shape, half = (2, 64, 64), "float16"
    for name in ("xla", "pallas_triton"):
        assert chosen("gram", shape, half, A100, name).implementation == name
    assert chosen("gram", shape, half, A100, "pallas").implementation == "pallas_triton"
    assert chosen("gram", shape, half, H200, "pallas").implementation == HOPPER
    with pytest.raises(NotImplementedError, match="9.0, got NVIDIA A100.*8.0"):
        chosen("gram", shape, half, A100, "pallas_mosaic_sm90")
    with pytest.raises(NotImplementedError, match="8.0 or 9.0 or 10.0, got Tesla T4"):
        chosen("gram", shape, half, T4, "pallas")
    with pytest.raises(NotImplementedError, match="float16 or bfloat16, got float32"):
        chosen("gram", shape, "float32", H200, "pallas")


def test_padding_does_not_change_the_choice():
    for size in (257, 700, 1000, 1409, 2048, 2560, 5001):
        for device in (H200, A100):
            choice = chosen("gram", (3, size, 2 * size), "float16", device)
            padded = -(-size // choice.config.rows) * choice.config.rows
            again = chosen("gram", (3, padded, 2 * padded), "float16", device)
            assert again == choice


def test_pad_multiple_is_what_the_kernels_want():
    assert kernels.pad_multiple((2, 100, 200), "float16") == 1
    with jax.sharding.use_abstract_mesh(cases.abstract_mesh(*A100)):
        multiple = kernels.pad_multiple((2, 2000, 4000), "float16")
    assert multiple == chosen("gram", (2, 2000, 4000), "float16", A100).config.rows


def test_verdicts_decide_where_they_have_an_entry():
    problem = kernels.Problem("gram", 2, 2048, 8192, "float16")
    measured = kernels.Choice("xla", None, "measured")
    verdicts = kernels.Verdicts("NVIDIA H200", ((problem, measured),))
    assert chosen("gram", (2, 2048, 8192), "float16", H200, verdicts) == measured
    assert chosen("gram", (2, 2000, 8190), "float16", H200, verdicts) == measured
    other = chosen("gram", (4, 2048, 8192), "float16", H200, verdicts)
    assert other == chosen("gram", (4, 2048, 8192), "float16", H200)
    away = chosen("gram", (2, 2048, 8192), "float16", A100, verdicts)
    assert away == chosen("gram", (2, 2048, 8192), "float16", A100)
    same = kernels.Verdicts("NVIDIA H200", ((problem, measured),))
    assert hash(verdicts) == hash(same)


def test_verdicts_hold_for_what_their_own_tiles_pad_to():
    """Operands are padded to the tile before the kernel is asked for again."""
    problem = kernels.Problem("gram", 1, 1920, 4000, "float16")
    wide = kernels.Choice("pallas_triton", TileConfig(256, 128), "measured")
    verdicts = kernels.Verdicts("NVIDIA H200", ((problem, wide),))
    assert chosen("gram", (1, 1920, 4000), "float16", H200, verdicts) == wide
    assert chosen("gram", (1, 2048, 4096), "float16", H200, verdicts) == wide
    assert chosen("gram", (1, 2112, 4096), "float16", H200, verdicts) != wide


def test_xla_is_always_a_candidate():
    problem = kernels.Problem("gram", 2, 2048, 8192, "float16")
    for kind, num_cores in (H200, A100, B200, T4):
        found = candidates(problem, describe_device("cuda", kind, num_cores))
        assert found[0].implementation == "xla"
        assert (len(found) > 1) == (kind != "Tesla T4")


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("num_rows", "supertile"), [(1, 8), (5, 2), (9, 4)])
def test_triangle_order_covers_the_lower_triangle_once(num_rows, supertile, ratio):
    config = TileConfig(64 * ratio, 64, supertile=supertile)
    tiles = [tuple(tile) for tile in triangle_order(num_rows, config)]
    expected = {(i, j) for i in range(num_rows) for j in range(ratio * (i + 1))}
    assert len(tiles) == len(expected) and set(tiles) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: TileConfig(96, 96),
        lambda: TileConfig(64, 128),
        lambda: TileConfig(64, 64, depth=128),
        lambda: TileConfig(64, 64, num_stages=0),
        lambda: ChainConfig(3),
    ],
)
def test_wrong_configs(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong()


def step(x, valid, coefficients):
    r = kernels.gram(x, valid=valid)
    return kernels.symmetric_matmul(r, r, r, coefficients, valid=valid)


def switched(x, valid, coefficients):
    branches = [lambda x: step(x, valid, coefficients), lambda x: x[:, :, :512]]
    return jax.lax.switch(jax.lax.axis_index("a") % 2, branches, x)


def mapped(x, valid, coefficients):
    def one(x, valid):
        return step(x, valid, coefficients)

    return jax.vmap(one)(x, valid)


def scanned(x, valid, coefficients):
    def body(r, _):
        return kernels.symmetric_matmul(r, r, r, coefficients, valid=valid), None

    return jax.lax.scan(body, x[:, :, :512], length=2)[0]


def small(x, valid, coefficients):
    steps = jnp.stack([coefficients] * 2)
    q = kernels.polynomial_chain(x[:, :64, :64], steps, valid=valid)
    return kernels.direct_chain(q, steps, valid=valid)


TRITON, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"


@pytest.mark.parametrize("body", [step, switched, mapped, scanned, small])
@pytest.mark.parametrize("device", [H200, A100, T4], ids=lambda device: device[0])
def test_one_program_lowers_for_any_platform(body, device):
    """Under shard_map with check_vma: kernels for CUDA, plain XLA elsewhere."""
    mesh = cases.abstract_mesh(*device, size=8)
    spec = PartitionSpec("a")
    program = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec
    )
    operands = (
        jax.ShapeDtypeStruct((8, 512, 1024), jnp.float16),
        jax.ShapeDtypeStruct((8,), jnp.bool_),
        jax.ShapeDtypeStruct((3,), jnp.float32),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(program).trace(*operands)
        texts = {
            platform: traced.lower(lowering_platforms=(platform,)).as_text()
            for platform in ("cuda", "cpu")
        }
    calls = {p: set(re.findall(r"custom_call @([\w.$]+)", t)) for p, t in texts.items()}
    on_hopper = device == H200 and HOPPER != "pallas_triton" and body is not small
    expected = set() if device == T4 else {MOSAIC if on_hopper else TRITON}
    assert calls == {"cuda": expected, "cpu": set()}


def test_a_program_traced_for_a_gpu_runs_here():
    x = matrices((2, 256, 256), "float16")
    with jax.sharding.use_abstract_mesh(cases.abstract_mesh(*A100)):
        jaxpr = str(jax.make_jaxpr(kernels.gram)(x))
    assert "pallas_call" in jaxpr and "platform_index" in jaxpr
    assert "pallas_call" not in str(jax.make_jaxpr(kernels.gram)(x))


def test_importing_touches_no_backend():
    code = (
        "import jax, dmuon_jax.kernels as k, dmuon_jax.kernels.pallas_triton;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
