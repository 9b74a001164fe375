"""How often a ``while`` runs its body."""

from __future__ import annotations

import math
import re

from dmuon_jax.proof.hlo import Computation, Instruction, Module

KNOWN = re.compile(r'known_trip_count\\?"?[:=]\{\\?"n\\?":\\?"(\d+)\\?"')


def resolve(where: Computation, name: str) -> Instruction:
    """The instruction `name`, seen through copies and bitcasts."""
    item = where.by_name[name]
    while item.opcode in ("copy", "bitcast", "convert"):
        item = where.by_name[item.operands[0]]
    return item


def constant(where: Computation, name: str) -> int | None:
    """Value of a scalar integer constant, None for anything else."""
    item = resolve(where, name)
    if item.opcode != "constant" or not re.fullmatch(r"-?\d+", item.arguments):
        return None
    return int(item.arguments)


def carried(where: Computation, name: str) -> int | None:
    """Position in the loop's state that the value `name` reads, if it reads one."""
    item = resolve(where, name)
    if item.opcode != "get-tuple-element":
        return None
    if where.by_name[item.operands[0]].opcode != "parameter":
        return None
    return int(item.attributes["index"])


def first_value(where: Computation, loop: Instruction, index: int) -> int | None:
    """Constant with which the loop's state begins at `index`."""
    state = resolve(where, loop.operands[0])
    return constant(where, state.operands[index]) if state.opcode == "tuple" else None


def step(body: Computation, index: int) -> int | None:
    """Constant that the body adds to the state at `index`."""
    if body.root.opcode != "tuple":
        return None
    item = resolve(body, body.root.operands[index])
    if item.opcode != "add" or carried(body, item.operands[0]) != index:
        return None
    return constant(body, item.operands[1])


def counted(module: Module, where: Computation, loop: Instruction) -> int | None:
    """Trips of a loop that counts up to a constant, as ``lax.scan`` does."""
    condition = module.computations[loop.called("condition")[0]]
    test = condition.root
    if test.opcode != "compare" or test.attributes.get("direction") != "LT":
        return None
    index, limit = (
        carried(condition, test.operands[0]),
        constant(condition, test.operands[1]),
    )
    if index is None or limit is None:
        return None
    start = first_value(where, loop, index)
    stride = step(module.computations[loop.called("body")[0]], index)
    if start is None or not stride or stride < 0:
        return None
    return max(0, math.ceil((limit - start) / stride))


def trip_count(module: Module, where: Computation, loop: Instruction) -> int | None:
    """Iterations of a ``while``, None where they cannot be known from the text."""
    match = KNOWN.search(loop.attributes.get("backend_config", ""))
    return int(match.group(1)) if match else counted(module, where, loop)
