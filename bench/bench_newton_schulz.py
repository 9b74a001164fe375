"""Newton-Schulz by shape: implementation x form x dtype, against optax and torch.

    python bench/bench_newton_schulz.py                      # everything, on a GPU
    python bench/bench_newton_schulz.py --shapes 2048x2048 --tune bench/tiles

Each case is checked against fp32 first, and timed only if it is right. Results go to
bench/results/newton_schulz-DEVICE.json after every case; a failure is a result too.
With --tune, tile sizes of every product are measured before, kept in that folder, and
used by the implementation "tuned".
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import optax

from dmuon_jax import kernels
from dmuon_jax.kernels import tune

# batch, short side, long side
SHAPES = (
    (4096, 64, 64),
    (64, 256, 1024),
    (8, 1024, 4096),
    (1, 2048, 2048),
    (4, 2048, 2048),
    (1, 2048, 8192),
    (4, 2048, 8192),
    (1, 4096, 4096),
    (1, 4096, 14336),
    (1, 7168, 18432),
    (8, 1280, 2560),
    (8, 2560, 2560),
    (64, 1408, 2048),
)
QUICK_SHAPES = ((8, 64, 64), (2, 96, 160))

# Keller Jordan's quintic (2024), five steps; the Gram form starts over before step 2.
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5
RESTART = 2

# Dense 16-bit TFLOP/s and TB/s: published peaks, not measurements.
PEAKS = {"H200": (989, 4.8), "H100": (989, 3.35), "A100": (312, 2.0), "B200": (2250, 8)}

# The largest relative error against fp32 that counts as right.
TOLERANCE = {"float16": 3e-2, "bfloat16": 2e-1, "float32": 5e-2}

IMPLEMENTATIONS = ("xla", "pallas_triton", "pallas_mosaic_sm90", "auto")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: *name* is an implementation of ours, or whose code it is."""

    name: str
    form: str
    dtype: str
    batch: int
    short: int
    long: int


def normalise(x, dtype):
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    return (x / (norm + 1e-7)).astype(dtype)


def direct(x, coefficients, implementation, dtype):
    """The iteration on X itself."""
    x = normalise(x, dtype)
    return kernels.direct_chain(x, coefficients, implementation=implementation)


def gram(x, coefficients, implementation, dtype):
    """The iteration on X X^T, started over once from the new X; padded once."""
    shape = x.shape
    x = normalise(x, dtype)
    multiple = kernels.pad_multiple(shape, dtype, implementation=implementation)
    x = jnp.pad(x, [(0, 0), *((0, -size % multiple) for size in shape[1:])])
    for part in (coefficients[:RESTART], coefficients[RESTART:]):
        r = kernels.gram(x, implementation=implementation)
        q = kernels.polynomial_chain(r, part, implementation=implementation)
        x = kernels.matmul(q, x)
    return x[:, : shape[1], : shape[2]]


def optax_newton_schulz(x):
    """optax.contrib's, through its public transform without momentum."""
    transform = optax.contrib.scale_by_muon(
        ns_coeffs=COEFFICIENTS[0],
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
    )
    return transform.update(x, transform.init(x))[0]


def flops(case: Case) -> int:
    """Of the plain algorithm, every product computed in full."""
    m, n = case.short, case.long
    if case.form == "gram":
        return case.batch * (8 * m * m * n + 28 * m**3)
    return case.batch * (20 * m * m * n + 10 * m**3)


def floor_us(case: Case, kind: str) -> float | None:
    """Least time at published peaks, symmetric results half computed, X moved once."""
    peaks = [peak for name, peak in PEAKS.items() if name in kind]
    if not peaks:
        return None
    m, n = case.short, case.long
    halved = 6 * m * m * n + 14 * m**3
    if case.form == "direct":
        halved = 15 * m * m * n + 5 * m**3
    tflops, tbytes = peaks[0]
    moved = 2 * 2 * m * n
    return case.batch * max(halved / tflops, moved / tbytes) * 1e-6


def relative_error(value, reference):
    difference = jnp.linalg.norm((value.astype(jnp.float32) - reference).ravel())
    return float(difference / jnp.linalg.norm(reference.ravel()))


def measure(case: Case, function, reference, x, kind) -> dict:
    """The record of one case: right or not, then how fast."""
    record = dataclasses.asdict(case)
    try:
        error = relative_error(jax.jit(function)(x), reference)
        record["error"] = error
        if not error <= TOLERANCE[case.dtype]:
            return record | {"failure": f"error above {TOLERANCE[case.dtype]}"}
        record["time_us"] = tune.time_us(function, x)
    except (RuntimeError, ValueError) as failure:
        # A kernel that this device cannot run or compile is a result.
        return record | {"failure": f"{type(failure).__name__}: {failure}"[:300]}
    record["tflops"] = flops(case) / record["time_us"] * 1e-6
    least = floor_us(case, kind)
    if least is not None:
        record["share_of_roofline"] = least / record["time_us"]
    return record


