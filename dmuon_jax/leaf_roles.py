"""What the name of a parameter says: its kind, and how its axes may be read.

A *reading* of a leaf without its layer axes is a string with a letter for each axis:
``i`` reduction, ``o`` output, ``b`` batch. ``"ioo"`` is an attention kernel
(features, heads, head size).
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax

Kind = Literal["matrix", "vector", "embedding", "unembedding", "router", "unknown"]


@dataclasses.dataclass(frozen=True)
class Role:
    """What a name says of a leaf.

    Attributes:
      kind: "matrix" for what Muon updates; "unknown" where the name tells nothing.
      readings: how the axes may be read, without layer axes; empty for no constraint.
      is_conv: whether a reduction axis of size 1 makes it a depthwise convolution.
    """

    kind: Kind
    readings: tuple[str, ...] = ()
    is_conv: bool = False


WRAPPED = frozenset({"kernel", "w", "weight"})
"""Leaf names that say nothing by themselves: the module's name does."""

LINEAR = ("io",)
CONV = ("iio", "iiio", "iiiio")
EXPERTS = ("bio", "io")

EMBEDDING = re.compile(r"embed|^wte$|^wpe$|^pos(ition)?_emb|^relpos|^rel_pos")
UNEMBEDDING = re.compile(
    r"unembed|(^|_)logits|lm_head|^(output_|classification_|value_)?head$|^classifier$"
)
HEADS = frozenset({"lm_head", "head", "output_head", "classifier", "logits_dense"})
ROUTER = re.compile(r"router|^gate_logits|expert_gate$|^gating_network$")
NORM = re.compile(r"norm|(^|_)rms(_|$)|^ln(\d|_|f$|$)|_ln(\d|_|$)")
VECTOR = re.compile(
    r"^(b|a_log|d|beta|gamma|offset|mean|var|sinks?|temperature|lambda\d?|skip|"
    r"cls|cls_token|mask_token|layer_scale)$|bias|scale$"
)
QKV = re.compile(
    r"^w?_?(q|k|v|kv)(_proj|_projection|_b|_b_proj)?$"
    r"|^(query|key|value)(_proj|_projection)?$"
)
FUSED_QKV = re.compile(r"^w?_?qkv(_proj|_projection)?$|^c_attn$|^in_proj_qkv\w*$")
OUT = re.compile(r"^w?_?o(ut)?(_proj|_projection)?$|^(output|post|attn_out|c_proj)$")
EINSUMS = {
    "q_einsum": ("oio",),
    "kv_einsum": ("boio",),
    "qkv_einsum": ("boio",),
    "attn_vec_einsum": ("iio",),
    "gating_einsum": ("bio", "boi"),
    "linear": LINEAR,
}
"""Kernels of Gemma: (heads, features, head size) and a gate that may be transposed."""

DIRECT = re.compile(
    r"^(wi|w_?[123]|w_?(in|out|gate|up|down|proj)|(gate|up|down|in|out|x|dt|gate_up)_proj"
    r"|fc_?(\d|in|out)?|c_fc|linear\d?|dense\d?|gate|up|down|proj|projection)$"
)
"""Names of matrices that are leaves themselves, beside those of attention."""

GATED = frozenset({"up", "down", "up_proj", "down_proj"})
"""What lies beside the gate of an MLP."""


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    """Names along a key path, without the box that holds a variable's value.

    Names joined by "/" or "." in one key of a flat dictionary are taken apart.
    """
    names: list[str] = []
    for index, key in enumerate(path):
        match key:
            case (
                jax.tree_util.DictKey(key=name)
                | jax.tree_util.FlattenedIndexKey(key=name)
            ):
                names.extend(flat_name(name))
            case jax.tree_util.SequenceKey(idx=position):
                names.append(str(position))
            case jax.tree_util.GetAttrKey(name=name):
                if name != "value" or index + 1 < len(path) or not names:
                    names.append(name)
            case _:
                names.append(str(key))
    return tuple(names)


