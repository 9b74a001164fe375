"""Layout: how one leaf's blocks reach whole parcels on owners, and return.

For each mesh axis the momentum's spec (in) and the parameter's spec (out) either shard a
batch dimension (B), shard a reduction or output dimension (X), or leave the axis out (R).
An axis that is B on some side *forces* the owner's coordinate; along the other axes the
owner is *free*, or, for axes outside ``owner_axes``, the work is *repeated*:

=========  =====================================  =====================================
axis       to_owners                              from_owners
=========  =====================================  =====================================
B          nothing                                nothing
X, owner   all-to-all: split slots, join blocks   all-to-all: split blocks, join slots
R, owner   each device slices its share of slots  all-gather of slots
X, repeat  all-gather of blocks                   each device slices its block
R, repeat  nothing                                nothing
=========  =====================================  =====================================

"Owner" axes are the free ones and those forced by the *other* side. A batch dimension that
is sharded on both sides must be cut by the same major axes on both (the one list a prefix
of the other); otherwise the momentum is first brought to the parameter's sharding.
"""

import dataclasses
import math

from dmuon_jax.matrices import Axes, Leaf, MeshShape, Piece, Spec


@dataclasses.dataclass(frozen=True)
class MatrixDim:
    """A reduction or output dimension: its size, and the axes that cut it."""

    size: int
    axes_in: Axes
    axes_out: Axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """What leaves must share to travel in one exchange group.

    Attributes:
      mesh: the mesh's axes.
      dtype: dtype name in which blocks arrive and leave: float32 or wider.
      reduction: the reduction dimensions, in order.
      output: the output dimensions, in order.
      pieces: how a parcel is cut into matrices (empty: not at all).
      both: axes that shard a batch dimension in and out.
      forced_in: axes that shard a batch dimension on the way in only.
      forced_out: axes that shard a batch dimension on the way out only.
      free: axes along which the owner is chosen.
    """

    mesh: MeshShape
    dtype: str
    reduction: tuple[MatrixDim, ...]
    output: tuple[MatrixDim, ...]
    pieces: tuple[Piece, ...]
    both: Axes
    forced_in: Axes
    forced_out: Axes
    free: Axes

    @property
    def dims(self) -> tuple[MatrixDim, ...]:
        return self.reduction + self.output

    @property
    def parcel_shape(self) -> tuple[int, int]:
        return (
            math.prod(dim.size for dim in self.reduction),
            math.prod(dim.size for dim in self.output),
        )

    @property
    def num_owners(self) -> int:
        """Number of free owners of a parcel."""
        return self.mesh.size(self.free)

    @property
    def varying(self) -> Axes:
        """Axes along which devices hold different slots."""
        return self.mesh.ordered(
            self.both + self.forced_in + self.forced_out + self.free
        )

    def side(self, way: str) -> "Side":
        """The actions of one way: ``"in"`` or ``"out"``."""
        inward = way == "in"
        crossing = set(
            sum((d.axes_in if inward else d.axes_out for d in self.dims), ())
        )
        other = self.forced_out if inward else self.forced_in
        owner = self.mesh.ordered(self.free + other)
        here = self.both + (self.forced_in if inward else self.forced_out)
        repeat = tuple(n for n in self.mesh.names if n not in owner + here)
        return Side(
            mesh=self.mesh,
            inward=inward,
            parcel_shape=self.parcel_shape,
            dims=tuple(
                (dim.size, dim.axes_in if inward else dim.axes_out) for dim in self.dims
            ),
            owner=owner,
            exchanged=tuple(n for n in owner if n in crossing),
            replicated=tuple(n for n in owner if n not in crossing),
            repeated=tuple(n for n in repeat if n in crossing),
        )


