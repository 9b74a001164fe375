"""What an owner does with a batch of matrices between the exchanges, and its time."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmuon_jax.coefficients import JORDAN
from dmuon_jax.dtypes import dtype_name
from dmuon_jax.gram import check_restarts
from dmuon_jax.kernels.select import Implementation, Verdicts, check_implementation
from dmuon_jax.kernels.tune import KERNELS_VERSION
from dmuon_jax.newton_schulz import PRECONDITIONINGS, orthogonalize_batch
from dmuon_jax.planning.build import COMPUTE_DTYPE, EXCHANGE_DTYPE
from dmuon_jax.planning.cost import Timing
from dmuon_jax.planning.problem import Method, Shape

RUN_S = 0.05
"""Calls that follow one another for about this long make one run of a timing."""

RUNS = 3


@dataclasses.dataclass(frozen=True)
class UpdatePath:
    """How owners update their matrices; what a measurement holds for.

    Attributes:
      compute_dtype: dtype of the iteration; None: the default of the platform.
      exchange_dtype: dtype in which blocks come and go; None: likewise.
      steps: Newton-Schulz steps.
      preconditioning: as for ``dmuon``.
      restarts: as for ``dmuon``.
      implementation: as for ``dmuon``.
    """

    compute_dtype: str | None = None
    exchange_dtype: str | None = None
    steps: int = 5
    preconditioning: str = "frobenius"
    restarts: tuple[int, ...] | None = None
    implementation: Implementation = None

    def __post_init__(self):
        dtype_name("compute_dtype", self.compute_dtype)
        dtype_name("exchange_dtype", self.exchange_dtype)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.preconditioning not in PRECONDITIONINGS:
            raise ValueError(
                f"preconditioning must be one of {PRECONDITIONINGS}, got "
                f"{self.preconditioning!r}"
            )
        check_restarts(self.restarts, self.steps)
        check_implementation(self.implementation)

    def on(self, platform: str) -> "UpdatePath":
        """This path with the platform's dtypes where none are named."""
        return dataclasses.replace(
            self,
            compute_dtype=dtype_name("compute_dtype", self.compute_dtype)
            or COMPUTE_DTYPE.get(platform, "float32"),
            exchange_dtype=dtype_name("exchange_dtype", self.exchange_dtype)
            or EXCHANGE_DTYPE.get(platform, "float32"),
        )


@dataclasses.dataclass(frozen=True)
class Point:
    """What is timed: ``batch`` matrices of ``shape`` by ``method``."""

    shape: Shape
    method: Method
    batch: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.shape[0]} x {self.shape[1]} {self.method}"


def device_name(device: Any) -> str:
    """The kind of a device; with the machine's name for CPUs, which are all called cpu."""
    if device.platform == "cpu":
        return f"{device.device_kind} of {platform.node()}"
    return device.device_kind


def record_key(point: Point, path: UpdatePath, device: Any) -> dict[str, Any]:
    """All that a time depends on, as JSON values."""
    implementation = path.implementation
    if isinstance(implementation, Verdicts):
        implementation = hashlib.sha256(repr(implementation).encode()).hexdigest()
    return {
        "measured": "owner's update",
        "device": device_name(device),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "kernels": KERNELS_VERSION,
        **dataclasses.asdict(dataclasses.replace(path, implementation=None)),
        "implementation": implementation,
        **dataclasses.asdict(point),
    }


def parse_time(point: Point, value: Any) -> float:
    """The time in a record.

    Raises:
      ValueError: it cannot be one.
    """
    if not isinstance(value, dict) or set(value) != {"time_us"}:
        raise ValueError(f"it must hold time_us alone, got {value!r}")
    time_us = value["time_us"]
    if isinstance(time_us, bool) or not isinstance(time_us, int | float):
        raise ValueError(f"time_us must be a number, got {time_us!r}")
    timing = Timing(point.shape, point.method, point.batch, float(time_us))
    return timing.time_us


def time_update_us(point: Point, path: UpdatePath, device: Any) -> float:
    """Microseconds of one update, in calls that follow one another.

    Each call takes the result of the one before, so that they cannot run at once.
    """
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    # A mesh of this device alone, whatever mesh the caller works in.
    with jax.set_mesh(mesh), jax.default_device(device):
        update = functools.partial(update_blocks, path=path, method=point.method)
        x, coefficients = operands(point, path, device)
        program = jax.jit(update).lower(x, coefficients).compile()
        once_s = run_s(program, x, coefficients, 1)
        once_s = min(once_s, run_s(program, x, coefficients, 1))
        count = max(1, int(RUN_S / max(once_s, 1e-6)))
        runs = [run_s(program, x, coefficients, count) / count for _ in range(RUNS)]
        return 1e6 * statistics.median(runs)


def operands(
    point: Point, path: UpdatePath, device: Any
) -> tuple[jax.Array, jax.Array]:
    """Equal random matrices ``[batch, l, s]`` as they travel, and coefficients."""
    matrix = np.random.default_rng(0).random(point.shape[::-1], np.float32) - 0.5
    matrix = jax.device_put(matrix, device).astype(path.exchange_dtype)
    x = jnp.tile(matrix, (point.batch, 1, 1))
    return x, jax.device_put(np.array(JORDAN, np.float32), device)


def update_blocks(
    x: jax.Array, coefficients: jax.Array, *, path: UpdatePath, method: Method
) -> jax.Array:
    """An owner's work between the exchanges on ``[batch, l, s]``, in the dtype of x."""
    exponent = None
    if path.exchange_dtype == "float16":
        exponent = jnp.zeros((len(x), 1, 1), jnp.int32)
    y = orthogonalize_batch(
        jnp.swapaxes(x, -1, -2),
        coefficients,
        path.steps,
        method=method,
        compute_dtype=str(path.compute_dtype),
        preconditioning=path.preconditioning,
        restarts=path.restarts,
        implementation=path.implementation,
        exponent=exponent,
    )
    return jnp.swapaxes(y, -1, -2).astype(x.dtype)


def run_s(program: Any, x: jax.Array, coefficients: jax.Array, count: int) -> float:
    """Seconds of ``count`` calls."""
    start = time.perf_counter()
    for _ in range(count):
        x = program(x, coefficients)
    jax.block_until_ready(x)
    return time.perf_counter() - start