def flat_name(name: Any) -> list[str]:
    """One key of a dictionary as names."""
    parts = name if isinstance(name, tuple) else re.split(r"[/.]", str(name))
    return [str(part) for part in parts if str(part)]


def plain(name: str) -> str:
    """``name`` in lower case with underscores, without its number: Dense_0 is dense."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"_\d+$", "", name.lower())


def owner_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The path of what names a leaf: its module for ``.../kernel``, else itself."""
    return names[:-1] if names[-1] in WRAPPED else names


def find_role(names: tuple[str, ...], neighbours: frozenset[str]) -> Role:
    """The role of the leaf at ``names``.

    Args:
      names: path of the leaf.
      neighbours: plain names of what lies beside the leaf's owner.
    """
    plains = [plain(name) for name in names if not name.isdigit()]
    if not plains:
        return Role("unknown")
    leaf, modules = plains[-1], plains[:-1]
    wrapped = leaf in WRAPPED
    owner = modules[-1] if wrapped and modules else leaf
    around = modules[:-1] if wrapped else modules
    nearest = (leaf, modules[-1]) if modules else (leaf,)
    if leaf not in ("kernel", "w") and any(NORM.search(name) for name in nearest):
        return Role("vector", ("o",))
    if VECTOR.search(leaf):
        return Role("vector")
    if any(ROUTER.search(name) for name in plains):
        return Role("router", LINEAR)
    attention = any("att" in name for name in around)
    if any(UNEMBEDDING.search(name) for name in nearest):
        return Role("unembedding")
    if HEADS & set(around) and not attention:
        return Role("unembedding")
    if any(EMBEDDING.search(name) for name in nearest) or is_patch(modules):
        return Role("embedding")
    if owner == "gate":
        return role_of_gate(around, neighbours)
    if not wrapped and not is_named_matrix(leaf):
        return Role("unknown")
    return role_of_matrix(owner, around)


def is_patch(modules: Sequence[str]) -> bool:
    """Whether a module turns patches of an image into features."""
    return any("patch" in name and "emb" in name for name in modules)


def is_named_matrix(leaf: str) -> bool:
    """Whether a leaf's own name is one that matrices have."""
    names = (QKV, FUSED_QKV, OUT, DIRECT)
    return leaf in EINSUMS or any(pattern.search(leaf) for pattern in names)


def is_expert(around: Sequence[str]) -> bool:
    """Whether a leaf with modules ``around`` it may hold a matrix for each expert."""
    named = any("expert" in name or "moe" in name for name in around)
    return named and not any("shared" in name for name in around)


def role_of_gate(around: Sequence[str], neighbours: frozenset[str]) -> Role:
    """A gate beside experts is a router, one beside up and down is half of an MLP."""
    if any(is_expert([name]) for name in neighbours):
        return Role("router", LINEAR)
    experts = is_expert(around)
    routed = any(ROUTER.search(name) for name in neighbours)
    if neighbours & GATED:
        if not experts or routed or "expert" in around[-1]:
            return role_of_matrix("gate", around)
        return Role("unknown")
    return Role("router", LINEAR) if experts else Role("unknown")


def role_of_matrix(owner: str, around: Sequence[str]) -> Role:
    """How the axes of a matrix named ``owner`` may be read."""
    attention = any("att" in name for name in around)
    if "conv" in owner:
        return Role("matrix", CONV, is_conv=True)
    if owner in EINSUMS:
        return Role("matrix", EINSUMS[owner])
    if FUSED_QKV.search(owner):
        return Role("matrix", ("io", "iboo"))
    if QKV.search(owner):
        return Role("matrix", ("io", "ioo"))
    if OUT.search(owner) and attention:
        return Role("matrix", ("io", "iio"))
    return Role("matrix", EXPERTS if is_expert([*around, owner]) else LINEAR)
