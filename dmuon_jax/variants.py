"""Muon's adaptive successors, each a second moment after the orthogonalization.

``normalize_neurons`` (NorMuon) and ``normalize_elements`` (AdaMuon) follow
``scale_by_dmuon`` in a chain and precede the shape scale. Both bring each matrix to the
Frobenius norm ``sqrt(min(fan_in, fan_out))`` of an exactly orthogonal one, so that either
rule of ``shape_scale`` means what it means for Muon; ``consistent_rms=0.2`` gives the
papers' ``0.2 sqrt(m n) / norm``. That last step makes bias correction needless.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from dmuon_jax.leaves import see_one
from dmuon_jax.matrices import Spec
from dmuon_jax.muon import dmuon
from dmuon_jax.paths import by_path
from dmuon_jax.routing import matrix_dimensions
from dmuon_jax.shardings import AnyMesh, constrain, given_shardings, partition_spec
from dmuon_jax.split import Dimensions, matrix_axes, scale_array
from dmuon_jax.transform import check_number


class SecondMomentState(NamedTuple):
    """State of ``normalize_neurons`` and ``normalize_elements``.

    Attributes:
      nu: running mean of the squared entries, float32 or wider, in the parameters'
        shardings; the reduction axes have size 1 where it is one number per neuron.
    """

    nu: Any


def normalize_neurons(
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_dimension_numbers: Any = None,
    param_shardings: Any = None,
) -> optax.GradientTransformation:
    """Divides each neuron's weights by the root of their running mean square.

    NorMuon (arXiv 2510.05491, algorithm 1): ``v <- b2 v + (1 - b2) mean(O * O)`` over the
    inputs of a neuron, ``O / (sqrt(v) + eps)``, then the norm set as the module says. A
    neuron is an index along the output axes.

    Args:
      b2: decay rate of the mean.
      eps: added to the root.
      weight_dimension_numbers: as for ``scale_by_dmuon``; None if all leaves that it gets
        have two dimensions.
      param_shardings: as for ``dmuon``; without it what an eager ``init`` saw holds.

    Raises:
      ValueError: if ``b2`` or ``eps`` is out of range.
    """
    return scale_by_second_moment(
        b2, eps, weight_dimension_numbers, param_shardings, per_neuron=True
    )


def normalize_elements(
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_dimension_numbers: Any = None,
    param_shardings: Any = None,
) -> optax.GradientTransformation:
    """Divides each entry by the root of its running mean square.

    AdaMuon (arXiv 2507.11005, algorithm 1): ``V <- b2 V + (1 - b2) O * O``,
    ``O / (sqrt(V) + eps)``, then the norm set as the module says. Arguments and errors as
    for ``normalize_neurons``.
    """
    return scale_by_second_moment(
        b2, eps, weight_dimension_numbers, param_shardings, per_neuron=False
    )


def normuon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b2: jax.typing.ArrayLike = 0.95,
    norm_eps: jax.typing.ArrayLike = 1e-8,
    consistent_rms: jax.typing.ArrayLike | None = 0.2,
    **muon: Any,
) -> optax.GradientTransformation:
    """NorMuon for matrices, AdamW for the rest: ``dmuon`` with ``normalize_neurons``.

    Args:
      learning_rate: a number or a schedule.
      b2: see ``normalize_neurons``.
      norm_eps: its ``eps``.
      consistent_rms: see ``dmuon``; the paper's 0.2 by default.
      **muon: further arguments of ``dmuon``. The paper's momentum is ``nesterov=False``.
    """
    dims, shardings = dims_and_shardings(muon)
    adapt = normalize_neurons(b2, norm_eps, dims, shardings)
    return dmuon(
        learning_rate, consistent_rms=consistent_rms, matrix_transform=adapt, **muon
    )


def adamuon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b2: jax.typing.ArrayLike = 0.95,
    norm_eps: jax.typing.ArrayLike = 1e-8,
    consistent_rms: jax.typing.ArrayLike | None = 0.2,
    sign_momentum: bool = True,
    **muon: Any,
) -> optax.GradientTransformation:
    """AdaMuon for matrices, AdamW for the rest: ``dmuon`` with ``normalize_elements``.

    Args:
      learning_rate: a number or a schedule.
      b2: see ``normalize_elements``.
      norm_eps: its ``eps``.
      consistent_rms: see ``dmuon``; the paper's 0.2 by default.
      sign_momentum: whether the signs of the momentum are orthogonalized, as in the paper
        since its second version, or the momentum.
      **muon: further arguments of ``dmuon``. The paper's momentum is ``nesterov=False``.
    """
    dims, shardings = dims_and_shardings(muon)
    adapt = normalize_elements(b2, norm_eps, dims, shardings)
    return dmuon(
        learning_rate,
        consistent_rms=consistent_rms,
        matrix_transform=adapt,
        sign_momentum=sign_momentum,
        **muon,
    )


def dims_and_shardings(muon: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of ``dmuon`` that a transform between its halves needs too."""
    return muon.get("muon_weight_dimension_numbers"), muon.get("param_shardings")


