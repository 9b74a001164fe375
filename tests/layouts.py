"""Named layouts: how JAX users shard a matrix or a stack of matrices.

Every layout is tested for values, collectives and bytes; the README's table is made of
this list by ``python -m tests.layouts``.
"""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

MATRIX = Dims(0, 1)
STACK = Dims(1, 2)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One leaf and its shardings.

    Attributes:
      name: what users call it.
      mesh: axis names and sizes.
      shape: shape of the leaf.
      dims: its matrix axes.
      spec: sharding of the parameter.
      momentum: sharding of the momentum; None for the default.
      count: how many such leaves there are in the tree.
    """

    name: str
    mesh: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    dims: Dims
    spec: P
    momentum: P | None = None
    count: int = 2


X8 = (("x", 8),)
TWO = (("data", 2), ("fsdp", 4))
THREE = (("replica", 2), ("data", 2), ("expert", 2))
SIX = (("a", 2), ("b", 3))
ONES = (("a", 1), ("x", 4), ("b", 1))
FOUR = (("a", 2), ("b", 2), ("c", 1), ("d", 2))

LAYOUTS = (
    Layout("FSDP on rows", X8, (32, 24), MATRIX, P("x", None), count=9),
    Layout("FSDP on columns", X8, (20, 32), MATRIX, P(None, "x")),
    Layout("short spec", X8, (16, 40), MATRIX, P("x")),
    Layout("replicated (DDP), momentum ZeRO", X8, (24, 16), MATRIX, P()),
    Layout("replicated, nothing divides", X8, (7, 5), MATRIX, P()),
    Layout("one row", X8, (1, 64), MATRIX, P(None, "x"), count=1),
    Layout("one column", X8, (64, 1), MATRIX, P("x", None), count=1),
    Layout("layers sharded, whole matrices", X8, (8, 12, 20), STACK, P("x"), count=1),
    Layout("layer axis first", X8, (5, 16, 12), STACK, P(None, "x"), count=2),
    Layout("layer axis in the middle", X8, (16, 5, 12), Dims(0, 2), P("x"), count=1),
    Layout("layer axis last", X8, (12, 16, 3), Dims(0, 1), P(None, "x"), count=2),
    Layout("transposed (out, in)", X8, (16, 12), Dims(1, 0), P("x"), count=2),
    Layout("layers ZeRO, params replicated", X8, (8, 6, 10), STACK, P(), count=1),
    Layout("momentum cut otherwise", X8, (16, 24), MATRIX, P("x"), P(None, "x"), 2),
    Layout("ZeRO over two axes", TWO, (16, 12), MATRIX, P(("data", "fsdp"))),
    Layout(
        "ZeRO over two axes, minor first", TWO, (16, 12), MATRIX, P(("fsdp", "data"))
    ),
    Layout("HSDP", TWO, (20, 12), MATRIX, P("fsdp", None), count=5),
    Layout("TP on columns", TWO, (10, 20), MATRIX, P(None, "fsdp")),
    Layout("FSDP x TP", TWO, (6, 8), MATRIX, P("data", "fsdp"), count=11),
    Layout("TP x FSDP", TWO, (8, 6), MATRIX, P("fsdp", "data")),
    Layout("attention in (D,H,hd)", TWO, (8, 4, 6), Dims(0, (1, 2)), P("data", "fsdp")),
    Layout(
        "attention in, heads cut",
        TWO,
        (8, 2, 4),
        Dims(0, (1, 2)),
        P(None, "data", "fsdp"),
    ),
    Layout(
        "attention out (H,hd,D)",
        TWO,
        (4, 6, 8),
        Dims((0, 1), 2),
        P("fsdp", None, "data"),
    ),
    Layout(
        "conv (kh,kw,in,out)",
        TWO,
        (3, 3, 4, 8),
        Dims((0, 1, 2), 3),
        P(None, None, "fsdp"),
    ),
    Layout(
        "HSDP, momentum over replicas too",
        TWO,
        (16, 6),
        MATRIX,
        P("fsdp"),
        P(("fsdp", "data")),
    ),
    Layout(
        "layers over data, rows over fsdp",
        TWO,
        (4, 8, 6),
        STACK,
        P("data", "fsdp"),
        count=2,
    ),
    Layout(
        "batch forced in, cut out",
        TWO,
        (4, 8, 6),
        STACK,
        P(None, "data"),
        P("data", "fsdp"),
        1,
    ),
    Layout(
        "batch forced out, cut in", TWO, (4, 8, 6), STACK, P("fsdp"), P(None, "fsdp"), 1
    ),
    Layout(
        "batch moved between dims",
        TWO,
        (2, 4, 8, 6),
        Dims(2, 3),
        P("data"),
        P(None, "data"),
        1,
    ),
    Layout("experts", THREE, (4, 8, 6), STACK, P("expert", "data", None), count=2),
    Layout(
        "experts, momentum over replica",
        THREE,
        (4, 8, 10),
        STACK,
        P("expert", "data", None),
        P("expert", "data", "replica"),
        2,
    ),
    Layout(
        "experts of layers [L,E,m,n]",
        THREE,
        (3, 4, 6, 8),
        Dims(2, 3),
        P(None, "expert", None, "data"),
        count=1,
    ),
    Layout("axes of size 1", ONES, (8, 12), MATRIX, P(("a", "x"), "b")),
    Layout("axes of size 1 that no spec names", ONES, (8, 12), MATRIX, P("x")),
    Layout("only axes of size 1", ONES, (8, 12), MATRIX, P("a", "b")),
    Layout("four axes", FOUR, (8, 12), MATRIX, P(("d", "a"), ("b", "c"))),
    Layout(
        "four axes, one parcel and EMPTY slots",
        FOUR,
        (2, 4, 2, 4),
        Dims(1, 0),
        P(None, ("a", "d"), "b"),
        P(None, "a", "b", "d"),
        1,
    ),
    Layout("six devices, axes moved", SIX, (30, 6), MATRIX, P(None, "a"), P(("a", "b"))),
    Layout("four axes, stack", FOUR, (2, 8, 12), STACK, P("d", "c", ("b",)), count=2),
)

MESHES = tuple(dict.fromkeys(layout.mesh for layout in LAYOUTS))


def make_mesh(axes: tuple[tuple[str, int], ...], kind: AxisType) -> Mesh:
    """A mesh of virtual devices with axes of one type."""
    names, sizes = zip(*axes, strict=True)
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


@dataclasses.dataclass(frozen=True)
class Case:
    """All layouts on one mesh as one tree.

    Attributes:
      params: NumPy float32 arrays by name.
      dims: dimension numbers by name.
      shardings: parameters' shardings by name.
      momentum: momentum's shardings by name, where not the default.
    """

    mesh: Mesh
    params: dict
    dims: dict
    shardings: dict
    momentum: dict


def make_case(axes: tuple[tuple[str, int], ...], kind: AxisType, seed: int) -> Case:
    """The tree of all layouts on the mesh with ``axes``."""
    rng = np.random.default_rng(seed)
    mesh = make_mesh(axes, kind)
    params, dims, shardings, momentum = {}, {}, {}, {}
    for layout in (x for x in LAYOUTS if x.mesh == axes):
        for index in range(layout.count):
            name = f"{layout.name} {index}"
            params[name] = rng.normal(size=layout.shape).astype(np.float32)
            dims[name] = layout.dims
            shardings[name] = NamedSharding(mesh, layout.spec)
            if layout.momentum is not None:
                momentum[name] = NamedSharding(mesh, layout.momentum)
    return Case(mesh, params, dims, shardings, momentum)
