"""How near the iteration comes to the polar factor, by method, table, steps and dtype.

    python bench/bench_numerics.py              # under a minute on one CPU core
    python bench/bench_numerics.py --rows 256 --columns 1024 --time

For each case the largest value over the spectra of

* ``error``: relative distance from the same steps in float64 (what the dtype costs), and
  by itself that of a matrix of rank 1, whose rounding noise the steps lift to rank ``rows``,
* ``polar``: relative distance from the polar factor (what the table and steps leave),
* ``orthogonality``: ``||X Xᵀ - I||_F / sqrt(rows)``,

the last two over the spectra without values below ``FULL_RANK``, as no table reaches those.
With ``--time`` also the median milliseconds as a ratio to the first case, all cases taken
in turn. On CPUs half precision is emulated: there only ratios within float32 mean anything.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from dmuon_jax.coefficients import JORDAN, YOU
from dmuon_jax.newton_schulz import orthogonalize_batch
from dmuon_jax.polar_express import polar_express

RESULTS = pathlib.Path(__file__).parent / "results" / "numerics.json"
FULL_RANK = 1e-2


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to orthogonalize."""

    table: str
    steps: int
    method: str
    dtype: str

    @property
    def rows(self) -> tuple[tuple[float, float, float], ...]:
        """The coefficients of each step."""
        if self.table == "jordan":
            return (JORDAN,) * self.steps
        if self.table == "you":
            return YOU
        return polar_express(self.steps, safety=float(self.table.split()[1]))


TABLES = [
    ("jordan", 5),
    ("you", 5),
    ("polar_express 1.01", 5),
    ("polar_express 1.05", 5),
    ("polar_express 1.01", 8),
    ("jordan", 8),
]
WAYS = [
    ("direct", "float32"),
    ("gram", "float32"),
    ("direct", "float16"),
    ("gram", "float16"),
    ("direct", "bfloat16"),
    ("gram", "bfloat16"),
]
CASES = [Case(*table, *way) for table in TABLES for way in WAYS]


def matrices(rows: int, columns: int) -> dict[str, np.ndarray]:
    """Matrices by the name of their spectrum, in float64."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(rows, rows)))
    right, _ = np.linalg.qr(rng.normal(size=(columns, rows)))
    index = np.arange(rows)
    spectra = {
        "flat": np.ones(rows),
        "clustered": np.where(index < rows // 2, 1, FULL_RANK),
        "1..1e-2": np.geomspace(1, 1e-2, rows),
        "1..1e-4": np.geomspace(1, 1e-4, rows),
        "1..1e-6": np.geomspace(1, 1e-6, rows),
        "rank 1": np.where(index < 1, 1, 0.0),
    }
    found = {name: (left * s) @ right.T for name, s in spectra.items()}
    return {"gaussian": rng.normal(size=(rows, columns)), **found}


def float64_steps(x: np.ndarray, table) -> np.ndarray:
    x = x / np.linalg.norm(x)
    for a, b, c in table:
        r = x @ x.T
        x = a * x + (b * r + c * r @ r) @ x
    return x


@functools.partial(jax.jit, static_argnames=("method", "compute_dtype"))
def run(x, table, method, compute_dtype):
    return orthogonalize_batch(
        x, table, len(table), method=method, compute_dtype=compute_dtype
    )


def measure(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, float]:
    """The three numbers of the head of this file, and the error on each spectrum."""
    x = jnp.asarray(np.stack(list(inputs.values())), jnp.float32)
    table = jnp.asarray(case.rows, jnp.float32)
    found = np.asarray(run(x, table, case.method, case.dtype), np.float64)
    errors, polar, orthogonality = {}, [], []
    for (name, source), y in zip(inputs.items(), found, strict=True):
        right = float64_steps(source, case.rows)
        errors[name] = float(np.linalg.norm(y - right) / np.linalg.norm(right))
        u, s, vh = np.linalg.svd(source, full_matrices=False)
        if s[-1] >= 0.99 * FULL_RANK * s[0]:
            root = np.sqrt(len(s))
            polar.append(float(np.linalg.norm(y - u @ vh) / root))
            gram = y @ y.T - np.eye(len(y))
            orthogonality.append(float(np.linalg.norm(gram) / root))
    hard = max(v for name, v in errors.items() if name != "rank 1")
    return {
        "error": hard,
        "polar": max(polar),
        "orthogonality": max(orthogonality),
        **{f"error {name}": value for name, value in errors.items()},
    }


def times(rows: int, columns: int, repeats: int = 9) -> dict[Case, float]:
    """Median milliseconds of each case on one matrix, the cases taking turns."""
    x = jnp.asarray(matrices(rows, columns)["gaussian"][None], jnp.float32)
    samples: dict[Case, list[float]] = {case: [] for case in CASES}
    for turn in range(repeats + 1):
        for case in CASES:
            table = jnp.asarray(case.rows, jnp.float32)
            start = time.perf_counter()
            run(x, table, case.method, case.dtype).block_until_ready()
            if turn:  # the first compiles
                samples[case].append(1e3 * (time.perf_counter() - start))
    return {case: statistics.median(each) for case, each in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--time", action="store_true", help="also time every case")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    inputs = matrices(args.rows, args.columns)
    spent = times(args.rows, args.columns) if args.time else {}
    first = spent.get(CASES[0])
    print(f"{jax.devices()[0].device_kind}, {args.rows} x {args.columns}")
    print(f"{'table':20}{'steps':>6} {'method':8}{'dtype':10}", end="")
    print(f"{'error':>9}{'rank 1':>9}{'polar':>9}{'orthog.':>9}{'time':>7}")
    records = []
    for case in CASES:
        found = measure(case, inputs)
        ratio = spent[case] / first if args.time else None
        columns = (found["error"], found["error rank 1"], found["polar"])
        numbers = [f"{x:9.1e}" for x in (*columns, found["orthogonality"])]
        shown = "" if ratio is None else f"{ratio:7.2f}"
        print(
            f"{case.table:20}{case.steps:6} {case.method:8}{case.dtype:10}"
            + "".join(numbers)
            + shown
        )
        records.append({**dataclasses.asdict(case), **found, "time_ratio": ratio})
    if args.save:
        device = jax.devices()[0].device_kind
        head = {"device": device, "jax": jax.__version__, **vars(args)}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({**head, "cases": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
