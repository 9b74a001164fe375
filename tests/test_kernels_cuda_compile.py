"""Every kernel and config we ship, compiled for GPUs that are not here.

Matrix instructions must be there and local memory must stay out of the main loop. The
tiles a measurement may choose beyond the shipped ones are only compiled when asked for.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmuon_jax import kernels
from dmuon_jax.kernels import pallas_mosaic_sm90, pallas_triton, pallas_triton_small
from dmuon_jax.kernels.select import MORE_TILES, TILES
from dmuon_jax.kernels.tiles import TileConfig
from tests import deviceless

pytestmark = [
    pytest.mark.cuda_compile,
    pytest.mark.skipif(deviceless.binaries() is None, reason="needs the CUDA wheels"),
]

MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}
# A batch of no other test: Mosaic writes the code of a kernel once in a process.
X, R = ((3, 1024, 2048), "float16"), ((3, 1024, 1024), "float16")
STEPS = np.array([[3.4445, -4.7750, 2.0315]] * 5, np.float32)
SERIALISED = "each product waits for the one before"
FLAGS, THREE = ((3,), "bool"), ((3,), "float32")


def products(module, config):
    """Both products of *module*, with everything an optimizer passes."""
    return {
        "gram": (lambda x, valid: module.gram(x, valid, config), (X, FLAGS)),
        "symmetric_matmul": (
            lambda r, valid, coefficients: module.symmetric_matmul(
                r, r, r, coefficients, valid, config
            ),
            (R, FLAGS, THREE),
        ),
    }


def compiled_tiles(implementation):
    """Every config that gives code of its own: supertiles only reorder a table."""
    tiles = TILES[implementation] + MORE_TILES[implementation]
    return list(dict.fromkeys(dataclasses.replace(each, supertile=8) for each in tiles))


def label(config):
    if isinstance(config, TileConfig):
        return "-".join(str(value) for value in dataclasses.astuple(config))
    return None


@pytest.mark.parametrize("architecture", MATRIX_INSTRUCTION)
@pytest.mark.parametrize("config", compiled_tiles("pallas_triton"), ids=label)
def test_triton_products(architecture, config, tmp_path):
    instruction = MATRIX_INSTRUCTION[architecture]
    for name, (function, shapes) in products(pallas_triton, config).items():
        compiled = deviceless.compile_for(architecture, function, *shapes)
        code = deviceless.triton_code(compiled, tmp_path)[name]
        assert code.count(instruction) > 0
        assert code.spills_in_loops_with(instruction) == 0
        assert code.stack_bytes == 0
        if config in TILES["pallas_triton"]:
            assert code.count(r"WARPGROUP\.DEPBAR") <= 2, SERIALISED


@pytest.mark.parametrize("config", compiled_tiles("pallas_mosaic_sm90"), ids=label)
def test_mosaic_products(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(deviceless.binaries()), prepend=":")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    for name, (function, shapes) in products(pallas_mosaic_sm90, config).items():
        deviceless.compile_for("sm_90", function, *shapes)
        code = deviceless.mosaic_code(tmp_path)[name]
        assert code.count("UTMALDG") > 0 and code.count("UTMASTG") > 0
        assert code.count("HGMMA") > 0
        assert code.spills_in_loops_with("HGMMA") == 0
        assert code.count(r"WARPGROUP\.DEPBAR") <= 2, SERIALISED


CHAINS = [
    ("polynomial_chain", (32, 32), 1),
    ("polynomial_chain", (64, 64), 4),
    ("polynomial_chain", (128, 128), 8),
    ("direct_chain", (32, 32), 1),
    ("direct_chain", (32, 128), 4),
    ("direct_chain", (64, 64), 4),
    ("direct_chain", (64, 128), 4),
    ("direct_chain", (64, 256), 8),
    ("direct_chain", (128, 128), 8),
]


@pytest.mark.parametrize("architecture", MATRIX_INSTRUCTION)
@pytest.mark.parametrize(("name", "sides", "num_warps"), CHAINS)
def test_chains(architecture, name, sides, num_warps, tmp_path):
    mesh = deviceless.mesh_of(architecture).abstract_mesh
    problem = kernels.Problem(name, 64, *sides, "float16")
    with jax.sharding.use_abstract_mesh(mesh):
        choice = kernels.choose(problem)
    if choice.implementation == "composed":
        assert (architecture, name, sides) == (
            "sm_80",
            "polynomial_chain",
            (128, 128),
        )
        return
    assert choice.config.num_warps == num_warps
    chain = vars(pallas_triton_small)[name]
    compiled = deviceless.compile_for(
        architecture,
        lambda x, valid, steps: chain(x, steps, valid, num_warps),
        ((64, *sides), "float16"),
        ((64,), "bool"),
        ((5, 3), "float32"),
    )
    (code,) = (
        code
        for name, code in deviceless.triton_code(compiled, tmp_path).items()
        if name.endswith("_kernel")
    )
    assert code.stack_bytes == 0
    assert max(code.count(each) for each in ("HMMA", "HGMMA", "UTCHMMA")) > 0


@pytest.mark.parametrize("architecture", MATRIX_INSTRUCTION)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gram", (1, 7168, 18432)),
        ("gram", (1, 512, 18432)),
        ("gram", (4096, 256, 256)),
        ("symmetric_matmul", (1, 7168, 7168)),
        ("direct_chain", (4096, 64, 64)),
        ("polynomial_chain", (4096, 64, 64)),
    ],
)
def test_large_shapes_and_batches_are_one_launch(architecture, name, shape):
    """No padding, no copies, no temporary memory."""

    def call(x):
        if name == "gram":
            return kernels.gram(x)
        if name == "symmetric_matmul":
            return kernels.symmetric_matmul(x, x, x, STEPS[0])
        return vars(kernels)[name](x, STEPS)

    compiled = deviceless.compile_for(architecture, call, (shape, "float16"))
    entry = compiled.as_text().split("ENTRY ", 1)[1]
    launched = re.findall(r" (fusion|custom-call|copy|transpose|convert|pad)\(", entry)
    assert launched == ["custom-call"]
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * 1024


def test_a_whole_step_has_as_few_kernels_as_it_can():
    """Normalise and cast once, then products: nothing copied or padded in between.

    Two passes for the norm, one to cast; 2 Gram matrices and 14 polynomial products in
    16 kernels; 2 sums that start Q; 2 plain products.
    """

    def step(x):
        norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
        x = (x / (norm + 1e-7)).astype(jnp.float16)
        for part in (STEPS[:2], STEPS[2:]):
            q = kernels.polynomial_chain(kernels.gram(x), part)
            x = kernels.matmul(q, x)
        return x

    compiled = deviceless.compile_for("sm_90", step, ((4, 1024, 4096), "float32"))
    entry = compiled.as_text().split("ENTRY ", 1)[1]
    launched = re.findall(r" (fusion|custom-call|copy|transpose|convert)\(", entry)
    assert len(re.findall(r'custom_call_target="mosaic_gpu', entry)) == 16
    assert len(launched) <= 16 + 3 + 2 + 2, launched
    # The Gram matrices, R, Q, Z and RZ, and X twice: nothing in fp32.
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * 2**20 * (4 * 2 + 8 + 1)
