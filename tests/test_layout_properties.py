"""Rules that hold for every leaf on every mesh, with no array and no device."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st

from dmuon_jax import Plan
from dmuon_jax.layout import leaf_layout
from dmuon_jax.matrices import MeshShape
from dmuon_jax.planning import build
from dmuon_jax.planning.report import owned_matrices
from tests import fuzz

EXAMPLES = hypothesis.settings(max_examples=150, deadline=None, database=None)
FLOAT32 = 4


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4))
    return MeshShape(tuple("abcd"[: len(sizes)]), tuple(sizes))


@st.composite
def trees(draw):
    """A mesh, axes that have owners, and leaves; some of them equal."""
    mesh, rng = draw(meshes()), draw(st.randoms(use_true_random=False))
    cases = [fuzz.random_case(rng, mesh) for _ in range(draw(st.integers(1, 4)))]
    cases = [case for case in cases for _ in range(rng.randint(1, 3))]
    owner_axes = tuple(name for name in mesh.names if rng.random() < 0.8)
    return mesh, owner_axes, [fuzz.make_leaf(i, case) for i, case in enumerate(cases)]


def plan_of(tree):
    mesh, owner_axes, leaves = tree
    with fuzz.without_planner():
        return build.make_plan(leaves, mesh, build.Settings(owner_axes, fuzz.FlatCost()))


@EXAMPLES
@hypothesis.given(trees())
def test_each_axis_does_one_thing_each_way(tree):
    mesh, owner_axes, leaves = tree
    for leaf in leaves:
        layout = leaf_layout(leaf, mesh, owner_axes).layout
        kinds = (layout.both, layout.forced_in, layout.forced_out, layout.free)
        named = [name for axes in kinds for name in axes]
        assert len(named) == len(set(named))
        for way in ("in", "out"):
            side = layout.side(way)
            moved = side.exchanged + side.replicated + side.repeated
            assert len(moved) == len(set(moved))
            # What cuts a matrix is exchanged or gathered: owners hold whole matrices.
            cuts = {name for _, axes in side.dims for name in axes}
            assert cuts == set(side.exchanged + side.repeated)
            block = math.prod(side.block_shape) * mesh.size(cuts)
            assert block == math.prod(layout.parcel_shape)


@EXAMPLES
@hypothesis.given(trees())
def test_every_parcel_has_one_owner_along_owner_axes(tree):
    mesh, owner_axes, _ = tree
    plan = plan_of(tree)
    assert Plan.from_json(plan.to_json()) == plan
    for group in plan.groups:
        layout = plan.group_layout(group)
        parcels = sum(plan.layouts[i].leaf.num_parcels for i in group.leaves)
        coordinates = mesh.size(layout.both + layout.forced_in + layout.forced_out)
        assert sum(group.counts) * coordinates == parcels
        assert set(layout.free) <= set(owner_axes)
    for bucket in plan.buckets:
        owned = owned_matrices(plan, bucket)
        matrices = sum(
            plan.layouts[i].leaf.num_parcels
            for member in bucket.members
            for i in plan.groups[member.group].leaves
        )
        varying = plan.group_layout(plan.groups[bucket.members[0].group]).varying
        assert sum(owned) * mesh.size(varying) == matrices * mesh.num_devices


@EXAMPLES
@hypothesis.given(trees())
def test_bytes_are_twice_the_local_shards_beside_empty_slots(tree):
    """Where both specs use all axes, and owners are spread over all of them."""
    mesh, _, leaves = tree
    everywhere = [
        leaf
        for leaf in leaves
        if all(
            mesh.size(sum(spec, ())) == mesh.num_devices
            for spec in (leaf.spec_in, leaf.spec_out)
        )
    ]
    hypothesis.assume(everywhere)
    plan = plan_of((mesh, mesh.names, everywhere))
    shard_bytes = FLOAT32 * sum(math.prod(leaf.shape) for leaf in everywhere)
    moved = plan.exchange_bytes
    assert moved.all_gather == 0
    assert moved.all_to_all - moved.empty <= 2 * shard_bytes / mesh.num_devices + len(
        plan.groups
    )


@EXAMPLES
@hypothesis.given(trees())
def test_the_way_back_mirrors_the_way_in(tree):
    """With the specs swapped, out is in, and slices are gathers."""
    mesh, owner_axes, leaves = tree
    for leaf in leaves:
        there = leaf_layout(leaf, mesh, owner_axes)
        hypothesis.assume(there.leaf == leaf)
        swapped = dataclasses.replace(
            leaf, spec_in=leaf.spec_out, spec_out=leaf.spec_in
        )
        back = leaf_layout(swapped, mesh, owner_axes).layout
        for way, other in (("in", "out"), ("out", "in")):
            side, mirrored = there.layout.side(way), back.side(other)
            assert side.exchanged == mirrored.exchanged
            assert (side.gathered, side.sliced) == (mirrored.sliced, mirrored.gathered)
            assert side.block_shape == mirrored.block_shape
