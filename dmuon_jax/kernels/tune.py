"""Measures every candidate for a problem on the device at hand, and keeps the results.

Explicit: nothing here runs while a program is traced. Several processes that run one
program must all be given the same `Verdicts`: tune in one, share the file.
"""

import dataclasses
import functools
import json
import os
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dmuon_jax.kernels import api
from dmuon_jax.kernels.records import write_text
from dmuon_jax.kernels.select import Choice, Problem, Verdicts, candidates
from dmuon_jax.kernels.support import target_device
from dmuon_jax.kernels.tiles import ChainConfig, TileConfig

# Raised whenever a kernel changes, so that older measurements are not used for it.
KERNELS_VERSION = 1

# A candidate's error may exceed XLA's by this factor (both against fp32).
ERROR_FACTOR = 1.5

_COEFFICIENTS = (0.75, -1.5, 0.25)
_STEPS = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al. 2024, "Muon"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How one candidate did.

    Attributes:
      problem: What it was measured on.
      choice: The candidate.
      time_us: Microseconds per call; None where it failed.
      error: Relative (Frobenius) error against fp32; None where it did not run.
      failure: Why it may not be chosen; "" where it may.
    """

    problem: Problem
    choice: Choice
    time_us: float | None
    error: float | None
    failure: str


def time_us(
    function: Callable[..., jax.Array],
    *operands: jax.Array,
    repeats: int = 5,
    target_s: float = 0.02,
) -> float:
    """Median microseconds of one call of *function*, calls following back to back.

    The calls are a loop of fixed length in one program, each kept from being moved out
    of the loop or merged with another, so that neither Python nor dispatch is timed.
    Wall clock, about *target_s* seconds in each of *repeats* runs, less a short loop.
    """
    short = 4
    program = _loop(function, short, operands)
    few = _fastest_s(program, operands) / short
    count = 3 * short + min(10_000, int(target_s / max(few, 1e-7)))
    overhead = _fastest_s(program, operands)
    program = _loop(function, count, operands)
    runs = [_fastest_s(program, operands, tries=1) for _ in range(repeats)]
    seconds = statistics.median(runs)
    if seconds <= overhead:
        # Noise larger than what is measured: all that is known is an upper bound.
        return seconds / count * 1e6
    return (seconds - overhead) / (count - short) * 1e6


def _loop(function, count: int, operands: tuple) -> Callable[..., jax.Array]:
    """The compiled program of *count* calls of *function*, already run once."""

    def repeated(*operands):
        def body(_, carry):
            operands, _ = jax.lax.optimization_barrier(carry)
            return operands, function(*operands)

        result = jax.eval_shape(function, *operands)
        first = operands, jnp.zeros(result.shape, result.dtype)
        return jax.lax.fori_loop(0, count, body, first)[1]

    program = jax.jit(repeated).lower(*operands).compile()
    jax.block_until_ready(program(*operands))
    return program


def _fastest_s(program, operands: tuple, tries: int = 3) -> float:
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _operands(problem: Problem) -> tuple[Callable[..., jax.Array], tuple]:
    """The entry point of *problem* and random operands of its exact shape."""
    columns = problem.columns
    if problem.kernel in ("symmetric_matmul", "polynomial_chain"):
        columns = 2 * problem.rows
    shape = (problem.batch, problem.rows, columns)
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    x = (x / (shape[-1] ** 0.5 + shape[-2] ** 0.5)).astype(problem.dtype)
    if problem.kernel == "gram":
        return api.gram, (x,)
    if problem.kernel == "direct_chain":
        return api.direct_chain, (x, jnp.asarray(_STEPS))
    r = api.gram(x, implementation="xla")
    if problem.kernel == "polynomial_chain":
        return api.polynomial_chain, (r, jnp.asarray(_STEPS))
    return api.symmetric_matmul, (r, r, r, jnp.asarray(_COEFFICIENTS))


def _relative_error(value: jax.Array, reference: jax.Array) -> float:
    difference = jnp.linalg.norm((value.astype(jnp.float32) - reference).ravel())
    return float(difference / jnp.linalg.norm(reference.ravel()))


def _check_empty_slots(problem: Problem, function, operands) -> str:
    """Runs *function* with its first slot EMPTY and full of NaN; says what is wrong."""
    valid = jnp.arange(problem.batch) > 0
    masked = [
        operand.at[0].set(jnp.nan) if operand.shape[:1] == valid.shape else operand
        for operand in operands
    ]
    whole = function(*operands)
    result = function(*masked, valid=valid)
    if jnp.any(result[0] != 0):
        return "an EMPTY slot did not give zeros"
    if not jnp.array_equal(result[1:], whole[1:]):
        return "an EMPTY slot changed another"
    return ""


def _measure_one(
    problem: Problem, choice: Choice, device_kind: str, allowed_error: float
) -> Measurement:
    verdicts = Verdicts(device_kind, ((problem, choice),))
    entry, operands = _operands(problem)
    function = functools.partial(entry, implementation=verdicts)
    reference = entry(
        *(operand.astype(jnp.float32) for operand in operands), implementation="xla"
    )
    failed = functools.partial(Measurement, problem, choice, None)
    try:
        error = _relative_error(jax.jit(function)(*operands), reference)
        # Written so that a NaN fails.
        if not error <= allowed_error:
            return failed(error, f"error must be at most {allowed_error:.3g}")
        wrong = _check_empty_slots(problem, jax.jit(function), operands)
        if wrong:
            return failed(error, wrong)
        return Measurement(problem, choice, time_us(function, *operands), error, "")
    except (RuntimeError, ValueError) as failure:
        # Tiles that do not fit, or that a compiler rejects, are expected: a result.
        return failed(None, f"{type(failure).__name__}: {failure}".splitlines()[0])


def measure(
    problem: Problem, choices: Sequence[Choice] | None = None
) -> tuple[Measurement, ...]:
    """Checks and times *choices* (None: every candidate) for *problem*, XLA first.

    Raises:
      RuntimeError: XLA's own version failed, so that nothing can be judged.
    """
    device = target_device()
    if choices is None:
        choices = candidates(problem, device)
    baseline = _measure_one(problem, Choice("xla", None, ""), device.kind, float("inf"))
    if baseline.failure or baseline.error is None:
        raise RuntimeError(f"XLA failed on {problem}: {baseline.failure}")
    allowed = ERROR_FACTOR * baseline.error
    others = (choice for choice in choices if choice.implementation != "xla")
    return (
        baseline,
        *(_measure_one(problem, each, device.kind, allowed) for each in others),
    )


def judge(device_kind: str, measurements: Sequence[Measurement]) -> Verdicts:
    """The fastest candidate of each problem among those that passed."""
    best: dict[Problem, tuple[float, Choice]] = {}
    for each in measurements:
        if each.failure or each.time_us is None:
            continue
        if each.problem not in best or each.time_us < best[each.problem][0]:
            best[each.problem] = each.time_us, each.choice
    entries = tuple(
        (problem, dataclasses.replace(choice, reason=f"measured: {us:.4g} microseconds"))
        for problem, (us, choice) in best.items()
    )
    return Verdicts(device_kind, entries)


def table_path(directory: str | os.PathLike[str], device_kind: str) -> pathlib.Path:
    """The file in *directory* that holds this device kind's measurements."""
    kind = "".join(c if c.isalnum() else "_" for c in device_kind)
    name = f"{kind}-jax{jax.__version__}-kernels{KERNELS_VERSION}.json"
    return pathlib.Path(directory) / name


