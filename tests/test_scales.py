"""Powers of two and norms: exact, at both ends of the range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmuon_jax.scales import frobenius, power_of_two, restored


@pytest.mark.parametrize("exponent", [-140, -127, -3, 0, 1, 126, 127, 140])
def test_powers_of_two_are_exact(exponent):
    """Wherever the result is a normal number; zero and infinity beyond."""
    x = np.array([1.0, -1.3, 0.0, 2.0**-100, 2.0**100], np.float32)
    y = np.asarray(jax.jit(power_of_two)(x, jnp.full((1,), exponent, jnp.int32)))
    with np.errstate(over="ignore", under="ignore"):
        right = np.ldexp(x, exponent)
    normal = (np.abs(right) >= np.finfo(np.float32).tiny) | (right == 0)
    assert np.array_equal(y[normal], right[normal])
    assert np.all(np.abs(y[~normal]) <= np.finfo(np.float32).tiny)


def test_powers_of_two_in_other_dtypes():
    x = jnp.asarray([1.5, -3.0], jnp.bfloat16)
    y = power_of_two(x, jnp.asarray([7], jnp.int32))
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(y, np.float32), [192.0, -384.0])


def test_nothing_but_products_is_done_to_each_entry():
    """jnp.ldexp took about twenty operations, which no compiler fused on GPUs."""
    x = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    e = jax.ShapeDtypeStruct((4, 1, 1), jnp.int32)
    jaxpr = jax.make_jaxpr(power_of_two)(x, e)
    whole = [q.primitive.name for q in jaxpr.eqns if q.outvars[0].aval.shape == x.shape]
    assert whole == ["mul", "mul"]


@pytest.mark.parametrize("scale", [1e-40, 1e-37, 1e-25, 1e-9, 1.0, 1e12, 1e22, 1e36])
def test_norms_at_any_scale(scale):
    unit = np.random.default_rng(0).normal(size=(3, 5, 40))
    x = jnp.asarray(unit * scale, jnp.float32)
    y, exponent = frobenius(x)
    found = np.ldexp(np.asarray(y, np.float64), np.asarray(exponent))
    right = np.linalg.norm(np.asarray(x, np.float64), axis=(1, 2), keepdims=True)
    # XLA takes numbers below the normal ones for zero on CPUs.
    tolerance = 1e-6 if scale > 1e-36 else 1.0
    assert y.shape == exponent.shape == (3, 1, 1)
    assert np.all(np.abs(found / right - 1) <= tolerance)


def test_norms_of_zeros_infinities_and_nans():
    x = np.zeros((3, 2, 4), np.float32)
    x[1, 0, 0], x[2, 1, 1] = np.inf, np.nan
    y, _ = frobenius(jnp.asarray(x))
    assert y[0] == 0 and np.isinf(y[1]) and np.isnan(y[2])


def test_complex_norms_are_real():
    x = jnp.asarray([[[3.0 + 4.0j, 0.0]]], jnp.complex64)
    y, exponent = frobenius(x)
    assert y.dtype == jnp.float32 and y.item() == 5 and exponent.item() == 0


def test_restored_undoes_an_exponent():
    x = jnp.asarray([[[1.5]]], jnp.float16)
    assert restored(x, None) is x
    y = restored(x, jnp.full((1, 1, 1), 40, jnp.int32))
    assert y.dtype == jnp.float32 and y.item() == 1.5 * 2.0**40
