"""``scale_by_dmuon``: momentum, orthogonalized on owners. The optax transformation."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding
from optax.contrib import MuonState

from dmuon_jax.apply_plan import apply_plan, cross, on_specs
from dmuon_jax.coefficients import JORDAN, resolve_coefficients
from dmuon_jax.costs import Costs
from dmuon_jax.dtypes import moment_dtype
from dmuon_jax.find_plan import Found, PlanFinder
from dmuon_jax.gram import check_restarts
from dmuon_jax.memory import like, to_device, to_host
from dmuon_jax.newton_schulz import PRECONDITIONINGS, orthogonalize_batch
from dmuon_jax.options import OwnerOptions
from dmuon_jax.paths import by_path, leaf_name
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.problem import Method
from dmuon_jax.routing import only_matrices
from dmuon_jax.shardings import constrain, given_shardings, lookup, partition_spec
from dmuon_jax.tree_checks import (
    check_floating,
    check_given,
    check_momentum,
    check_momentum_shapes,
    check_shapes,
)
from dmuon_jax.update_time import UpdatePath


def scale_by_dmuon(
    ns_coeffs: Any = JORDAN,
    ns_steps: jax.typing.ArrayLike = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    weight_dimension_numbers: Any = None,
    plan: Plan | None = None,
    param_shardings: Any = None,
    momentum_shardings: Any = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    exchange_dtype: jax.typing.DTypeLike | None = None,
    method: Method | None = None,
    implementation: str | None = None,
    owner_axes: tuple[str, ...] | Literal["auto"] | None = None,
    max_wave_bytes: int | None = None,
    max_owner_bytes: int | None = None,
    costs: Costs = None,
    restarts: tuple[int, ...] | None = None,
    bias_correction: bool = True,
    sign_momentum: bool = False,
) -> optax.GradientTransformation:
    """Momentum replaced by nearly its orthogonal polar factor, computed on owners.

    As ``optax.contrib.scale_by_muon``: same arguments, same state; those after
    ``weight_dimension_numbers`` are ours and described at ``dmuon``.

    Args:
      ns_coeffs: a triple, a table of triples, or a preset ("jordan", "you",
        "polar_express").
      ns_steps: number of steps; ignored for a table.
      beta: decay rate of the momentum.
      eps: added to the norm that divides each matrix.
      mu_dtype: dtype of the momentum; None for the parameter's.
      nesterov: whether to use Nesterov momentum.
      adaptive: whether to scale each leaf by its dual norm (arXiv 2409.20325).
      preconditioning: "frobenius", "spectral", "aol" or "schatten".
      weight_dimension_numbers: a ``MuonDimensionNumbers``, a tree of them or a callable;
        None if every leaf has two dimensions.
      plan: see ``dmuon``.
      param_shardings: see ``dmuon``.
      momentum_shardings: see ``dmuon``.
      compute_dtype: see ``dmuon``.
      exchange_dtype: see ``dmuon``.
      method: see ``dmuon``.
      implementation: see ``dmuon``.
      owner_axes: see ``dmuon``.
      max_wave_bytes: see ``dmuon``.
      max_owner_bytes: see ``dmuon``.
      costs: see ``dmuon``.
      restarts: see ``dmuon``.
      bias_correction: see ``dmuon``.
      sign_momentum: see ``dmuon``.

    Returns:
      A ``GradientTransformation`` whose state is ``optax.contrib.MuonState``.

    Raises:
      ValueError, TypeError: a wrong argument, at once.
    """
    options = OwnerOptions(
        plan=plan,
        param_shardings=param_shardings,
        momentum_shardings=momentum_shardings,
        compute_dtype=compute_dtype,
        exchange_dtype=exchange_dtype,
        method=method,
        implementation=implementation,
        owner_axes=owner_axes,
        max_wave_bytes=max_wave_bytes,
        max_owner_bytes=max_owner_bytes,
        costs=costs,
    )
    check_arguments(ns_steps, beta, eps, preconditioning)
    ns_coeffs = resolve_coefficients(ns_coeffs, ns_steps)
    number = number_of_steps(ns_coeffs, ns_steps)
    check_restarts(restarts, number)
    for name, flag in (
        ("nesterov", nesterov),
        ("adaptive", adaptive),
        ("bias_correction", bias_correction),
        ("sign_momentum", sign_momentum),
    ):
        check_flag(name, flag)
    mu_dtype = moment_dtype("mu_dtype", mu_dtype)
    path = UpdatePath(
        steps=5 if number is None else number,
        preconditioning=preconditioning,
        restarts=restarts,
        implementation=implementation,
    )
    finder = PlanFinder(options, path)

    def find(tree, at_init=False):
        return finder.find(*only_matrices(tree, weight_dimension_numbers), at_init)

    def init_fn(params):
        check_given(
            params, param_shardings=param_shardings, momentum_shardings=momentum_shardings
        )
        return MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=init_momentum(params, find(params, True), mu_dtype, options),
            ns_coeffs=jnp.asarray(ns_coeffs),
        )

    def update_fn(updates, state, params=None):
        check_momentum(state, by_path(updates))
        check_floating(by_path(updates))
        found = find(updates if params is None else params)
        treedef = jax.tree.structure(updates)
        check_shapes(by_path(updates), by_path(updates if params is None else params))
        check_momentum_shapes(state, by_path(updates))
        grads = cross(by_path(updates), found, "in")
        count = optax.safe_increment(state.count)
        corrected = count if bias_correction else None
        old = by_path(state.mu)
        mu = {p: to_device(x) for p, x in old.items()}
        mu, mu_hat = momentum(grads, mu, corrected, beta, nesterov)
        if sign_momentum:
            mu_hat = {p: jnp.sign(x) for p, x in mu_hat.items()}
        steps = static_steps(ns_steps)
        fn = functools.partial(
            orthogonalize_bucket,
            steps=steps if isinstance(steps, int) else None,
            preconditioning=preconditioning,
            restarts=restarts,
            implementation=implementation,
        )
        operands = (state.ns_coeffs, jnp.asarray(steps), jnp.asarray(eps))
        result = apply_plan(fn, mu_hat, found, operands)
        if adaptive:
            whole = cross(mu_hat, found, "out")
            result = {p: scale_by_dual_norm(whole[p], y) for p, y in result.items()}
        dtypes = by_path(update_dtypes(updates, params))
        result = [result[p].astype(dtype) for p, dtype in dtypes.items()]
        mu = on_specs({p: mu[p].astype(x.dtype) for p, x in old.items()}, found, "in")
        mu = treedef.unflatten([like(mu[p], x) for p, x in old.items()])
        state = MuonState(count=count, mu=mu, ns_coeffs=state.ns_coeffs)
        return treedef.unflatten(result), state

    return optax.GradientTransformation(init_fn, update_fn)


def update_dtypes(updates: Any, params: Any) -> Any:
    """The dtype of each update: that of gradient and parameter together."""
    dtypes = jax.tree.map(jnp.result_type, updates)
    if params is None:
        return dtypes
    return jax.tree.map(lambda d, p: jnp.promote_types(d, jnp.result_type(p)), dtypes, params)


def momentum(
    grads: Any,
    mu: Any,
    count: jax.typing.ArrayLike | None,
    beta: jax.typing.ArrayLike,
    nesterov: bool,
) -> tuple[Any, Any]:
    """The new momentum, and its bias-corrected (Nesterov) form, as optax computes them.

    Without ``count`` there is no correction, and the form is ``1 - beta`` times that of a
    momentum which is a plain sum.
    """
    mu = optax.tree.update_moment(grads, mu, beta, 1)
    if count is None:
        if not nesterov:
            return mu, mu
        return mu, jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mu, grads)
    if not nesterov:
        return mu, optax.tree.bias_correction(mu, beta, count)
    ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
    now = optax.tree.bias_correction(grads, beta, count)
    return mu, jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)


def check_arguments(ns_steps, beta, eps, preconditioning) -> None:
    """Raises for a wrong value; values that only a trace knows pass."""
    if preconditioning not in PRECONDITIONINGS:
        raise ValueError(
            f"preconditioning must be one of {PRECONDITIONINGS}, got {preconditioning!r}"
        )
    steps = static_steps(ns_steps)
    if isinstance(steps, int) and steps < 1:
        raise ValueError(f"ns_steps must be at least 1, got {steps}")
    check_number("beta", beta, low=0.0, below=1.0)
    check_number("eps", eps, low=0.0)


def check_flag(name: str, value: Any) -> None:
    """Raises ``TypeError`` unless ``value`` is True, False, or equal to one of them."""
    if isinstance(value, Tracer) or np.ndim(value) or value not in (False, True):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value: Any, low: float, below: float = np.inf) -> None:
    """Raises unless ``value`` is traced, or a number in [low, below)."""
    if isinstance(value, Tracer):
        return
    if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if np.isnan(value):
        raise ValueError(f"{name} must not be NaN, got {value}")
    if not low <= float(value) < below:
        limit = f" and below {below}" if below < np.inf else ""
        raise ValueError(f"{name} must be at least {low}{limit}, got {value}")


def static_steps(ns_steps: jax.typing.ArrayLike) -> int | jax.Array:
    """``ns_steps`` as an int, unless only run time knows it."""
    if isinstance(ns_steps, Tracer):
        return ns_steps
    array = np.asarray(ns_steps)
    if array.ndim or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"ns_steps must be an integer, got {ns_steps!r}")
    return int(array)


def number_of_steps(ns_coeffs: Any, ns_steps: jax.typing.ArrayLike) -> int | None:
    """The rows of a table, or ``ns_steps``; None where only run time knows."""
    if np.ndim(ns_coeffs) == 2:
        return np.shape(ns_coeffs)[0]
    steps = static_steps(ns_steps)
    return steps if isinstance(steps, int) else None


def init_momentum(
    params: Any, found: Found, mu_dtype: Any, options: OwnerOptions
) -> Any:
    """Zeros like ``params``, in the momentum's shardings and memory."""
    leaves = {item.leaf.path: item.leaf for item in found.plan.layouts}
    given = given_shardings(options.momentum_shardings)

    def zeros(path, x):
        name = leaf_name(path)
        dtype = mu_dtype or x.dtype
        spec = partition_spec(leaves[name].spec_in)
        named = lookup(given, name)
        kind = None if named is None else named.memory_kind
        if found.mesh is None or isinstance(x, Tracer):
            zeros = constrain(jnp.zeros_like(x, dtype=dtype), found.mesh, spec)
            return to_host(zeros) if kind == "pinned_host" else zeros
        sharding = NamedSharding(found.mesh, spec, memory_kind=kind)
        return jnp.zeros(x.shape, dtype, device=sharding)

    return jax.tree_util.tree_map_with_path(zeros, params)


def orthogonalize_bucket(
    x, exponent, bucket, operands, *, steps, preconditioning, restarts, implementation
):
    """The iteration on one bucket, as its plan says."""
    coefficients, traced_steps, eps = operands
    return orthogonalize_batch(
        x,
        coefficients,
        traced_steps if steps is None else steps,
        method=bucket.method,
        compute_dtype=bucket.compute_dtype,
        eps=eps,
        preconditioning=preconditioning,
        restarts=restarts,
        implementation=implementation,
        exponent=exponent,
        skip_zeros=bucket.padded,
    )


def scale_by_dual_norm(x: jax.Array, y: jax.Array) -> jax.Array:
    """``y`` times the inner product of ``x`` and ``y`` over the whole leaf."""
    return jnp.sum(x.conj() * y) * y
