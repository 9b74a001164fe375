"""Every collective that a compiled program runs, with its bytes and its place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from dmuon_jax.proof.groups import Groups, permute_groups, replica_groups
from dmuon_jax.proof.hlo import Computation, Instruction, Module, parse, total_bytes
from dmuon_jax.proof.loops import trip_count

CHAIN = re.compile(r'chain_id="([^"]*)"')
KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation; a start and its done are one.

    Attributes:
      name: of the instruction (of the start).
      kind: one of `KINDS`.
      num_bytes: size of its buffer on one device and one execution: the larger of
        input and result. That is the result of an all-gather, the input of a
        reduce-scatter, and either for the others.
      group_size: devices that exchange with one another.
      groups: those devices, as positions in the mesh's device order.
      asynchronous: whether other work may run between its start and its done.
      in_loop: whether it runs in the body or condition of a ``while``.
      in_branch: whether it runs in a branch of a ``conditional``.
      times: executions in one run of the program (trip counts multiplied; a loop
        of unknown length counts once).
      computation: name of the computation it stands in.
      op_name: JAX's path of the operation.
    """

    name: str
    kind: str
    num_bytes: int
    group_size: int
    groups: Groups
    asynchronous: bool
    in_loop: bool
    in_branch: bool
    times: int
    computation: str
    op_name: str

    @property
    def run_bytes(self) -> int:
        """Bytes of all executions."""
        return self.num_bytes * self.times

    def __str__(self) -> str:
        place = " in a loop" if self.in_loop else ""
        place += " in a branch" if self.in_branch else ""
        mode = "start/done" if self.asynchronous else "synchronous"
        return (
            f"{self.kind} {self.name} of {self.num_bytes} bytes x {self.times} over "
            f"{self.group_size} devices, {mode}{place} ({self.op_name or 'no op_name'})"
        )


@dataclasses.dataclass(frozen=True)
class Issued:
    """Collectives that one instruction puts on the links.

    Attributes:
      collectives: each with the computation it stands in.
      key: what the matching done is known by (see `awaited`).
      asynchronous: whether there is one.
    """

    collectives: tuple[tuple[Computation, Instruction], ...]
    key: str
    asynchronous: bool


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the call graph a computation runs."""

    computation: Computation
    times: int = 1
    in_loop: bool = False
    in_branch: bool = False


def kind_of(opcode: str) -> str | None:
    """Kind of collective an opcode is or starts, None for others and for dones."""
    kind = opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def kind_in(where: Computation, item: Instruction) -> str:
    """Kind of the collective `item` of computation `where`.

    TPU text has a reduce-scatter as a fusion ``all-reduce-scatter`` of an all-reduce
    and the slice that the device keeps.
    """
    kind = kind_of(item.opcode)
    if kind is None:
        raise ValueError(f"item must be a collective, got {item.opcode}")
    fused = kind == "all-reduce" and where.name.startswith("all-reduce-scatter")
    return "reduce-scatter" if fused else kind


def buffer_bytes(computation: Computation, item: Instruction) -> int:
    """The larger of input and result, whatever the type of a start looks like."""
    read = sum(
        total_bytes(computation.operand_type(item, i))
        for i in range(len(item.operands))
    )
    if not item.opcode.endswith("-start"):
        return max(read, total_bytes(item.type))
    done = [
        other
        for other in computation.instructions
        if other.opcode.endswith("-done") and item.name in other.operands
    ]
    return max([read, *(total_bytes(other.type) for other in done)])


def groups_of(item: Instruction, num_devices: int) -> Groups:
    """Devices that exchange with one another in a collective."""
    if kind_of(item.opcode) == "collective-permute":
        return permute_groups(item.attributes)
    return replica_groups(item.attributes, num_devices)


def is_asynchronous(item: Instruction) -> bool:
    """Whether a start may overlap: GPU text marks some starts synchronous."""
    config = item.attributes.get("backend_config", "")
    return item.opcode.endswith("-start") and '"is_sync":true' not in config


def chain(body: Computation) -> str | None:
    """Name of the chain of TPU fusions that advance one collective together."""
    for item in body.instructions:
        match = CHAIN.search(item.attributes.get("frontend_attributes", ""))
        if match is not None and kind_of(item.opcode) is not None:
            return f"chain {match.group(1)}"
    return None


def targets(body: Computation) -> set[str]:
    """Targets of the custom-calls in a computation."""
    return {item.custom_call_target for item in body.instructions}


def issued(module: Module, where: Computation, item: Instruction) -> Issued | None:
    """What `item` puts on the links, None for all that is no start of a collective.

    A start may be an instruction of its own, a generic ``async-start`` around one or
    several collectives, or (TPU) a fusion that begins a chain. A collective inside
    any other fusion runs with it.
    """
    if kind_of(item.opcode) is not None:
        return Issued(((where, item),), item.name, is_asynchronous(item))
    if item.opcode not in ("fusion", "async-start"):
        return None
    body = module.computations[item.called("calls")[0]]
    inner = tuple((body, part) for part in body.instructions if kind_of(part.opcode))
    if not inner:
        return None
    if item.opcode == "async-start":
        return Issued(inner, item.name, True)
    key = chain(body)
    if key is None:
        return Issued(inner, item.name, False)
    return Issued(inner, key, True) if "AsyncCollectiveStart" in targets(body) else None


def awaited(module: Module, item: Instruction) -> str | None:
    """Key of the collectives that `item` waits for, None where it waits for none."""
    if item.opcode.endswith("-done"):
        return item.operands[0]
    if item.opcode == "fusion":
        body = module.computations[item.called("calls")[0]]
        if "AsyncCollectiveDone" in targets(body):
            return chain(body)
    return None


def places(module: Module, place: Place) -> Iterator[Place]:
    """`place` and all that it calls, once per call site, in text order."""
    yield place
    for item in place.computation.instructions:
        inner = place
        if item.opcode == "while":
            trips = trip_count(module, place.computation, item)
            times = place.times * (1 if trips is None else trips)
            inner = dataclasses.replace(place, in_loop=True, times=times)
        elif item.opcode == "conditional":
            inner = dataclasses.replace(place, in_branch=True)
        elif item.opcode != "call":
            continue
        for name in item.all_called:
            computation = module.computations[name]
            yield from places(
                module, dataclasses.replace(inner, computation=computation)
            )


def described(module: Module, place: Place, launched: Issued) -> Iterator[Collective]:
    """The collectives of one start."""
    for where, item in launched.collectives:
        groups = groups_of(item, module.num_devices)
        yield Collective(
            name=item.name,
            kind=kind_in(where, item),
            num_bytes=buffer_bytes(where, item),
            group_size=max((len(group) for group in groups), default=1),
            groups=groups,
            asynchronous=launched.asynchronous,
            in_loop=place.in_loop,
            in_branch=place.in_branch,
            times=place.times,
            computation=where.name,
            op_name=item.op_name,
        )


def collectives(module_or_text: Module | str) -> tuple[Collective, ...]:
    """All collectives of a program in the order of their text, callers first.

    Args:
      module_or_text: a parsed module or the text of one.
    """
    module = module_or_text
    if isinstance(module, str):
        module = parse(module)
    found: list[Collective] = []
    for place in places(module, Place(module.entry)):
        for item in place.computation.instructions:
            launched = issued(module, place.computation, item)
            if launched is not None:
                found += described(module, place, launched)
    return tuple(found)
