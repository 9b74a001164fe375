"""Newton-Schulz in Gram space: iterate on R = X Xᴴ and Q, multiply X at the end.

With p(R) = a I + b R + c R²: Q <- Q p(R), R <- p(R) R p(R). Rounding makes a half-precision
R indefinite after a few steps, so X is rebuilt and R computed afresh at *restarts*
(Dao-AILab, Gram-Newton-Schulz, 2026). FLOPs of five steps with one restart, for s x l:
8 s² l + 28 s³, against 20 s² l + 10 s³ of the direct form.
"""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from dmuon_jax import kernels
from dmuon_jax.kernels.select import Implementation

FIRST_RESTART = 2
PERIOD = 3


def default_restarts(steps: int) -> tuple[int, ...]:
    """Iterations (0-based) before which to restart: 2, and every third from there.

    Near the best that ``restarts.choose_restarts`` finds for all shipped tables.
    """
    return tuple(range(FIRST_RESTART, steps, PERIOD))


def check_restarts(restarts: tuple[int, ...] | None, steps: int | None) -> None:
    """Raises unless each restart is between two of ``steps`` steps.

    ``steps`` is None where only run time knows it; no restarts can be named then.

    Raises:
      TypeError: ``restarts`` is no tuple of integers.
      ValueError: a restart is not between two steps, or their number is not known.
    """
    if restarts is None:
        return
    if not is_integers(restarts):
        raise TypeError(f"restarts must be None or a tuple of integers, got {restarts!r}")
    if steps is None:
        raise ValueError(
            f"restarts must be None where ns_steps is not a plain integer, got {restarts}"
        )
    if any(not 0 < restart < steps for restart in restarts):
        raise ValueError(f"restarts must lie in 1..{steps - 1}, got {restarts}")


def is_integers(value: Any) -> bool:
    """Whether ``value`` holds integers in order, none of them a bool."""
    return isinstance(value, tuple | list | range) and all(
        isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in value
    )


def gram_iterations(
    x: jax.Array,
    coefficients: jax.Array,
    steps: int | jax.Array,
    restarts: tuple[int, ...] | None = None,
    implementation: Implementation = None,
    valid: jax.Array | None = None,
) -> jax.Array:
    """All steps on X ``[batch, s, l]``, its spectral norm at most about 1.

    Args:
      x: ``[batch, s, l]``, s <= l.
      coefficients: ``(n, 3)``, or ``(3,)`` with a traced number of ``steps``.
      steps: number of steps where ``coefficients`` is one triple.
      restarts: 0-based steps before which R is rebuilt; None for ``default_restarts``,
        which is also what a traced number of steps gets.
      implementation: which kernels, see ``kernels``.
      valid: bool ``[batch]``: which matrices to compute; None: all.

    Returns:
      ``[batch, s, l]`` in the dtype of ``x``.

    Raises:
      TypeError: if ``restarts`` is no tuple of integers.
      ValueError: if a restart is not between two steps, or their number is traced.
    """
    if coefficients.ndim == 1:
        check_restarts(restarts, None)
        return traced_iterations(x, coefficients, steps, implementation)
    number = coefficients.shape[0]
    check_restarts(restarts, number)
    restarts = default_restarts(number) if restarts is None else restarts
    cuts = (0, *sorted(set(restarts)), number)
    for start, end in zip(cuts, cuts[1:], strict=False):
        r = kernels.gram(x, implementation=implementation, valid=valid)
        q = kernels.polynomial_chain(
            r, coefficients[start:end], implementation=implementation, valid=valid
        )
        x = kernels.matmul(q, x)
    return x


def traced_iterations(
    x: jax.Array,
    coefficients: jax.Array,
    steps: int | jax.Array,
    implementation: Implementation,
) -> jax.Array:
    """As ``gram_iterations``, for a number of steps that only run time knows."""
    first = jnp.minimum(steps, FIRST_RESTART)
    x = traced_phase(x, coefficients, first, implementation)
    rest = steps - first

    def body(phase, x):
        count = jnp.minimum(rest - phase * PERIOD, PERIOD)
        return traced_phase(x, coefficients, count, implementation)

    return jax.lax.fori_loop(0, -(-rest // PERIOD), body, x)


def traced_phase(
    x: jax.Array,
    coefficients: jax.Array,
    steps: jax.Array,
    implementation: Implementation,
) -> jax.Array:
    """``steps`` iterations on R and Q between two restarts."""
    a, b, c = coefficients
    zero = jnp.zeros_like(a)
    square = jnp.stack([c, b, zero])
    add = jnp.stack([zero + 1, a, zero])

    product = functools.partial(kernels.symmetric_matmul, implementation=implementation)

    def body(_, state):
        r, q = state
        z = product(r, r, r, square)
        q = product(q, z, q, add)
        rz = product(r, z, r, add)
        return product(rz, z, rz, add), q

    r = kernels.gram(x, implementation=implementation)
    # The identity takes part in X's sharding type, so that both carry one type.
    q = jnp.eye(x.shape[-2], dtype=x.dtype) + jnp.zeros_like(r)
    _, q = jax.lax.fori_loop(0, steps, body, (r, q))
    return kernels.matmul(q, x)
