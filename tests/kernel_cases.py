"""Cases, float64 references and faulty copies of modules for the tests of kernels."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np


def matrices(shape, dtype, seed=0):
    """Gaussian matrices with spectral norms below 1, drawn the same on any device."""
    values = np.random.default_rng(seed).standard_normal(shape)
    bound = np.sqrt(shape[-1]) + np.sqrt(shape[-2])
    return jnp.asarray(values / bound, dtype)


def wide(x):
    """*x* as float64 (complex128 where complex)."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def gram(x):
    """`x x^H` in float64."""
    x = wide(x)
    return x @ np.conj(np.swapaxes(x, -1, -2))


def symmetric_matmul(a, b, c, coefficients):
    """`alpha a b + beta c + gamma I` in float64."""
    alpha, beta, gamma = np.asarray(coefficients, np.float64)
    result = alpha * wide(a) @ wide(b) + gamma * np.eye(a.shape[-1])
    return result if c is None else result + beta * wide(c)


def polynomial_chain(r, coefficients):
    """The Gram iteration's `Q` in float64, straight from its definition."""
    r = wide(r)
    identity = np.eye(r.shape[-1])
    q = identity
    for a, b, c in np.asarray(coefficients, np.float64):
        p = a * identity + b * r + c * r @ r
        q, r = q @ p, p @ r @ p
    return q


def direct_chain(x, coefficients):
    """The direct iteration in float64, straight from its definition."""
    x = wide(x)
    for a, b, c in np.asarray(coefficients, np.float64):
        r = gram(x)
        x = a * x + (b * r + c * r @ r) @ x
    return x


def relative_error(value, reference):
    """`|value - reference| / |reference|` (Frobenius); NaN and inf count as inf."""
    difference = np.linalg.norm(wide(value) - reference)
    error = difference / max(np.linalg.norm(reference), 1e-30)
    return error if np.isfinite(error) else np.inf


def faulty(module, old, new):
    """A copy of *module* whose source has *new* in the place of *old*."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, (module.__name__, old, source.count(old))
    copy = types.ModuleType(f"{module.__name__}_faulty")
    copy.__file__ = module.__file__
    exec(compile(source.replace(old, new), module.__file__, "exec"), copy.__dict__)
    return copy


def abstract_mesh(kind, num_cores, size=1):
    """A mesh of *size* devices of that kind, none of which need be here."""
    device = jax.sharding.AbstractDevice(
        device_kind=kind, num_cores=num_cores, platform="cuda"
    )
    return jax.sharding.AbstractMesh(
        (size,),
        ("a",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=device,
    )
