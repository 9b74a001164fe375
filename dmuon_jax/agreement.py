"""Processes must hold one plan: a comparison before the first exchange.

Two processes with different plans run different programs, and wait for each other for ever
at the first collective in which they differ.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from dmuon_jax.shardings import AnyMesh


def must_agree(arrays: Iterable[Any], mesh: AnyMesh | None) -> bool:
    """Whether all processes are here, eagerly, with arrays that they share.

    False in a trace, which must not communicate, and for a mesh that leaves some process
    out.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        return False
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in arrays):
        return False
    processes = {device.process_index for device in mesh.devices.flat}
    return 1 < jax.process_count() == len(processes)


def check_agreement(facts: Mapping[str, str]) -> None:
    """Compares texts over all processes; each process must call it with the same names.

    Args:
      facts: what must be equal, by name, causes before what follows from them.

    Raises:
      ValueError: on every process, with the first name that differs and where.
    """
    own = [hashlib.sha256(text.encode()).digest() for text in facts.values()]
    own = np.stack([np.frombuffer(digest, np.uint8) for digest in own])
    everywhere = np.asarray(multihost_utils.process_allgather(own))
    for index, name in enumerate(facts):
        found = everywhere[:, index]
        others = [i for i, digest in enumerate(found) if (digest != found[0]).any()]
        if others:
            raise ValueError(
                f"all processes must plan alike, got other {name} on process "
                f"{', '.join(map(str, others))} than on process 0: give each the same "
                "versions, options and costs, or one plan= made beforehand"
            )