def scale_by_second_moment(
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    rule: Any,
    param_shardings: Any,
    *,
    per_neuron: bool,
) -> optax.GradientTransformation:
    """What ``normalize_neurons`` and ``normalize_elements`` have in common."""
    check_number("b2", b2, low=0.0, below=1.0)
    check_number("eps", eps, low=0.0)
    places = Places(param_shardings)

    def leaves_of(tree):
        """``(path, leaf, dimension numbers, axes of the mean)`` of each leaf."""
        all_dims = matrix_dimensions(rule, tree)
        for (path, x), dims in zip(by_path(tree).items(), all_dims, strict=True):
            reduction, _ = matrix_axes(dims, np.ndim(x), path)
            yield path, x, dims, reduction if per_neuron else ()

    def init_fn(params):
        nu = [places.zeros(path, x, axes) for path, x, _, axes in leaves_of(params)]
        return SecondMomentState(nu=jax.tree.structure(params).unflatten(nu))

    def update_fn(updates, state, params=None):
        del params
        before, after, results = by_path(state.nu), [], []
        for path, x, dims, axes in leaves_of(updates):
            square = jnp.abs(x).astype(before[path].dtype) ** 2
            square = jnp.mean(square, axis=axes, keepdims=True)
            nu = (b2 * before[path] + (1 - b2) * square).astype(before[path].dtype)
            nu = places.constrain(path, x, nu)
            y = set_norm(x / (jnp.sqrt(nu) + eps), dims)
            after.append(nu)
            results.append(y.astype(x.dtype))
        treedef = jax.tree.structure(updates)
        return treedef.unflatten(results), SecondMomentState(treedef.unflatten(after))

    return optax.GradientTransformation(init_fn, update_fn)


def set_norm(x: jax.Array, dims: Dimensions) -> jax.Array:
    """Each matrix of a leaf scaled to the Frobenius norm ``sqrt(min(fan_in, fan_out))``.

    Parts of a split leaf are matrices of their own. Zeros stay zero.
    """
    reduction, output = matrix_axes(dims, x.ndim, "a leaf")
    target = scale_array(dims, x.shape, lambda i, o: math.sqrt(min(i, o)))
    numbers = itertools.count()
    part = scale_array(dims, x.shape, lambda i, o: next(numbers))
    square, total = jnp.abs(x) ** 2, 0.0
    for number in range(next(numbers)):
        inside = jnp.equal(part, number)
        size = jnp.where(inside, square, 0).sum(reduction + output, keepdims=True)
        total = jnp.where(inside, size, total)
    return x * (target / jnp.sqrt(jnp.where(total == 0, 1, total)))


class Places:
    """Where state arrays that are shaped like parameters belong.

    Remembers what an eager ``init`` saw, for a later trace in which specs are hidden.
    """

    def __init__(self, param_shardings: Any):
        self.given = given_shardings(param_shardings)
        self.memory: dict[tuple[str, tuple[int, ...]], Spec] = {}

    def find(self, path: str, x: Any) -> tuple[AnyMesh | None, Spec]:
        """Mesh and spec of ``x``; no mesh where there is one device, or none can tell."""
        seen = see_one(x, path, self.given)
        key = path, tuple(x.shape)
        if seen.spec is not None:
            self.memory[key] = seen.spec
            return seen.mesh, seen.spec
        spec = self.memory.get(key)
        return (None, ()) if spec is None else (seen.mesh, spec)

    def zeros(self, path: str, x: Any, reduced: tuple[int, ...]) -> jax.Array:
        """Real zeros like ``x``, with size 1 along ``reduced``."""
        shape = tuple(1 if i in reduced else n for i, n in enumerate(x.shape))
        dtype = jnp.finfo(jnp.promote_types(x.dtype, jnp.float32)).dtype
        mesh, spec = self.find(path, x)
        if mesh is None:
            return jnp.zeros(shape, dtype)
        spec = fitting(spec, shape, x.shape)
        if isinstance(x, Tracer):
            return constrain(jnp.zeros(shape, dtype), mesh, spec)
        return jnp.zeros(shape, dtype, device=jax.sharding.NamedSharding(mesh, spec))

    def constrain(self, path: str, x: jax.Array, state: jax.Array) -> jax.Array:
        """``state`` in the sharding of ``x``, as far as it has the dimensions."""
        mesh, spec = self.find(path, x)
        return constrain(state, mesh, fitting(spec, state.shape, x.shape))


def fitting(
    spec: Spec, shape: tuple[int, ...], whole: tuple[int, ...]
) -> jax.sharding.PartitionSpec:
    """``spec`` without the axes of dimensions that were reduced to size 1."""
    sizes = zip(spec, shape, whole, strict=False)
    return partition_spec(
        tuple(axes if small == large else () for axes, small, large in sizes)
    )
