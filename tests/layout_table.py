"""Prints the page of layouts, from the list that the tests run through.

    python -m tests.layout_table > notebooks/shardings.md

A test compares the stored page with it, and the tests of each layout compare its
collectives and bytes with the compiled program.
"""

import fractions
import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dmuon_jax import plan_owners
from tests.layouts import LAYOUTS, Layout

INTRODUCTION = """# Any sharding

Each mesh axis may shard a batch dimension (layers, experts), a reduction or output
dimension, or nothing, differently for momentum and parameter. P is the number of bytes of
all matrices; "bytes" are collective buffers per device and step, without EMPTY slots (a plan
reports those). Every row is a test: values against a float64 reference, collectives and
bytes against the compiled program (`tests/test_layouts.py`).

Made by `python -m tests.layout_table`.
"""
HEAD = (
    "| layout | mesh | shape | parameter | momentum | to owners | from owners | bytes |\n"
    "|---|---|---|---|---|---|---|---|"
)


def plan_of(layout: Layout):
    """A plan for as many such leaves that no slot is EMPTY."""
    names, sizes = zip(*layout.mesh, strict=True)
    mesh = AbstractMesh(sizes, names)
    count = math.prod(sizes)
    leaf = jax.ShapeDtypeStruct(layout.shape, np.float32)
    tree = {f"{i:02}": leaf for i in range(count)}
    momentum = None
    if layout.momentum is not None:
        momentum = NamedSharding(mesh, layout.momentum)
    return plan_owners(
        tree,
        mesh,
        param_shardings=NamedSharding(mesh, layout.spec),
        momentum_shardings=momentum,
        muon_weight_dimension_numbers=layout.dims,
        exchange_dtype="float32",
    )


def actions(side) -> str:
    """What one way does, in words."""
    words = []
    if side.mesh.size(side.exchanged) > 1:
        words.append(f"all-to-all over {', '.join(side.exchanged)}")
    if side.mesh.size(side.sliced) > 1:
        words.append(f"slice over {', '.join(side.sliced)}")
    if side.mesh.size(side.gathered) > 1:
        words.append(f"all-gather over {', '.join(side.gathered)}")
    return "; ".join(words) or "nothing"


def spec_text(spec) -> str:
    entries = [None if not x else x[0] if len(x) == 1 else x for x in spec]
    return str(PartitionSpec(*entries)).replace("PartitionSpec", "P").replace(",)", ")")


def row(layout: Layout) -> str:
    plan = plan_of(layout)
    (group,) = plan.groups
    shared = plan.group_layout(group)
    leaf = plan.layouts[0].leaf
    moved = plan.exchange_bytes
    assert not moved.empty
    elements = sum(math.prod(x.shape) for x in plan.leaves)
    share = fractions.Fraction(moved.total, elements * 4)
    cells = (
        layout.name,
        " ".join(f"{a}={n}" for a, n in layout.mesh),
        "×".join(map(str, layout.shape)),
        f"`{spec_text(leaf.spec_out)}`",
        f"`{spec_text(leaf.spec_in)}`",
        actions(shared.side("in")),
        actions(shared.side("out")),
        f"{share} P" if share else "0",
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    return "\n".join([INTRODUCTION, HEAD, *map(row, LAYOUTS)]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
