"""Time of one operation on one device, from its rates and links."""

from __future__ import annotations

from typing import NamedTuple

from dmuon_jax.planning.devices import Device
from dmuon_jax.proof.groups import Groups
from dmuon_jax.proof.hlo import Computation, Instruction, Module, item_bits, leaves


class Operands(NamedTuple):
    """Bytes of an element of a matmul's operands; whether fp32 is kept in full."""

    itemsize: int = 2
    precise: bool = False


def matmul_operands(module: Module, where: Computation, item: Instruction) -> Operands:
    """Operands of the widest matmul in an operation."""
    found = [Operands(0)]
    if item.opcode in ("dot", "convolution", "custom-call"):
        shapes = [
            shape
            for index in range(len(item.operands))
            for shape in leaves(where.operand_type(item, index))
        ]
        bits = item_bits(max(shapes, key=lambda shape: shape.size).dtype)
        precise = "highest" in item.attributes.get("operand_precision", "")
        found.append(Operands(bits // 8, precise))
    for name in item.all_called:
        inner = module.computations[name]
        found += [matmul_operands(module, inner, part) for part in inner.instructions]
    return max(found)


def compute_us(
    device: Device, flops: float, num_bytes: int, operands: Operands
) -> float:
    """Launch, and the longer of matmuls and memory traffic."""
    return device.kernel_latency_us + max(
        device.matmul_us(flops, operands.itemsize, operands.precise),
        device.stream_us(num_bytes),
    )


def collective_us(device: Device, kind: str, num_bytes: int, groups: Groups) -> float:
    """Duration of one collective.

    A group with `m` members on each of `n` nodes moves, per device and in ring or
    pairwise order, ``(g-1)/g`` of the buffer inside a node, and between nodes
    ``(n-1)/n`` of it over the `m` network cards of a node for gathers and
    reductions, or the ``(g-m)/g`` that is meant for other nodes for all-to-alls. An
    all-reduce is a reduce-scatter and an all-gather.
    """
    group = max(groups, key=len, default=())
    size = len(group)
    if size < 2:
        return device.kernel_latency_us
    homes = [member // device.devices_per_node for member in group]
    nodes = len(set(homes))
    together = max(homes.count(home) for home in set(homes))
    if kind in ("all-to-all", "ragged-all-to-all"):
        inside, outside = (together - 1) / size, (size - together) / size
    elif kind == "collective-permute":
        inside, outside = float(nodes == 1), float(nodes > 1)
    else:
        inside, outside = (size - 1) / size, (nodes - 1) / nodes / together
    passes = 2 if kind == "all-reduce" else 1
    sent = max(
        device.send_us(passes * inside * num_bytes, False),
        device.send_us(passes * outside * num_bytes, True),
    )
    return device.latency_us(nodes > 1) + sent
