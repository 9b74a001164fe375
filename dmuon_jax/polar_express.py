"""Polar Express: Newton-Schulz tables that are optimal for an interval of singular values.

Amsel, Persson, Musco and Gower, "The Polar Express: Optimal Matrix Sign Methods and Their
Application to the Muon Algorithm" (arXiv 2505.16932). Each step is the odd quintic nearest
to 1, in the maximum norm, on the interval that the steps before it map [lower, 1] to. That
greedy choice is optimal for the composition (their Theorem 3.1). Grishina et al. (CANS,
arXiv 2506.10935) find the same polynomials as Chebyshev-type ones.
"""

import functools

import numpy as np

Triple = tuple[float, float, float]

# Their appendix: a step is designed for no less than this part of its interval, because a
# steeper one dips between its extrema so low that convergence is no longer monotone.
CUSHION = 0.02407327424182761


@functools.cache
def polar_express(
    steps: int, safety: float = 1.01, lower: float = 1e-3
) -> tuple[Triple, ...]:
    """The table for singular values in ``[lower, 1]``.

    Args:
      steps: number of rows.
      safety: every row but the last of the optimal table is stretched to
        ``p(x / safety)``, so that values which rounding has lifted above an interval stay
        inside it. The paper uses 1.01; 1 is the exact optimum; others use up to 1.05.
      lower: smallest singular value that the table is made for. Smaller ones grow too, by
        the same slope at zero.

    Returns:
      ``steps`` triples (a, b, c) of ``a x + b x^3 + c x^5``.

    Raises:
      ValueError: if an argument is out of its range.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not 1 <= safety < 2:
        raise ValueError(f"safety must lie in [1, 2), got {safety}")
    if not 0 < lower < 1:
        raise ValueError(f"lower must lie in (0, 1), got {lower}")
    table = []
    low, high = lower, 1.0
    for step in range(steps):
        row = nearest_quintic(max(low, CUSHION * high) / high)
        row = stretch(row, high)
        # A cushioned step is not centred on 1 over the true interval: recentre it.
        row *= 2 / (evaluate(row, low) + evaluate(row, high))
        low = evaluate(row, low)
        high = 2 - low
        row = stretch(row, safety if step < steps - 1 else 1.0)
        table.append(tuple(float(x) for x in row))
    return tuple(table)


def nearest_quintic(low: float) -> np.ndarray:
    """The odd quintic nearest to 1 on ``[low, 1]``, by Remez exchange.

    Its error has equal size and alternating sign at four points: both ends and its two
    extrema. Close to ``low = 1`` they merge, and the quintic is the one of a triple root.
    """
    if 1 - low < 1e-4:
        return np.array([15, -10, 3]) / 8
    first, second = (3 * low + 1) / 4, (low + 3) / 4
    signs = np.array([1.0, -1.0, 1.0, -1.0])
    row = np.zeros(3)
    for _ in range(100):
        points = np.array([low, first, second, 1.0])
        system = np.stack([points, points**3, points**5, signs], axis=1)
        row = np.linalg.solve(system, np.ones(4))[:3]
        before = first, second
        first, second = extrema(row)
        if max(abs(first - before[0]), abs(second - before[1])) < 1e-15:
            break
    return row


def extrema(row: np.ndarray) -> tuple[float, float]:
    """The two positive roots of ``a + 3 b x^2 + 5 c x^4``."""
    a, b, c = row
    root = np.sqrt(max(9 * b**2 - 20 * a * c, 0.0))
    large = (-3 * b + root) / (10 * c)
    return float(np.sqrt(a / (5 * c * large))), float(np.sqrt(large))


def stretch(row: np.ndarray, factor: float) -> np.ndarray:
    """Coefficients of ``p(x / factor)``."""
    return row / factor ** np.array([1, 3, 5])


def evaluate(row: np.ndarray, x: float) -> float:
    a, b, c = row
    return float(x * (a + x**2 * (b + x**2 * c)))
