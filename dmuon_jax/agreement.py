"""Processes must hold one plan: a comparison before the first exchange.

Two processes with different plans run different programs, and wait for each other for ever
at the first collective in which they differ.
"""

import hashlib
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from dmuon_jax.shardings import AnyMesh


def is_abstract(arrays: Iterable[Any]) -> bool:
    """Whether arrays are traced or mere shapes, or a trace is under way around them."""
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in arrays):
        return True
    return isinstance(jnp.zeros(()), Tracer)


def must_agree(arrays: Iterable[Any], mesh: AnyMesh | None) -> bool:
    """Whether all processes are here, eagerly, with arrays that they share.

    False in a trace, which must not communicate, and for a mesh that leaves some process
    out.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        return False
    if is_abstract(arrays):
        return False
    return 1 < jax.process_count() == len(processes_of(mesh))


def processes_of(mesh: jax.sharding.Mesh) -> set[int]:
    """The processes that have a device of ``mesh``."""
    return {device.process_index for device in mesh.devices.flat}


def versions() -> str:
    """The version of jax, and a hash of this package's sources."""
    package = pathlib.Path(__file__).parent
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(path.relative_to(package).as_posix().encode())
        sources.update(path.read_bytes())
    return f"jax {jax.__version__}, dmuon_jax {sources.hexdigest()}"


def check_agreement(facts: Mapping[str, str]) -> None:
    """Compares versions, then texts, over all processes.

    Args:
      facts: what must be equal, by name, causes before what follows from them. Processes
        of one version must give the same names.

    Raises:
      ValueError: on every process, with the first name that differs and where.
    """
    # Alone and first: another version may have other facts to compare.
    compare({"versions of dmuon_jax or jax": versions()})
    compare(facts)


def compare(facts: Mapping[str, str]) -> None:
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


def from_first_process(make: Callable[[], str]) -> str:
    """What ``make`` gives on process 0, on every process; each must call this.

    Raises:
      RuntimeError: on the others, where ``make`` failed on process 0: no one waits.
    """
    text = ""
    try:
        if jax.process_index() == 0:
            text = make()
    finally:
        own = np.frombuffer(text.encode(), np.uint8)
        size = multihost_utils.broadcast_one_to_all(np.int32(own.size))
        own = own if jax.process_index() == 0 else np.zeros(int(size), np.uint8)
        text = ""
        if size:
            everywhere = multihost_utils.broadcast_one_to_all(own)
            text = np.asarray(everywhere).tobytes().decode()
    if not text:
        raise RuntimeError("process 0 failed, see its error; this one depends on it")
    return text