@dataclasses.dataclass(frozen=True)
class Side:
    """The actions of one way of the exchange.

    Attributes:
      mesh: the mesh's axes.
      inward: whether this is the way to the owners.
      parcel_shape: (fan_in, fan_out).
      dims: size and cutting axes of each matrix dimension.
      owner: axes whose coordinate tells slots apart on this way, in mesh order.
      exchanged: those that cut a matrix dimension: one all-to-all over them.
      replicated: the other owner axes: slices in, an all-gather out.
      repeated: cutting axes along which work is repeated: an all-gather in, slices out.
    """

    mesh: MeshShape
    inward: bool
    parcel_shape: tuple[int, int]
    dims: tuple[tuple[int, Axes], ...]
    owner: Axes
    exchanged: Axes
    replicated: Axes
    repeated: Axes

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Local shape of a parcel's block."""
        return tuple(size // self.mesh.size(axes) for size, axes in self.dims)

    @property
    def gathered(self) -> Axes:
        """Axes of the all-gather: repeated ones in, replicated ones out."""
        return self.repeated if self.inward else self.replicated

    @property
    def sliced(self) -> Axes:
        """Axes along which each device slices: replicated ones in, repeated ones out."""
        return self.replicated if self.inward else self.repeated

    @property
    def travels(self) -> bool:
        """Whether anything leaves a device on this way."""
        return self.mesh.size(self.exchanged + self.gathered) > 1

    def elements_per_slot(self) -> tuple[int, int]:
        """Buffer elements per device of one slot: (all-to-all, all-gather result)."""
        exchanged = math.prod(self.block_shape) * self.mesh.size(self.exchanged)
        gathered = exchanged * self.mesh.size(self.gathered)
        return (
            exchanged if self.mesh.size(self.exchanged) > 1 else 0,
            gathered if self.mesh.size(self.gathered) > 1 else 0,
        )


@dataclasses.dataclass(frozen=True)
class BatchDim:
    """A batch dimension as ``both x extra x rest``; ``both`` is not in the local block.

    Attributes:
      extra_in: axes that shard it on the way in only.
      extra_out: axes that shard it on the way out only.
      rest: what is left, the part that belongs to the core.
    """

    extra_in: Axes
    extra_out: Axes
    rest: int


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """A leaf's batch dimensions beside the layout that it shares with its group.

    Attributes:
      leaf: the leaf, its ``spec_in`` made compatible with ``spec_out``.
      layout: the shared part.
      batch: its batch dimensions, in order.
    """

    leaf: Leaf
    layout: Layout
    batch: tuple[BatchDim, ...]

    @property
    def core(self) -> int:
        """Parcels of one forced coordinate: those to spread over the free owners."""
        return math.prod(dim.rest for dim in self.batch)


def leaf_layout(leaf: Leaf, mesh: MeshShape, owner_axes: Axes) -> LeafLayout:
    """The layout of ``leaf`` on ``mesh`` with owners spread over ``owner_axes``.

    Raises:
      ValueError: if a spec does not fit the leaf: unknown or repeated axes, or a dimension
        that its axes do not divide.
    """
    for name, spec in (("momentum", leaf.spec_in), ("parameter", leaf.spec_out)):
        check_spec(leaf, name, spec, mesh)
    if not compatible(leaf):
        leaf = dataclasses.replace(leaf, spec_in=leaf.spec_out)
    batch, both, forced_in, forced_out = [], [], [], []
    for axis in leaf.batch_axes:
        axes_in, axes_out = leaf.spec_in[axis], leaf.spec_out[axis]
        common = min(len(axes_in), len(axes_out))
        extra_in, extra_out = axes_in[common:], axes_out[common:]
        both += axes_in[:common]
        forced_in += extra_in
        forced_out += extra_out
        cuts = max(axes_in, axes_out, key=len)
        rest = leaf.shape[axis] // mesh.size(cuts)
        batch.append(BatchDim(extra_in, extra_out, rest))
    forced = both + forced_in + forced_out
    # An axis of one device that no spec names would only add a collective that moves nothing.
    idle = {n for n in mesh.names if mesh.size((n,)) == 1}
    idle -= {n for axes in (*leaf.spec_in, *leaf.spec_out) for n in axes}
    dims = {
        axis: MatrixDim(leaf.shape[axis], leaf.spec_in[axis], leaf.spec_out[axis])
        for axis in leaf.reduction_axes + leaf.output_axes
    }
    layout = Layout(
        mesh=mesh,
        dtype=wide_dtype(leaf.dtype),
        reduction=tuple(dims[axis] for axis in leaf.reduction_axes),
        output=tuple(dims[axis] for axis in leaf.output_axes),
        pieces=leaf.pieces,
        both=mesh.ordered(both),
        forced_in=mesh.ordered(forced_in),
        forced_out=mesh.ordered(forced_out),
        free=tuple(n for n in mesh.ordered(owner_axes) if n not in {*forced, *idle}),
    )
    return LeafLayout(leaf, layout, tuple(batch))


def wide_dtype(dtype: str) -> str:
    """``dtype``, or float32 where that is wider."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def compatible(leaf: Leaf) -> bool:
    """Whether parcels can go from ``spec_in`` to ``spec_out`` through one owner each."""
    forced_in, forced_out = set(), set()
    for axis in leaf.batch_axes:
        axes_in, axes_out = leaf.spec_in[axis], leaf.spec_out[axis]
        common = min(len(axes_in), len(axes_out))
        if axes_in[:common] != axes_out[:common]:
            return False
        forced_in.update(axes_in[common:])
        forced_out.update(axes_out[common:])
    return not forced_in & forced_out


def check_spec(leaf: Leaf, name: str, spec: Spec, mesh: MeshShape) -> None:
    """Raises ``ValueError`` unless ``spec`` can shard ``leaf`` on ``mesh``."""
    used = [axis for axes in spec for axis in axes]
    where = f"got {spec} for shape {leaf.shape} on mesh {mesh} at {leaf.path}"
    if len(spec) != len(leaf.shape):
        raise ValueError(f"the {name}'s spec must cover every dimension, {where}")
    unknown = sorted(set(used) - set(mesh.names))
    if unknown:
        raise ValueError(
            f"the {name}'s spec must use axes of the mesh, not {unknown}, {where}"
        )
    if len(set(used)) != len(used):
        raise ValueError(f"the {name}'s spec must use each axis once, {where}")
    for size, axes in zip(leaf.shape, spec, strict=True):
        if size % mesh.size(axes):
            raise ValueError(
                f"the {name}'s spec must divide each dimension: {size} is not a multiple "
                f"of {mesh.size(axes)} ({'x'.join(axes)}), {where}"
            )
