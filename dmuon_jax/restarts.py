"""Where a Gram iteration restarts, chosen offline by running it on hard spectra in NumPy.

Rounding moves every eigenvalue of R = X Xᴴ by about a unit of rounding of the largest one.
A small eigenvalue is then relatively far off, or negative; each step multiplies it by
p(r)^2, about a^2, and after a few steps it leaves the interval on which p is tame. A
restart multiplies Q into X and takes a fresh R, which is positive again (Dao-AILab,
Gram-Newton-Schulz, 2026). Too early a restart wastes work, too late a one comes after the
damage; the right place depends on the table and on the dtype.
"""

import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

Table = Sequence[Sequence[float]]
Rounding = Callable[[np.ndarray], np.ndarray]

ENOUGH = 2.0
"""How far above the least error a choice with fewer restarts may lie."""


def choose_restarts(table: Table, dtype: str = "float16") -> tuple[int, ...]:
    """The fewest restarts whose error is near the least, and of those the best ones.

    Tries every set of positions: seconds for up to about 10 rows.

    Args:
      table: a triple (a, b, c) for each step.
      dtype: "float16", "bfloat16" or "float32".

    Returns:
      Steps (0-based) before which R is taken afresh, as ``gram_iterations`` takes them.
    """
    positions = range(1, len(table))
    errors = {
        chosen: gram_error(table, dtype, chosen)
        for number in range(len(table))
        for chosen in itertools.combinations(positions, number)
    }
    limit = ENOUGH * min(errors.values())
    fewest = min(len(chosen) for chosen, error in errors.items() if error <= limit)
    good = [chosen for chosen in errors if len(chosen) == fewest]
    return min(good, key=lambda chosen: errors[chosen])


def gram_error(table: Table, dtype: str, restarts: Sequence[int]) -> float:
    """Largest relative error, over the hard spectra, that the Gram form adds in ``dtype``.

    Against the same steps in float64 on the same rounded matrix, so that the rounding of
    the input, which no restart can help, does not count. Infinite if it diverges.
    """

    def rounding(x: np.ndarray) -> np.ndarray:
        return x.astype(jnp.dtype(dtype)).astype(np.float32)

    worst = 0.0
    for x in hard_matrices():
        x = rounding(x.astype(np.float32))
        exact = direct(x.astype(np.float64), table)
        with np.errstate(over="ignore", invalid="ignore"):
            found = gram(x, table, set(restarts), rounding)
            error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return float(worst)


def hard_matrices(rows: int = 32, columns: int = 64) -> list[np.ndarray]:
    """Matrices of Frobenius norm 1, their singular vectors random, their spectra hard."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(rows, rows)))
    right, _ = np.linalg.qr(rng.normal(size=(columns, rows)))
    few = np.where(np.arange(rows) < rows // 8, 1.0, 1e-2)
    spectra = [
        np.ones(rows),
        np.linspace(1, 0, rows),
        np.geomspace(1, 1e-2, rows),
        np.geomspace(1, 1e-4, rows),
        np.geomspace(1, 1e-6, rows),
        few,
        few**2,
    ]
    return [(left * s / np.linalg.norm(s)) @ right.T for s in spectra]


def direct(x: np.ndarray, table: Table) -> np.ndarray:
    """The direct iteration in the dtype of ``x``."""
    for a, b, c in table:
        r = x @ x.T
        x = a * x + (b * r + c * r @ r) @ x
    return x


def gram(
    x: np.ndarray, table: Table, restarts: set[int], rounding: Rounding
) -> np.ndarray:
    """The Gram iteration as ``kernels.polynomial_chain`` does it, each product rounded."""
    r, q = rounding(x @ x.T), np.eye(len(x), dtype=x.dtype)
    for step, (a, b, c) in enumerate(table):
        if step in restarts:
            x = rounding(q @ x)
            r, q = rounding(x @ x.T), np.eye(len(x), dtype=x.dtype)
        z = rounding(c * r @ r + b * r)
        q = rounding(q @ z + a * q)
        r = rounding(r @ z + a * r)
        r = rounding(r @ z + a * r)
    return rounding(q @ x)
