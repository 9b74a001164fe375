"""Newton-Schulz orthogonalization of a batch of matrices: normalise, then iterate.

Two forms of one iteration. *Direct* keeps X; *Gram* (in ``gram.py``) keeps the small matrix
R = X Xᴴ and touches X only at the start, at restarts and at the end.
"""

import functools

import jax
import jax.numpy as jnp

from dmuon_jax import kernels
from dmuon_jax.gram import gram_iterations
from dmuon_jax.kernels import xla
from dmuon_jax.kernels.select import Implementation
from dmuon_jax.scales import frobenius, power_of_two

PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")

OPTAX_FLOOR = 1e-8
"""What optax floors the Gram sums of "aol" and "schatten" with, whatever its eps."""


def orthogonalize_batch(
    x: jax.Array,
    coefficients: jax.Array,
    steps: int | jax.Array,
    *,
    method: str = "direct",
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    eps: jax.typing.ArrayLike = 1e-8,
    preconditioning: str = "frobenius",
    restarts: tuple[int, ...] | None = None,
    implementation: Implementation = None,
    exponent: jax.Array | None = None,
    skip_zeros: bool = False,
) -> jax.Array:
    """Nearly the orthogonal polar factor of each matrix.

    Args:
      x: ``[batch, s, l]`` with s <= l, real or complex.
      coefficients: ``(3,)``, or ``(n, 3)`` with a row for each step.
      steps: number of steps where ``coefficients`` is one triple; may be traced.
      method: ``"direct"`` or ``"gram"``.
      compute_dtype: dtype of the iteration; norms are taken in fp32 at least.
      eps: added to the norm, as in ``optax.contrib.muon``; with 0 the result is the same
        at every scale of ``x``.
      preconditioning: what divides X first, as in ``optax.contrib.muon``.
      restarts: where the Gram form restarts, see ``gram_iterations``.
      implementation: which kernels, see ``kernels``.
      exponent: int32 ``[batch, 1, 1]``: the matrices are ``x * 2^exponent``, the largest
        entry of each x being in [1/2, 1). None: the matrices are x, of any size.
      skip_zeros: whether kernels are told at run time which matrices are zero.

    Returns:
      ``[batch, s, l]`` in ``compute_dtype``. Zeros stay exactly zero.
    """
    if jnp.iscomplexobj(x):
        compute_dtype = x.dtype
    x, valid = normalize(x, exponent, compute_dtype, eps, preconditioning)
    valid = valid if skip_zeros else None
    if coefficients.ndim == 1 and isinstance(steps, int):
        coefficients = jnp.broadcast_to(coefficients, (steps, 3))
    real = jnp.finfo(compute_dtype).dtype
    coefficients = coefficients.astype(jnp.promote_types(real, jnp.float32))
    # Padded once, in the pass that casts, and not by each of the products.
    shape = x.shape
    multiple = kernels.pad_multiple(shape, compute_dtype, implementation=implementation)
    x = kernels.pad_matrices(x, multiple, multiple)
    if method == "gram":
        x = gram_iterations(x, coefficients, steps, restarts, implementation, valid)
    else:
        x = direct_iterations(x, coefficients, steps, implementation, valid)
    return x[:, : shape[1], : shape[2]]


def direct_iterations(
    x: jax.Array,
    coefficients: jax.Array,
    steps: int | jax.Array,
    implementation: Implementation = None,
    valid: jax.Array | None = None,
) -> jax.Array:
    """``X <- a X + (b A + c A^2) X`` with ``A = X Xᴴ``, once per step."""
    chain = functools.partial(
        kernels.direct_chain, implementation=implementation, valid=valid
    )
    if coefficients.ndim == 2:
        return chain(x, coefficients)
    row = coefficients[None]
    return jax.lax.fori_loop(0, steps, lambda _, x: chain(x, row), x)


def normalize(
    x: jax.Array,
    exponent: jax.Array | None,
    compute_dtype: jax.typing.DTypeLike,
    eps: jax.typing.ArrayLike,
    preconditioning: str,
) -> tuple[jax.Array, jax.Array]:
    """Scales each matrix into the range of the iteration and casts it.

    Norms are taken in fp32 of ``X / 2^e``, with an e that keeps both huge and tiny matrices
    in range; ``X / (norm + eps)`` is then what optax divides by.

    Returns:
      The matrices in ``compute_dtype``, and bool ``[batch]``: which are not zero.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if exponent is None:
        norm, exponent = frobenius(x)
        x = x * power_of_two(jnp.ones_like(norm), -exponent)
    else:
        norm = jnp.sqrt(jnp.sum(jnp.abs(x) ** 2, axis=(-2, -1), keepdims=True))
    valid = (norm != 0)[..., 0, 0]
    eps = jnp.asarray(eps, norm.dtype)
    if preconditioning in ("aol", "schatten"):
        # Both rescale by the Gram matrix themselves, so that any first scale cancels.
        norm = jnp.where(norm == 0, 1, norm)
        x = x / norm
        floor = jnp.minimum(eps, OPTAX_FLOOR)
        floor = power_of_two(floor / norm**2, -2 * exponent)
        scale = gram_scale(x.astype(compute_dtype), floor, preconditioning)
        return (x * scale).astype(compute_dtype), valid
    if preconditioning == "spectral":
        unit = x / jnp.where(norm == 0, 1, norm)
        norm = norm * jnp.linalg.norm(unit, ord=2, axis=(-2, -1), keepdims=True)
    total = norm + power_of_two(jnp.broadcast_to(eps, norm.shape), -exponent)
    return (x / jnp.where(total == 0, 1, total)).astype(compute_dtype), valid


def gram_scale(x: jax.Array, floor: jax.Array, preconditioning: str) -> jax.Array:
    """What the rows of X are multiplied by, from its Gram matrix, kept in fp32.

    AOL divides each row by the root of its absolute row sum in X Xᴴ (Boissin et al.,
    arXiv 2512.04632); Schatten-4 divides X by the fourth root of the sum of squares of X Xᴴ
    (Grishina et al., arXiv 2506.10935).
    """
    gram = jnp.abs(xla.multiply(x, jnp.matrix_transpose(x).conj()))
    if preconditioning == "aol":
        size = jnp.sum(gram, axis=-1, keepdims=True)
    else:
        size = jnp.sqrt(jnp.sum(gram**2, axis=(-2, -1), keepdims=True))
    size = jnp.maximum(size, floor)
    return jax.lax.rsqrt(jnp.where(size == 0, 1, size))
