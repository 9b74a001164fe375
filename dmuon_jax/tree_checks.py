"""Whether the trees handed to ``init`` and ``update`` belong together; sentences if not."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from optax import MaskedNode
from optax.contrib import MuonState
from optax.transforms import PartitionState

from dmuon_jax.matrices import MeshShape, Spec
from dmuon_jax.paths import by_path, covers, leaf_name, name_some
from dmuon_jax.shardings import (
    given_shardings,
    lookup,
    mesh_shape,
    partition_spec,
    same_mesh,
    see,
    spec_of,
    tell_apart,
)


def check_leaves(name: str, tree: Any) -> None:
    """Raises ``TypeError`` for a leaf that is neither an array nor a number."""
    for path, x in by_path(tree).items():
        try:
            jax.typeof(x)
        except TypeError as error:
            raise TypeError(
                f"{name} must hold arrays only, got {type(x).__name__} {x!r:.40} at "
                f"{path or 'its root'}"
            ) from error


def is_key(x: Any) -> bool:
    """Whether ``x`` holds keys of ``jax.random``."""
    return jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)


def check_arrays(name: str, tree: Any) -> None:
    """Raises ``TypeError`` for a leaf that is neither an array of numbers nor a number."""
    check_leaves(name, tree)
    for path, x in by_path(tree).items():
        if is_key(x):
            raise TypeError(
                f"{name} must hold numbers only, got a key of jax.random at {path}: keep "
                "keys beside the parameters"
            )


def check_given(params: Any, **given: Any) -> None:
    """Raises ``ValueError`` with everything in which given shardings and ``params`` differ.

    Args:
      params: arrays or shapes; a trace over Auto axes hides specs, which then pass.
      **given: ``param_shardings`` and ``momentum_shardings``, as given to ``dmuon``.
    """
    wrong = []
    for name, tree in given.items():
        shardings = given_shardings(tree)
        if lost := leaves_without(params, list(shardings)):
            wrong.append(f"{name} must be for leaves of params, got {name_some(lost)}")
        whose = "array" if name == "param_shardings" else "parameters"
        for path, x in by_path(params).items() if shardings else ():
            sharding, own = lookup(shardings, path), see(x, path)
            if sharding is None or own.mesh is None:
                continue
            if not same_mesh(own.mesh, sharding.mesh):
                one, other = tell_apart(own.mesh, sharding.mesh)
                wrong.append(
                    f"{name} must be on the mesh of the {whose}, {one}, got {other} at "
                    f"{path}"
                )
                continue
            if name != "param_shardings":
                continue
            told = mesh_shape(own.mesh)
            spec = spec_of(sharding.spec, np.ndim(x), path)
            if own.spec is not None and cuts(spec, told) != cuts(own.spec, told):
                wrong.append(
                    f"{name} must be those of the arrays, got {sharding.spec} for "
                    f"{partition_spec(own.spec)} at {path}"
                )
    if wrong:
        raise ValueError("\n".join(wrong))


def leaves_without(params: Any, prefixes: list[str]) -> list[str]:
    """Those of ``prefixes`` that name nothing in ``params``; what is masked may be named."""
    names, masked = set(), []
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_place):
        names.update(leaf_name(path[:i]) for i in range(len(path) + 1))
        if is_place(x):
            masked.append(leaf_name(path))
    return [
        prefix
        for prefix in prefixes
        if prefix not in names and not any(covers(place, prefix) for place in masked)
    ]


def is_place(x: Any) -> bool:
    """Whether ``x`` stands where another tree may have a leaf."""
    return x is None or isinstance(x, MaskedNode)


def cuts(spec: Spec, mesh: MeshShape) -> Spec:
    """``spec`` with only those axes that cut something."""
    return tuple(tuple(a for a in axes if mesh.size((a,)) > 1) for axes in spec)


def check_update(updates: Any, state: Any, params: Any) -> None:
    """Raises for what ``dmuon``'s update cannot work on.

    Raises:
      TypeError: a state that another optimizer made, a leaf that is no array.
      ValueError: gradients that lack a parameter, have one more or are shaped otherwise,
        arrays on different devices (in a trace JAX itself tells that).
    """
    if not isinstance(state, PartitionState):
        raise TypeError(
            "state must be what this dmuon's init returned (in an optax.chain: its part), "
            f"got {type(state).__name__}"
        )
    check_arrays("gradients", updates)
    if params is not None:
        check_same_leaves("gradients", by_path(updates), "parameter", by_path(params))
        check_shapes(by_path(updates), by_path(params))
    check_devices({"gradients": updates, "the state": state, "params": params})


def check_momentum(state: Any, grads: Mapping[str, Any]) -> None:
    """Raises unless ``state`` is Muon's and has a momentum for each gradient.

    Raises:
      TypeError: a state that another transform made.
      ValueError: a state that was made for other parameters.
    """
    if not isinstance(state, MuonState):
        raise TypeError(f"state must be a MuonState, got {type(state).__name__}")
    check_same_leaves("the state", by_path(state.mu), "gradient", grads)


def check_floating(grads: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` that names every gradient of a matrix that is no floating point.

    Momentum of whole numbers would be taken in them, and be far off or NaN.
    """
    kinds = {path: jax.typeof(x).dtype for path, x in grads.items()}
    wrong = [
        f"{'float0' if kind == jax.dtypes.float0 else kind} at {path}"
        for path, kind in kinds.items()
        if not jnp.issubdtype(kind, jnp.inexact)
    ]
    if wrong:
        raise TypeError(
            "gradients of matrices that Muon updates must be floating point, got "
            + name_some(wrong)
        )


def check_momentum_shapes(state: MuonState, grads: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless each momentum is shaped as its gradient."""
    for path, x in by_path(state.mu).items():
        if np.shape(x) != np.shape(grads[path]):
            raise ValueError(
                f"the state must be made for these parameters, got momentum of shape "
                f"{np.shape(x)} for a gradient of shape {np.shape(grads[path])} at {path}"
            )


def check_shapes(grads: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` that names every gradient shaped otherwise than its parameter."""
    wrong = [
        f"{np.shape(x)} for {np.shape(params[path])} at {path}"
        for path, x in grads.items()
        if np.shape(x) != np.shape(params[path])
    ]
    if wrong:
        raise ValueError("gradients must be shaped as parameters, got " + "; ".join(wrong))


def check_same_leaves(
    name: str, one: Mapping[str, Any], what: str, other: Mapping[str, Any]
) -> None:
    """Raises ``ValueError`` that names the first leaf that only one of two trees has."""
    for path in other:
        if path not in one:
            raise ValueError(f"{name} must have a leaf for each {what}, got none at {path}")
    for path in one:
        if path not in other:
            raise ValueError(f"{name} must have no leaf without a {what}, got one at {path}")


def check_devices(trees: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if arrays that are bound to devices lie on different ones."""
    seen: dict[frozenset, str] = {}
    for name, tree in trees.items():
        for path, x in by_path(tree).items():
            if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
                devices = frozenset(x.sharding.device_set)
                seen.setdefault(devices, f"{len(devices)} of {name} at {path}")
            if len(seen) > 1:
                raise ValueError(
                    "gradients, state and params must lie on the same devices, got "
                    f"{' and '.join(seen.values())}; call init on the parameters where "
                    "they train, or move the state (jax.device_put with state_shardings)"
                )
