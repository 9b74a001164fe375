"""Bytes of device memory that one operation reads and writes.

An operation reads its operands and writes its result, once each, but only the parts
that it touches: slices of a stack that is sliced, the update of a stack that is
updated in place. So a scan over layers is not charged its whole stack per layer.
"""

from __future__ import annotations

from dmuon_jax.proof.hlo import (
    Computation,
    Instruction,
    Module,
    Type,
    leaves,
    total_bytes,
)

SLICES = frozenset(("dynamic-slice", "slice", "gather"))


def users(computation: Computation, name: str) -> list[Instruction]:
    """Instructions that take `name` as an operand."""
    return [item for item in computation.instructions if name in item.operands]


def read_bytes(computation: Computation, name: str, whole: int) -> int:
    """Bytes read of the value `name`, at most `whole`, inside a fusion."""
    if computation.root.name == name:
        return whole
    read = 0
    for user in users(computation, name):
        first = user.operands[0] == name
        if user.opcode in SLICES and first:
            read += total_bytes(user.type)
        elif user.opcode == "dynamic-update-slice" and first:
            continue
        elif user.opcode in ("bitcast", "convert", "reshape"):
            read += read_bytes(computation, user.name, whole)
        else:
            return whole
    return min(read, whole)


def written_bytes(computation: Computation, item: Instruction) -> int:
    """Bytes that a fusion's root writes."""
    made = item
    while made.opcode in ("bitcast", "convert", "reshape") and made.operands:
        made = computation.by_name[made.operands[0]]
    if made.opcode == "dynamic-update-slice":
        return total_bytes(computation.operand_type(made, 1))
    if made.opcode == "tuple":
        return sum(
            written_bytes(computation, computation.by_name[name])
            for name in made.operands
        )
    return total_bytes(item.type)


def fusion_bytes(module: Module, item: Instruction) -> int:
    """Bytes that a fusion reads and writes."""
    inner = module.computations[item.called("calls")[0]]
    moved = written_bytes(inner, inner.root)
    for parameter in inner.instructions:
        if parameter.opcode == "parameter":
            moved += read_bytes(inner, parameter.name, total_bytes(parameter.type))
    return moved


def memory_bytes(module: Module, where: Computation, item: Instruction) -> int:
    """Bytes read and written by one operation of computation `where`."""
    if item.opcode in ("fusion", "fusion-start"):
        return fusion_bytes(module, item)
    if item.opcode in SLICES:
        return 2 * total_bytes(item.type)
    if item.opcode == "dynamic-update-slice":
        return 2 * total_bytes(where.operand_type(item, 1))
    operands: list[Type] = [
        where.operand_type(item, index)
        for index, name in enumerate(item.operands)
        if name not in item.operands[:index]
    ]
    return total_bytes(item.type) + sum(
        shape.num_bytes for operand in operands for shape in leaves(operand)
    )
