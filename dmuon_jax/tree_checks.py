"""Whether the trees handed to ``init`` and ``update`` belong together; sentences if not."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from optax.contrib import MuonState
from optax.transforms import PartitionState

from dmuon_jax.paths import by_path


def check_arrays(name: str, tree: Any) -> None:
    """Raises ``TypeError`` for a leaf that is neither an array nor a number."""
    for path, x in by_path(tree).items():
        try:
            jax.typeof(x)
        except TypeError as error:
            raise TypeError(
                f"{name} must hold arrays only, got {type(x).__name__} {x!r:.40} at {path}"
            ) from error


def check_update(updates: Any, state: Any, params: Any) -> None:
    """Raises for what ``dmuon``'s update cannot work on.

    Raises:
      TypeError: a state that another optimizer made, a leaf that is no array.
      ValueError: gradients that lack a parameter or have one more, arrays on different
        devices (in a trace JAX itself tells that).
    """
    if not isinstance(state, PartitionState):
        raise TypeError(
            "state must be what this dmuon's init returned (in an optax.chain: its part), "
            f"got {type(state).__name__}"
        )
    check_arrays("gradients", updates)
    if params is not None:
        check_same_leaves("gradients", by_path(updates), "parameter", by_path(params))
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


def check_momentum_shapes(state: MuonState, grads: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless each momentum is shaped as its gradient."""
    for path, x in by_path(state.mu).items():
        if np.shape(x) != np.shape(grads[path]):
            raise ValueError(
                f"the state must be made for these parameters, got momentum of shape "
                f"{np.shape(x)} for a gradient of shape {np.shape(grads[path])} at {path}"
            )


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
