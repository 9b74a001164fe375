"""Momentum in host memory: what it takes to compute with it, and to put it back.

The type of an array tells its memory space, ``Device`` or ``Host``; arithmetic on both at
once is an error in JAX. Of the memory kinds of a device only ``"pinned_host"`` is ``Host``.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.core import ShapedArray

KINDS = (None, "device", "pinned_host")


def check_kinds(given: Mapping[str, jax.sharding.NamedSharding]) -> None:
    """Raises ``NotImplementedError`` for a memory kind that a trace cannot tell.

    An update could not give back an array of such a kind where it found it.
    """
    for path, sharding in given.items():
        if sharding.memory_kind not in KINDS:
            raise NotImplementedError(
                f"the memory_kind of momentum_shardings must be one of {KINDS}, got "
                f"{sharding.memory_kind!r} at {path or 'its root'}"
            )


def on_host(x: Any) -> bool:
    """Whether an array, a tracer or a type is in host memory."""
    kind = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return kind.memory_space == jax.memory.Space.Host


def to_device(x: jax.Array) -> jax.Array:
    """``x`` in the memory of its device."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
    """``x`` in the memory of its device's host."""
    return jax.device_put(x, jax.memory.Space.Host)


def like(x: jax.Array, old: jax.Array) -> jax.Array:
    """``x``, in the memory space of ``old``."""
    return to_host(x) if on_host(old) else x
