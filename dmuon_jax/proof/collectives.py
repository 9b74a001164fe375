"""Every collective that a compiled program runs, with its bytes and its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dmuon_jax.proof.groups import Groups, permute_groups, replica_groups
from dmuon_jax.proof.hlo import Computation, Instruction, Module, parse, total_bytes

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
class Place:
    """Where in the call graph a computation runs."""

    computation: Computation
    times: int = 1
    in_loop: bool = False
    in_branch: bool = False
    asynchronous: bool = False


def places(module: Module, place: Place) -> Iterator[Place]:
    """`place` and all that it calls, once per call site, in text order."""
    yield place
    for item in place.computation.instructions:
        if item.opcode == "fusion" or not item.all_called:
            continue
        inner = place
        if item.opcode == "while":
            times = place.times * (item.trip_count or 1)
            inner = dataclasses.replace(place, in_loop=True, times=times)
        elif item.opcode == "conditional":
            inner = dataclasses.replace(place, in_branch=True)
        elif item.opcode == "async-start":
            inner = dataclasses.replace(place, asynchronous=True)
        elif item.opcode != "call":
            continue
        for name in item.all_called:
            computation = module.computations[name]
            yield from places(module, dataclasses.replace(inner, computation=computation))


def kind_of(opcode: str) -> str | None:
    """Kind of collective an opcode is or starts, None for others and for dones."""
    kind = opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def buffer_bytes(computation: Computation, item: Instruction) -> int:
    """The larger of input and result, whatever the type of a start looks like."""
    read = sum(
        total_bytes(computation.operand_type(item, i)) for i in range(len(item.operands))
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


def collectives(module_or_text: Module | str) -> tuple[Collective, ...]:
    """All collectives of a program in the order of their text, callers first.

    Args:
      module_or_text: a parsed module or the text of one.
    """
    module = module_or_text
    if isinstance(module, str):
        module = parse(module)
    found = []
    for place in places(module, Place(module.entry)):
        for item in place.computation.instructions:
            kind = kind_of(item.opcode)
            if kind is None:
                continue
            groups = groups_of(item, module.num_devices)
            found.append(
                Collective(
                    name=item.name,
                    kind=kind,
                    num_bytes=buffer_bytes(place.computation, item),
                    group_size=max((len(group) for group in groups), default=1),
                    groups=groups,
                    asynchronous=place.asynchronous or is_asynchronous(item),
                    in_loop=place.in_loop,
                    in_branch=place.in_branch,
                    times=place.times,
                    computation=place.computation.name,
                    op_name=item.op_name,
                )
            )
    return tuple(found)
