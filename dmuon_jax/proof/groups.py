"""Device groups of a collective, in every form that HLO text spells them.

``{{0,1},{2,3}}`` lists the groups; ``[2,4]<=[4,2]T(1,0)`` is the row-major iota of
the second shape, transposed and reshaped to the first; ``mesh['a'=2,'b'=4] {'b'}``
names mesh axes that a group spans, ``'b':(2)2`` being the part of size 2 of axis b
that follows a part of size 2; ``, device_ids=([2,4]T(1,0))`` or a list may follow the
mesh and order its devices.
"""

from __future__ import annotations

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
ORDER = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")
SUB_AXIS = re.compile(
    r"""^['"]?(?P<name>[^'":]*)['"]?(?::\((?P<pre>\d+)\)(?P<n>\d+))?$"""
)


def integers(text: str) -> list[int]:
    return [int(item) for item in re.findall(r"\d+", text)]


def iota(text: str) -> np.ndarray | None:
    """Array that an iota form spells, None where `text` holds none."""
    match = IOTA.search(text)
    if match is None:
        return None
    shape, reshaped = integers(match.group(1)), integers(match.group(2))
    ids = np.arange(math.prod(reshaped)).reshape(reshaped)
    if match.group(3):
        ids = ids.transpose(integers(match.group(3)))
    return ids.reshape(shape)


def device_order(text: str, count: int) -> np.ndarray:
    """Devices of a mesh in row-major order, as ``device_ids=`` gives them."""
    rows, match = iota(text), ORDER.search(text)
    if rows is not None:
        return rows.reshape(-1)
    if match is not None:
        ids = np.arange(count).reshape(integers(match.group(1)))
        return ids.transpose(integers(match.group(2))).reshape(-1)
    return np.array(integers(text) or range(count))


def mesh_groups(text: str, device_ids: str) -> Groups:
    """Groups of the form ``mesh['a'=2,'b'=4] {'b'}``."""
    axes_text, _, chosen_text = text[len("mesh[") :].partition("]")
    axes = [item.rpartition("=") for item in axes_text.split(",")]
    names = [name.strip("'\" ") for name, _, _ in axes]
    sizes = [int(size) for _, _, size in axes]
    chosen_text = chosen_text or device_ids
    chosen = chosen_text[chosen_text.rindex("{") + 1 : chosen_text.rindex("}")]
    ids = device_order(device_ids.partition("{")[0], math.prod(sizes))
    picked = []
    for item in filter(None, (part.strip() for part in chosen.split(","))):
        match = SUB_AXIS.match(item)
        if match is None or match.group("name") not in names:
            raise ValueError(f"replica_groups must name axes of its mesh, got {text!r}")
        axis = names.index(match.group("name"))
        pre = int(match.group("pre") or 1)
        picked.append((axis, pre, int(match.group("n") or sizes[axis])))
    return grouped(ids, sizes, picked)


def grouped(
    ids: np.ndarray, sizes: list[int], picked: list[tuple[int, int, int]]
) -> Groups:
    """Rows of devices that differ only in the picked parts (axis, before, size)."""
    dims, member = [], {}
    for axis, size in enumerate(sizes):
        rest, done = size, 1
        for _, pre, n in sorted(part for part in picked if part[0] == axis):
            dims += [pre // done, n]
            member[axis, pre] = len(dims) - 1
            rest, done = rest // (pre // done * n), pre * n
        dims.append(rest)
    inner = [member[axis, pre] for axis, pre, _ in picked]
    outer = [d for d in range(len(dims)) if d not in inner]
    rows = ids.reshape(dims).transpose(outer + inner)
    width = math.prod(dims[d] for d in inner)
    return tuple(tuple(int(i) for i in row) for row in rows.reshape(-1, width))


def replica_groups(attributes: dict[str, str], num_devices: int) -> Groups:
    """The groups that a collective's attributes spell.

    Args:
      attributes: of the instruction; a missing or empty ``replica_groups`` means
        one group of all devices.
      num_devices: devices that run the module.
    """
    text = attributes.get("replica_groups", "").strip()
    if text.startswith("mesh["):
        return mesh_groups(text, attributes.get("device_ids", ""))
    rows = iota(text)
    if rows is not None:
        return tuple(tuple(int(i) for i in row) for row in rows)
    listed = tuple(
        tuple(integers(row))
        for row in re.findall(r"\{([\d,\s]*)\}", text)
        if row.strip()
    )
    return listed or (tuple(range(num_devices)),)


def permute_groups(attributes: dict[str, str]) -> Groups:
    """Devices that ``source_target_pairs`` join, directly or by others."""
    pairs = re.findall(r"\{(\d+),(\d+)\}", attributes.get("source_target_pairs", ""))
    joined: list[set[int]] = []
    for pair in pairs:
        merged = {int(device) for device in pair}
        apart = [group for group in joined if not group & merged]
        merged.update(*(group for group in joined if group & merged))
        joined = [*apart, merged]
    return tuple(tuple(sorted(group)) for group in sorted(joined, key=min))
