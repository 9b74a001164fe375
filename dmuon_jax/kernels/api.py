"""The functions the rest of the package calls, and the checks of their arguments."""

import functools

import jax
import jax.numpy as jnp

from dmuon_jax.kernels import chains, dispatch, xla
from dmuon_jax.kernels.select import Implementation, Problem, choose
from dmuon_jax.kernels.tiles import TileConfig
from dmuon_jax.kernels.xla import matmul

__all__ = [
    "direct_chain",
    "gram",
    "matmul",
    "pad_multiple",
    "polynomial_chain",
    "symmetric_matmul",
]


def gram(
    x: jax.Array,
    *,
    valid: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """`x @ x^H`, batched, summed in fp32 at least and rounded to the dtype of *x*.

    Args:
      x: `[..., s, l]`, real or complex floating point.
      valid: Run-time bool flags of shape `x.shape[:-2]`; the other slots give zeros,
        and Pallas kernels do not read or compute them. None: all are valid.
      implementation: None (the fastest known for this device, shape and dtype), "xla",
        "pallas" (the better Pallas kernel for the device), "pallas_triton",
        "pallas_mosaic_sm90", "pallas_triton_interpret" (for tests: any device, in
        Pallas' interpreter, and in `jax.shard_map` only with check_vma=False), or the
        measured `Verdicts` to choose by.

    Returns:
      `[..., s, s]`, in the dtype of *x*.

    Raises:
      ValueError: A shape, or the name of the implementation, is wrong.
      TypeError: A dtype is wrong.
      NotImplementedError: The named implementation cannot run here.
    """
    _check_matrices("x", x)
    _check_valid(valid, x.shape[:-2])
    choice = choose(Problem.of("gram", x), implementation)
    return dispatch.run(choice, implementation, dispatch.gram, xla.gram, x, valid)


def symmetric_matmul(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None,
    coefficients: jax.Array,
    *,
    valid: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """`alpha * a @ b + beta * c + gamma * I`, for a result known to be symmetric.

    The epilogue is computed in fp32 (or wider) before the one rounding. Only half of
    the result's tiles may be computed, the others being their mirror images.

    Args:
      a: `[..., s, s]`.
      b: As *a*; the product must be symmetric (Hermitian), as it is when *a* and *b*
        are polynomials in one symmetric matrix.
      c: As *a* and symmetric, or None for no such term.
      coefficients: `[alpha, beta, gamma]`, real, shape (3,); run-time values.
      valid: As for `gram`.
      implementation: As for `gram`.

    Returns:
      `[..., s, s]`, in the dtype of *a*.

    Raises:
      ValueError, TypeError, NotImplementedError: As for `gram`.
    """
    _check_matrices("a", a, square=True)
    for name, other in (("b", b), ("c", c)):
        if other is not None and (other.shape, other.dtype) != (a.shape, a.dtype):
            raise ValueError(
                f"{name} must have the shape and dtype of a, {a.dtype}{list(a.shape)}, "
                f"got {other.dtype}{list(other.shape)}"
            )
    _check_coefficients(coefficients, (3,))
    _check_valid(valid, a.shape[:-2])
    choice = choose(Problem.of("symmetric_matmul", a), implementation)
    operands = (a, b, c, coefficients, valid)
    return dispatch.run(
        choice,
        implementation,
        dispatch.symmetric_matmul,
        xla.symmetric_matmul,
        *operands,
    )


def polynomial_chain(
    r: jax.Array,
    coefficients: jax.Array,
    *,
    valid: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """`Q` after all steps of the Gram iteration, from `Q = I` and the Gram matrix *r*.

    `Q <- Q p(R)`, `R <- p(R) R p(R)` with `p(R) = a I + b R + c R^2`.

    Args:
      r: `[..., s, s]`, symmetric (Hermitian).
      coefficients: `[steps, 3]`, real: `a, b, c` of each step; run-time values.
      valid: As for `gram`.
      implementation: As for `gram`.

    Returns:
      `[..., s, s]`, in the dtype of *r*.

    Raises:
      ValueError, TypeError, NotImplementedError: As for `gram`.
    """
    _check_matrices("r", r, square=True)
    _check_coefficients(coefficients, (coefficients.shape[0], 3))
    _check_valid(valid, r.shape[:-2])

    def composed(r, coefficients, valid, implementation="xla"):
        product = functools.partial(
            symmetric_matmul, valid=valid, implementation=implementation
        )
        return chains.polynomial_chain(r, coefficients, product, valid)

    return _chain("polynomial_chain", composed, implementation, r, coefficients, valid)


def direct_chain(
    x: jax.Array,
    coefficients: jax.Array,
    *,
    valid: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """*x* after all steps of the direct iteration, `X <- a X + (b A + c A^2) X`.

    Args:
      x: `[..., s, l]` with `A = X X^H`, its spectral norm at most about 1.
      coefficients: `[steps, 3]`, real: `a, b, c` of each step; run-time values.
      valid: As for `gram`.
      implementation: As for `gram`.

    Returns:
      `[..., s, l]`, in the dtype of *x*.

    Raises:
      ValueError, TypeError, NotImplementedError: As for `gram`.
    """
    _check_matrices("x", x)
    _check_coefficients(coefficients, (coefficients.shape[0], 3))
    _check_valid(valid, x.shape[:-2])

    def composed(x, coefficients, valid, implementation="xla"):
        given = {"valid": valid, "implementation": implementation}
        return chains.direct_chain(
            x,
            coefficients,
            functools.partial(gram, **given),
            functools.partial(symmetric_matmul, **given),
            valid,
        )

    return _chain("direct_chain", composed, implementation, x, coefficients, valid)


def _chain(name, composed, implementation, x, coefficients, valid):
    """The on-chip kernel *name* where it is chosen, else the *composed* products."""
    choice = choose(Problem.of(name, x), implementation)
    if choice.implementation == "composed":
        return composed(x, coefficients, valid, implementation)
    kernel = functools.partial(dispatch.chain, name=name)
    return dispatch.run(
        choice, implementation, kernel, composed, x, coefficients, valid
    )


def pad_multiple(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    *,
    implementation: Implementation = None,
) -> int:
    """What to zero-pad both sides of `[..., s, l]` to, once, before many products.

    The products pad, and cut, by themselves where an operand has other sizes; with
    sizes that are multiples of this they need not. 1 where nothing is gained.

    Raises:
      ValueError, NotImplementedError: As for `gram`.
    """
    kernels = ("gram", "symmetric_matmul")
    x = jax.ShapeDtypeStruct(shape, dtype)
    configs = [choose(Problem.of(each, x), implementation).config for each in kernels]
    return max(c.rows if isinstance(c, TileConfig) else 1 for c in configs)


def _check_matrices(name: str, x: jax.Array, square: bool = False) -> None:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"{name} must be floating point or complex, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got {x.ndim}")
    if square and x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name} must hold square matrices, got {list(x.shape)}")


def _check_coefficients(coefficients: jax.Array, shape: tuple[int, ...]) -> None:
    if coefficients.shape != shape:
        raise ValueError(
            f"coefficients must have shape {shape}, got {coefficients.shape}"
        )
    if not jnp.issubdtype(coefficients.dtype, jnp.floating):
        raise TypeError(f"coefficients must be real, got {coefficients.dtype}")


def _check_valid(valid: jax.Array | None, batch: tuple[int, ...]) -> None:
    if valid is None:
        return
    if valid.dtype != jnp.bool_:
        raise TypeError(f"valid must be bool, got {valid.dtype}")
    if valid.shape != batch:
        raise ValueError(f"valid must have the batch shape {batch}, got {valid.shape}")
