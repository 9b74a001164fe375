"""How the leaves of a subtree may be read together: layer axes, and which way matrices lie.

Names do not tell which axis of a leaf counts layers. So a few readings are tried on whole
subtrees. One stands if each leaf allows it (a norm's scale has one axis besides the layers',
a bias the output axes of its kernel) and if all leaves count the same number of layers.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from optax.contrib import MuonDimensionNumbers

from dmuon_jax.leaf_roles import Role, owner_of

Names = tuple[str, ...]
UNNAMED = "a name that says nothing and two axes or more"


@dataclasses.dataclass(frozen=True)
class Named:
    """A leaf with its names and what they say."""

    names: Names
    shape: tuple[int, ...]
    is_float: bool
    role: Role


@dataclasses.dataclass(frozen=True)
class Reading:
    """A way to read a subtree.

    Attributes:
      stack: axes that count layers; empty for none.
      turned: which matrices are (out, in): none, the leaves named "weight", or all.
    """

    stack: tuple[int, ...]
    turned: Literal["none", "weight", "all"]

    def layers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes of the layer axes."""
        return tuple(shape[axis] for axis in self.stack)

    def axes(self, ndim: int) -> tuple[int, ...] | None:
        """The other axes of a leaf; None if it has too few."""
        if any(not -ndim <= axis < ndim for axis in self.stack):
            return None
        layers = {axis % ndim for axis in self.stack}
        return tuple(axis for axis in range(ndim) if axis not in layers)

    def without_layers(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of one layer; None if the leaf has too few axes."""
        axes = self.axes(len(shape))
        return None if axes is None else tuple(shape[axis] for axis in axes)

    def letters(self, leaf: Named) -> tuple[str, ...]:
        """Letters of the axes of one layer of ``leaf``, before looking at its shape."""
        turns = self.turned == "all" or (
            self.turned == "weight" and leaf.names[-1] == "weight"
        )
        return tuple(turn(x) if turns else x for x in leaf.role.readings)


def turn(letters: str) -> str:
    """(in, out) to (out, in) and back; leading batch axes stay."""
    rest = letters.lstrip("b")
    return letters[: len(letters) - len(rest)] + rest[::-1]


def same_size(shape: Sequence[int] | None, sizes: Sequence[int]) -> bool:
    """Whether two shapes are equal but for axes of size 1."""
    return shape is not None and [n for n in shape if n != 1] == [
        n for n in sizes if n != 1
    ]


class Subtrees:
    """The subtrees of a tree, and the readings that stand in each."""

    def __init__(self, leaves: Sequence[Named], readings: Sequence[Reading]):
        self.readings = readings
        self.shapes = {leaf.names: leaf.shape for leaf in leaves}
        self.inside: dict[Names, list[Named]] = {}
        for leaf in leaves:
            for depth in range(len(leaf.names) + 1):
                self.inside.setdefault(leaf.names[:depth], []).append(leaf)
        self.allowed = {
            leaf.names: {r for r in readings if self.allows(leaf, r)} for leaf in leaves
        }
        self.stands: dict[Names, list[Reading]] = {}

    def standing(self, names: Names) -> list[Reading]:
        """The readings that stand in the subtree at ``names``."""
        if names not in self.stands:
            leaves = self.inside[names]
            self.stands[names] = [
                reading
                for reading in self.readings
                if all(reading in self.allowed[leaf.names] for leaf in leaves)
                and len({reading.layers(leaf.shape) for leaf in leaves}) == 1
            ]
        return self.stands[names]

    def allows(self, leaf: Named, reading: Reading) -> bool:
        """Whether ``leaf`` alone, with what belongs to it, can be read so."""
        if reading.axes(len(leaf.shape)) is None:
            return False
        return not leaf.role.readings or bool(self.fitting(leaf, reading))

    def fitting(self, leaf: Named, reading: Reading) -> list[str]:
        """The letters that fit one layer of ``leaf``."""
        shape = reading.without_layers(leaf.shape)
        return [
            letters
            for letters in reading.letters(leaf)
            if shape is not None
            and len(letters) == len(shape)
            and (
                leaf.role.kind == "vector"
                or self.agrees(leaf, reading, letters, shape)
            )
        ]

    def agrees(
        self, leaf: Named, reading: Reading, letters: str, sizes: tuple[int, ...]
    ) -> bool:
        """Whether a matrix agrees with its bias, and Gemma's gate with what follows it."""
        outputs = [n for n, x in zip(sizes, letters, strict=True) if x != "i"]
        owner = owner_of(leaf.names)
        *parent, last = owner or ("",)
        beside = [(*owner, "bias"), (*owner, "b"), (*parent, f"{last}_bias")]
        for names in beside:
            bias = self.shapes.get(names)
            if bias is not None and not same_size(
                reading.without_layers(bias), outputs
            ):
                return False
        if last != "gating_einsum":
            return True
        for names in [(*parent, "linear"), (*parent, "linear", "w")]:
            after = self.shapes.get(names)
            if after is not None:
                inputs = [n for n, x in zip(sizes, letters, strict=True) if x == "i"]
                after = reading.without_layers(after)
                return same_size(after, [*outputs[1:], *inputs])
        return True

    def answers(
        self, leaf: Named, standing: Sequence[Reading]
    ) -> dict[MuonDimensionNumbers | str | None, str]:
        """What the readings make of ``leaf``, each with its reason.

        Dimension numbers, None for Adam, or ``UNNAMED``.
        """
        found: dict[MuonDimensionNumbers | str | None, str] = {}
        for reading in standing:
            axes = reading.axes(len(leaf.shape))
            if axes is None:  # such a reading stands in no subtree that holds the leaf
                continue
            if leaf.role.kind != "matrix":
                lengths = [leaf.shape[axis] for axis in axes if leaf.shape[axis] != 1]
                if len(lengths) < 2:
                    found.setdefault(None, f"one axis beside layers {reading.stack}")
                else:
                    found.setdefault(UNNAMED, UNNAMED)
                continue
            for letters in self.fitting(leaf, reading):
                dims, text = dimensions(leaf, axes, letters)
                found.setdefault(dims, text)
        return found


def dimensions(
    leaf: Named, axes: tuple[int, ...], letters: str
) -> tuple[MuonDimensionNumbers | None, str]:
    """Dimension numbers of a matrix whose ``axes`` have ``letters``, and the reason."""
    reduction = [axis for axis, x in zip(axes, letters, strict=True) if x == "i"]
    output = [axis for axis, x in zip(axes, letters, strict=True) if x == "o"]
    shape = leaf.shape
    channels = reduction[0] if letters.startswith("o") else reduction[-1]
    if leaf.role.is_conv and shape[channels] == 1:
        return None, "depthwise convolution"
    fans = [math.prod(shape[axis] for axis in group) for group in (reduction, output)]
    if 1 in fans:
        return None, "one row or column"
    if len(reduction) == len(output) == 1 and fans[0] == fans[1]:
        # A square matrix gives the same update either way.
        reduction, output = sorted([reduction, output])
    batch = [axis for axis in range(len(shape)) if axis not in reduction + output]
    text = f"reduction {reduction}, output {output}, batch {batch}"
    return MuonDimensionNumbers(one_or_all(reduction), one_or_all(output)), text


def one_or_all(axes: list[int]) -> int | tuple[int, ...]:
    """A single axis as a number."""
    return axes[0] if len(axes) == 1 else tuple(axes)
