"""``hidden_matrices``: a rule that finds the matrices of a transformer's hidden layers."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmuon_jax.leaf_readings import UNNAMED, Named, Names, Reading, Subtrees
from dmuon_jax.leaf_roles import Role, find_role, owner_of, path_names, plain
from dmuon_jax.paths import leaf_name
from dmuon_jax.routing import DimensionNumbers

STACKS = ((), (0,), (1,), (-1,), (0, 1))
"""Layer axes that are tried: none, first, second, last, the first two."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is done with a leaf, and why.

    Attributes:
      dims: its dimension numbers; None for Adam, and where it is not decided.
      role: what its name says.
      reason: why, in words.
      is_decided: False if no answer, or more than one, remained.
    """

    dims: DimensionNumbers
    role: Role
    reason: str
    is_decided: bool = True


@dataclasses.dataclass(frozen=True)
class HiddenMatrices:
    """A rule for ``muon_weight_dimension_numbers``: matrices of hidden layers to Muon.

    Embeddings, unembeddings, routers, norms, biases, scalars, depthwise convolutions and
    matrices with one row or column go to Adam. Layers and experts that are stacked in one
    leaf become batch axes.

    Names say what a leaf is; which axis counts layers is found by elimination, in the
    smallest subtree that leaves one answer (``leaf_readings``). Nothing is guessed: a leaf
    with several answers left is refused. ``explain`` gives the reason for each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from dmuon_jax import dmuon, hidden_matrices
      >>> tx = dmuon(3e-3, muon_weight_dimension_numbers=hidden_matrices)
      >>> mlp = {"kernel": jnp.ones((4, 8, 16)), "bias": jnp.ones((4, 16))}
      >>> hidden_matrices({"mlp": mlp})["mlp"]["kernel"]
      MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    Attributes:
      stack_axis: the axis that counts layers wherever layers are stacked; None: found.
      out_in: whether all matrices are (out, in), as in Equinox, or (in, out), as in Flax;
        None: leaves named "weight" as the biases beside them tell, all others (in, out).
      overrides: dimension numbers (None for Adam) by regular expression; the first one
        found in a leaf's path ("decoder/layers/mlp/wi_0/kernel") decides.
    """

    stack_axis: int | None = None
    out_in: bool | None = None
    overrides: Mapping[str, DimensionNumbers] = dataclasses.field(default_factory=dict)

    def __call__(self, params: Any) -> Any:
        """A tree like ``params`` of ``MuonDimensionNumbers`` or None.

        Args:
          params: arrays or shapes. Where leaves are masked away, the others are decided
            without them.

        Raises:
          ValueError: every leaf that cannot be decided, all at once.
          TypeError: if ``params`` is a single array.
        """
        decisions = self.explain(params)
        refused = [f"{p}: {d.reason}" for p, d in decisions.items() if not d.is_decided]
        if refused:
            raise ValueError(
                "hidden_matrices must find one reading of each leaf (HiddenMatrices takes "
                "overrides=, stack_axis= and out_in=), got\n  " + "\n  ".join(refused)
            )
        return jax.tree.structure(params).unflatten(
            [decision.dims for decision in decisions.values()]
        )

    def explain(self, params: Any) -> dict[str, Decision]:
        """The decision for each leaf, by its name (``paths.leaf_name``)."""
        leaves = name_leaves(params)
        overridden = {path: self.override(leaf) for path, leaf in leaves.items()}
        tree = Subtrees(
            [leaf for path, leaf in leaves.items() if overridden[path] is None],
            self.readings(),
        )
        return {
            path: overridden[path] or decide(leaf, tree)
            for path, leaf in leaves.items()
        }

    def override(self, leaf: Named) -> Decision | None:
        """The decision that ``overrides`` makes, if any."""
        path = "/".join(leaf.names)
        for pattern, dims in self.overrides.items():
            if re.search(pattern, path):
                return Decision(dims, leaf.role, f"override {pattern!r}")
        return None

    def readings(self) -> list[Reading]:
        """The readings that are tried."""
        stacks = STACKS if self.stack_axis is None else ((), (self.stack_axis,))
        turns = ("none", "weight") if self.out_in is None else ("none",)
        turns = ("all",) if self.out_in else turns
        return [Reading(stack, turned) for stack in stacks for turned in turns]


hidden_matrices = HiddenMatrices()


def name_leaves(params: Any) -> dict[str, Named]:
    """The leaves of a tree by path, with their names and roles.

    Names of leaves that are masked away still count as neighbours.

    Raises:
      TypeError: if ``params`` is a single array.
    """
    items = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    paths = [path_names(path) for path, _ in items]
    if () in paths:
        raise TypeError(
            "params must be a tree with a name for each leaf, got a single leaf (for "
            "optax.inject_hyperparams, a rule must be among static_args)"
        )
    children = children_of(paths)
    leaves = {}
    for names, (path, x) in zip(paths, items, strict=True):
        if not isinstance(x, optax.MaskedNode):
            beside = children.get(owner_of(names)[:-1], ())
            leaves[leaf_name(path)] = Named(
                names=names,
                shape=tuple(np.shape(x)),
                is_float=bool(jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)),
                role=find_role(names, frozenset(beside)),
            )
    return leaves


def children_of(paths: Iterable[Names]) -> dict[Names, set[str]]:
    """Plain names of what lies directly below each inner node."""
    children: dict[Names, set[str]] = {}
    for names in paths:
        for depth, name in enumerate(names):
            children.setdefault(names[:depth], set()).add(plain(name))
    return children


def decide(leaf: Named, tree: Subtrees) -> Decision:
    """The decision for one leaf: the only answer of the smallest subtree that has one."""
    reason = simple_reason(leaf)
    if reason:
        return Decision(None, leaf.role, reason)
    answers: dict[Any, str] = {}
    where = ""
    for depth in range(len(leaf.names), -1, -1):
        standing = tree.standing(leaf.names[:depth])
        if not standing:
            break
        answers = tree.answers(leaf, standing)
        where = "/".join(leaf.names[:depth]) or "the whole tree"
        if len(answers) == 1:
            break
    texts = (
        " or ".join(answers.values()) or "no reading fits it and what lies beside it"
    )
    if len(answers) != 1 or UNNAMED in answers:
        at = f", seen in {where}" if where else ""
        return Decision(None, leaf.role, f"shape {leaf.shape}: {texts}{at}", False)
    return Decision(next(iter(answers)), leaf.role, f"{texts}: all that fits {where}")


def simple_reason(leaf: Named) -> str:
    """Why a leaf goes to Adam whatever lies beside it; empty if that is open."""
    if not leaf.is_float:
        return "not floating point"
    if leaf.role.kind not in ("matrix", "unknown"):
        return leaf.role.kind
    return "one axis" if sum(size != 1 for size in leaf.shape) < 2 else ""
