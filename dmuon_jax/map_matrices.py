"""Functions of matrices on trees: any function on owners, and orthogonalization as one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmuon_jax.apply_plan import apply_plan, cross
from dmuon_jax.coefficients import JORDAN, resolve_coefficients
from dmuon_jax.find_plan import PlanFinder
from dmuon_jax.gram import check_restarts
from dmuon_jax.matrices import Leaf, oriented
from dmuon_jax.newton_schulz import PRECONDITIONINGS, orthogonalize_batch
from dmuon_jax.options import OwnerOptions, owner_options
from dmuon_jax.owners import MatrixFn
from dmuon_jax.paths import leaf_name
from dmuon_jax.planning.plan import Plan
from dmuon_jax.routing import matrices_of
from dmuon_jax.scales import restored
from dmuon_jax.tree_checks import check_given


def map_matrices(
    fn: Callable[[jax.Array], jax.Array],
    tree: Any,
    plan: Plan | None = None,
    *,
    param_shardings: Any = None,
    weight_dimension_numbers: Any = None,
) -> Any:
    """Applies ``fn`` to every matrix of ``tree``, each once, on its owner.

    Args:
      fn: ``[batch, s, l] -> [batch, s, l]`` with s <= l, for any batch; must treat matrices
        one by one, commute with transposition, and give zeros for zeros.
      tree: arrays; leaves that are no matrices come back as they are.
      plan: a plan for this tree; None makes one from the shardings that show.
      param_shardings: as for ``dmuon``.
      weight_dimension_numbers: as ``muon_weight_dimension_numbers`` of ``dmuon``.

    Returns:
      A tree like ``tree``: shapes, dtypes and shardings.

    Raises:
      ValueError: if a sharding is not known, ``plan`` was made for something else, or ``fn``
        does not keep the shape.
      TypeError: if ``fn`` is no function, or gives no array.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function of matrices, got {type(fn).__name__}")
    options = OwnerOptions(plan=plan, param_shardings=param_shardings)
    return map_tree(
        lambda x, exponent, bucket, operands: fn(restored(x, exponent)),
        tree,
        options,
        weight_dimension_numbers,
        check=lambda leaves: check_function(fn, leaves),
    )


def check_function(fn: Callable[[jax.Array], jax.Array], leaves: Sequence[Leaf]) -> None:
    """Traces ``fn`` once for each shape of matrix.

    Raises:
      TypeError: ``fn`` gives no array.
      ValueError: ``fn`` gives an array of another shape.
    """
    places = {}
    for leaf in leaves:
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        for shape in leaf.matrix_shapes:
            places.setdefault((oriented(shape), dtype), leaf.path)
    for (shape, dtype), path in places.items():

        def traced(x, where=f"for [batch, s, l] = {[2, *shape]}, the matrix at {path}"):
            y = fn(x)
            if not isinstance(y, jax.Array | np.ndarray):
                raise TypeError(f"fn must give an array, got {type(y).__name__} {where}")
            if y.shape != x.shape:
                raise ValueError(f"fn must keep the shape, got {list(y.shape)} {where}")
            return y

        jax.eval_shape(traced, jax.ShapeDtypeStruct((2, *shape), dtype))


def orthogonalize(
    tree: Any,
    *,
    ns_coeffs: Any = JORDAN,
    ns_steps: int = 5,
    eps: float = 1e-8,
    preconditioning: str = "frobenius",
    restarts: tuple[int, ...] | None = None,
    weight_dimension_numbers: Any = None,
    **options: Any,
) -> Any:
    """Nearly the orthogonal polar factor of every matrix of ``tree``.

    Args:
      tree: arrays; leaves that are no matrices come back as they are.
      ns_coeffs: as for ``dmuon``.
      ns_steps: as for ``dmuon``.
      eps: as for ``dmuon``.
      preconditioning: as for ``dmuon``.
      restarts: as for ``dmuon``.
      weight_dimension_numbers: as ``muon_weight_dimension_numbers`` of ``dmuon``.
      **options: ``plan``, ``param_shardings``, ``compute_dtype``, ``exchange_dtype``,
        ``method``, ``implementation``, ``owner_axes``, ``costs`` (measured only where named):
        as for ``dmuon``.

    Returns:
      A tree like ``tree``: shapes, dtypes and shardings.

    Raises:
      ValueError: wrong values, unknown shardings, or a plan for something else.
    """
    choices = owner_options("orthogonalize", **options)
    if preconditioning not in PRECONDITIONINGS:
        raise ValueError(
            f"preconditioning must be one of {PRECONDITIONINGS}, got {preconditioning!r}"
        )
    if ns_steps < 1:
        raise ValueError(f"ns_steps must be at least 1, got {ns_steps}")
    coefficients = jnp.asarray(resolve_coefficients(ns_coeffs, ns_steps))
    check_restarts(restarts, len(coefficients) if coefficients.ndim == 2 else ns_steps)

    def fn(x, exponent, bucket, coefficients):
        return orthogonalize_batch(
            x,
            coefficients,
            ns_steps,
            method=bucket.method,
            compute_dtype=bucket.compute_dtype,
            eps=eps,
            preconditioning=preconditioning,
            restarts=restarts,
            implementation=choices.implementation,
            exponent=exponent,
        )

    return map_tree(fn, tree, choices, weight_dimension_numbers, coefficients)


def map_tree(
    fn: MatrixFn,
    tree: Any,
    options: OwnerOptions,
    rule: Any,
    operands: Any = None,
    check: Callable[[Sequence[Leaf]], None] = lambda leaves: None,
) -> Any:
    """``apply_plan`` on the leaves that ``rule`` calls matrices, after ``check`` of them."""
    check_given(tree, param_shardings=options.param_shardings)
    arrays, dims = matrices_of(tree, rule)
    found = PlanFinder(options).find(arrays, dims)
    check(found.plan.leaves)
    results = apply_plan(fn, cross(arrays, found, "in"), found, operands)

    def pick(path, x):
        name = leaf_name(path)
        return results[name].astype(x.dtype) if name in results else x

    return jax.tree_util.tree_map_with_path(pick, tree)