def measure_torch(case: Case, x, reference) -> dict:
    """torch.compile of the direct form, on the same matrices."""
    record = dataclasses.asdict(case)
    try:
        return record | time_torch(case, x, reference)
    except (ImportError, RuntimeError, ValueError) as failure:
        # No CUDA, no compiler, another CUDA than JAX's: a result too.
        return record | {"failure": f"{type(failure).__name__}: {failure}"[:300]}


def time_torch(case: Case, x, reference) -> dict:
    """Right or not, then how fast."""
    import torch

    if not torch.cuda.is_available():
        return {"failure": "torch has no CUDA device"}
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[case.dtype]

    @torch.compile
    def newton_schulz(x):
        x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
        for a, b, c in COEFFICIENTS:
            r = x @ x.mT
            x = a * x + (b * r + c * r @ r) @ x
        return x

    # Through DLPack: torch's copy is on the same GPU.
    given = torch.from_dlpack(x)
    error = relative_error(jnp.from_dlpack(newton_schulz(given)), reference)
    if not error <= TOLERANCE[case.dtype]:
        return {"error": error, "failure": f"error above {TOLERANCE[case.dtype]}"}
    for _ in range(3):
        newton_schulz(given)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 20
    for _ in range(count):
        newton_schulz(given)
    torch.cuda.synchronize()
    time_us = (time.perf_counter() - begin) / count * 1e6
    return {
        "error": error,
        "time_us": time_us,
        "tflops": flops(case) / time_us * 1e-6,
    }


def problems(shape, dtype):
    """What the tuner has to settle for one shape."""
    batch, short, long = shape
    sides = {
        "gram": (short, long),
        "symmetric_matmul": (short, short),
        "polynomial_chain": (short, short),
        "direct_chain": (short, long),
    }
    return [kernels.Problem(k, batch, *pair, dtype) for k, pair in sides.items()]


def cases_of(shape, dtypes, verdicts):
    """Every case of one shape with its function (None: torch's)."""
    coefficients = jnp.asarray(COEFFICIENTS)
    forms = {"direct": direct, "gram": gram}
    named = {name: None if name == "auto" else name for name in IMPLEMENTATIONS}
    if verdicts is not None:
        named["tuned"] = verdicts
    for dtype in dtypes:
        for form, function in forms.items():
            if form == "gram" and shape[1] == shape[2]:
                continue
            for name, implementation in named.items():
                given = {
                    "coefficients": coefficients,
                    "implementation": implementation,
                    "dtype": dtype,
                }
                yield (
                    Case(name, form, dtype, *shape),
                    functools.partial(function, **given),
                )
        yield (
            Case("optax", "direct", dtype, *shape),
            lambda x, dtype=dtype: optax_newton_schulz(x.astype(dtype)),
        )
        if importlib.util.find_spec("torch"):
            yield Case("torch.compile", "direct", dtype, *shape), None
    yield Case("optax", "direct", "float32", *shape), optax_newton_schulz


def run_shape(shape, dtypes, verdicts, kind):
    """The records of one shape, one after another."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    exact = functools.partial(direct, implementation="xla", dtype="float32")
    reference = jax.jit(exact)(x, jnp.asarray(COEFFICIENTS))
    for case, function in cases_of(shape, dtypes, verdicts):
        if function is None:
            yield measure_torch(case, x, reference)
        else:
            yield measure(case, function, reference, x, kind)


def parse(text: str) -> tuple[int, int, int]:
    sides = [int(side) for side in text.split("x")]
    return (1, *sides) if len(sides) == 2 else tuple(sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="*", help="[BATCHx]SHORTxLONG, ...")
    parser.add_argument("--dtypes", nargs="*", default=["float16", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="small shapes, to try it")
    parser.add_argument("--tune", help="measure tile sizes first; keep them here")
    parser.add_argument("--directory", default="bench/results")
    arguments = parser.parse_args()
    shapes = QUICK_SHAPES if arguments.quick else SHAPES
    if arguments.shapes:
        shapes = [parse(text) for text in arguments.shapes]
    device = jax.local_devices()[0]
    kind = device.device_kind
    name = "".join(c if c.isalnum() else "_" for c in kind)
    path = pathlib.Path(arguments.directory) / f"newton_schulz-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    records = []
    for shape in shapes:
        verdicts = None
        if arguments.tune:
            wanted = [p for dtype in arguments.dtypes for p in problems(shape, dtype)]
            verdicts = tune.tune(wanted, arguments.tune)
        for record in run_shape(shape, arguments.dtypes, verdicts, kind):
            records.append(record)
            print(json.dumps(record), flush=True)
            content = {"device": kind, "jax": jax.__version__, "records": records}
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
