"""Whole Newton-Schulz iterations on chip, one small matrix per program (Triton).

The matrix is read once and its result written once; the steps are a loop with run-time
coefficients, which compiles to far fewer registers than unrolled steps do. Sides are
powers of two.

Roofline: `[batch, 64, 64]` in 16 bits moves 16 KiB a matrix in all, against 16 kernels
that would each move 16 to 32 KiB.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dmuon_jax.kernels.pallas_common import result_like, varying_together


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _add(scale: jax.Array, x: jax.Array, product: jax.Array) -> jax.Array:
    """`product + scale x`, rounded once to the dtype of *x*."""
    return (product + scale * x.astype(jnp.float32)).astype(x.dtype)


def _polynomial_step(index, carry, coefficients):
    r, q = carry
    a, b, c = (coefficients[index, column] for column in range(3))
    z = _add(b, r, c * _dot(r, r))
    rz = _add(a, r, _dot(r, z))
    return _add(a, rz, _dot(rz, z)), _add(a, q, _dot(q, z))


def _polynomial_kernel(coefficients, r, *, steps):
    size = r.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    q = jnp.where(row == column, 1.0, 0.0).astype(r.dtype)
    step = functools.partial(_polynomial_step, coefficients=coefficients)
    return jax.lax.fori_loop(0, steps, step, (r, q))[1]


def _direct_step(index, x, coefficients):
    a, b, c = (coefficients[index, column] for column in range(3))
    gram = _dot(x, x.T).astype(x.dtype)
    z = _add(b, gram, c * _dot(gram, gram))
    return _add(a, x, _dot(z, x))


def _direct_kernel(coefficients, x, *, steps):
    step = functools.partial(_direct_step, coefficients=coefficients)
    return jax.lax.fori_loop(0, steps, step, x)


def _per_matrix(*refs, compute, flags: bool):
    """Runs *compute* on the program's own matrix, or stores zeros where it is EMPTY."""
    coefficients, x, out = refs[0], refs[-2], refs[-1]
    slot = pl.program_id(0)

    def store():
        out[slot] = compute(coefficients, x[slot])

    if not flags:
        store()
        return
    valid = refs[1]
    pl.when(valid[slot] != 0)(store)

    @pl.when(valid[slot] == 0)
    def _():
        out[slot] = jnp.zeros(out.shape[1:], out.dtype)


@functools.partial(jax.jit, static_argnames=("compute", "num_warps", "interpret"))
def _chain(x, coefficients, valid, *, compute, num_warps, interpret):
    operands = [coefficients.astype(jnp.float32)]
    if valid is not None:
        operands.append(valid.astype(jnp.int32))
    operands = varying_together(*operands, x)
    compute_steps = functools.partial(compute, steps=coefficients.shape[0])
    return pl.pallas_call(
        functools.partial(_per_matrix, compute=compute_steps, flags=valid is not None),
        out_shape=result_like(operands[-1], x.shape),
        grid=(x.shape[0],),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=compute.__name__.strip("_"),
    )(*operands)


def polynomial_chain(
    r: jax.Array,
    coefficients: jax.Array,
    valid: jax.Array | None,
    num_warps: int,
    interpret: bool = False,
) -> jax.Array:
    """The Gram iteration's `Q` from 16-bit *r* `[batch, s, s]`, s a power of two."""
    return _chain(
        r,
        coefficients,
        valid,
        compute=_polynomial_kernel,
        num_warps=num_warps,
        interpret=interpret,
    )


def direct_chain(
    x: jax.Array,
    coefficients: jax.Array,
    valid: jax.Array | None,
    num_warps: int,
    interpret: bool = False,
) -> jax.Array:
    """The direct iteration on 16-bit *x* `[batch, s, l]`, s and l powers of two."""
    return _chain(
        x,
        coefficients,
        valid,
        compute=_direct_kernel,
        num_warps=num_warps,
        interpret=interpret,
    )