def _to_json(measurement: Measurement) -> dict:
    return dataclasses.asdict(measurement)


def _from_json(record: dict) -> Measurement:
    choice = record["choice"]
    config = choice["config"]
    if config is not None:
        config = (TileConfig if "rows" in config else ChainConfig)(**config)
    return Measurement(
        **record
        | {
            "problem": Problem(**record["problem"]),
            "choice": Choice(**choice | {"config": config}),
        }
    )


def read(path: str | os.PathLike[str]) -> tuple[str, tuple[Measurement, ...]]:
    """The device kind and the measurements in the file *path*.

    Raises:
      OSError: It cannot be read.
      ValueError: It is damaged, or none of `write`.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        measurements = tuple(_from_json(each) for each in content["measurements"])
        return str(content["device_kind"]), measurements
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must hold measurements of kernels: {error}") from error


def write(
    path: str | os.PathLike[str],
    device_kind: str,
    measurements: Sequence[Measurement],
) -> None:
    """Writes the file *path*, whole or not at all."""
    content = {
        "device_kind": device_kind,
        "jax": jax.__version__,
        "kernels_version": KERNELS_VERSION,
        "measurements": [_to_json(each) for each in measurements],
    }
    write_text(pathlib.Path(path), json.dumps(content, indent=1) + "\n")


def load(path: str | os.PathLike[str]) -> Verdicts:
    """The verdicts of the file *path*, to pass as `implementation`."""
    return judge(*read(path))


def tune(
    problems: Sequence[Problem],
    directory: str | os.PathLike[str],
    report: Callable[[Measurement], None] = lambda measurement: None,
) -> Verdicts:
    """Measures those of *problems* that *directory* has no measurements of.

    Args:
      problems: Exact live shapes, small and ragged ones included.
      directory: Where results are kept: one JSON file per device kind and version.
      report: Called with every new measurement.

    Returns:
      The verdicts on everything measured for this device kind so far.

    Raises:
      RuntimeError: As for `measure`.
    """
    kind = target_device().kind
    path = table_path(directory, kind)
    found, faults = _known(path)
    for problem in dict.fromkeys(problems):
        if problem in found:
            continue
        found[problem] = measure(problem)
        try:
            # What other processes have measured meanwhile is kept.
            found = _known(path)[0] | found
            write(path, kind, sum(found.values(), ()))
        except OSError as error:
            faults.append(f"not kept: {error}")
        for each in found[problem]:
            report(each)
    if faults:
        warnings.warn(f"measurements of kernels: {faults[0]}", stacklevel=2)
    return judge(kind, sum(found.values(), ()))


def _known(path: pathlib.Path) -> tuple[dict[Problem, tuple], list[str]]:
    """The measurements in *path* by problem, and what is wrong with it."""
    found: dict[Problem, tuple] = {}
    try:
        for each in read(path)[1]:
            found[each.problem] = (*found.get(each.problem, ()), each)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        return {}, [f"ignored: {error}"]
    return found, []
