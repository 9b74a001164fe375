"""Read the text of an optimized HLO module.

`parse` understands what ``compiled.as_text()`` prints on CPU, GPU and TPU, scheduled
or not: it keeps instructions in text order (the schedule where the module says
``is_scheduled=true``), their result types, operands and attributes. It knows the
form of the text and nothing of what an operation does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}

HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+)\s*(\(.*\) -> .*)?\{\s*$")
INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
COMMENT = re.compile(r"/\*.*?\*/")
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\],]')
REFERENCE = re.compile(r"%([\w.\-]+)")
CALL_KEYS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)


def item_bits(dtype: str) -> int:
    """Bits of one element of an HLO type: 16 for ``bf16``, 8 for ``f8e4m3fn``."""
    if dtype in ITEM_BITS:
        return ITEM_BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    if match is None:
        raise ValueError(f"dtype must be an HLO element type, got {dtype!r}")
    return int(match.group(1))


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array: HLO element type and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding; elements under a byte are packed."""
        return -(-self.size * item_bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Type = Shape | tuple["Type", ...]


def leaves(type_: Type) -> tuple[Shape, ...]:
    """The arrays of a possibly nested tuple type, in order."""
    if isinstance(type_, Shape):
        return (type_,)
    return tuple(shape for part in type_ for shape in leaves(part))


def total_bytes(type_: Type) -> int:
    """Bytes of all arrays of a type."""
    return sum(shape.num_bytes for shape in leaves(type_))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign; unique in its module.
      opcode: for example ``dot``, ``fusion``, ``all-to-all-start``.
      type: result, a `Shape` or a tuple of them.
      operands: names of the operands.
      arguments: what stands between the parentheses (a literal for constants).
      attributes: text of each attribute by key.
      is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    arguments: str
    attributes: dict[str, str]
    is_root: bool

    @property
    def op_name(self) -> str:
        """JAX's path of the operation (``metadata``), empty where there is none."""
        match = re.search(
            r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", "")
        )
        return match.group(1) if match else ""

    @property
    def custom_call_target(self) -> str:
        """Target of a custom-call, else empty."""
        return self.attributes.get("custom_call_target", "").strip('"')

    def called(self, key: str) -> tuple[str, ...]:
        """Names of the computations that attribute `key` refers to."""
        return tuple(REFERENCE.findall(self.attributes.get(key, "")))

    @functools.cached_property
    def branches(self) -> tuple[str, ...]:
        """Branch computations of a ``conditional`` in order of index.

        A two-way conditional lists false first, as index 0.
        """
        if "branch_computations" in self.attributes:
            return self.called("branch_computations")
        return self.called("false_computation") + self.called("true_computation")

    @functools.cached_property
    def all_called(self) -> tuple[str, ...]:
        """Every computation the instruction refers to."""
        return tuple(name for key in CALL_KEYS for name in self.called(key))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions in text order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {item.name: item for item in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        roots = [item for item in self.instructions if item.is_root]
        return roots[-1] if roots else self.instructions[-1]

    def operand_type(self, instruction: Instruction, index: int) -> Type:
        """Result type of the operand at `index`."""
        return self.by_name[instruction.operands[index]].type


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program for one device of `num_devices`."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    is_scheduled: bool
    num_partitions: int
    num_replicas: int

    @property
    def num_devices(self) -> int:
        """Devices that run the program together."""
        return self.num_partitions * self.num_replicas


def split_top(text: str) -> list[str]:
    """Split at commas outside of quotes and brackets."""
    parts, depth, start = [], 0, 0
    for match in TOKEN.finditer(text):
        token = match.group()
        if token in "{([":
            depth += 1
        elif token in "})]":
            depth -= 1
        elif token == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for match in TOKEN.finditer(text, start):
        token = match.group()
        if token in "{([":
            depth += 1
        elif token in "})]":
            depth -= 1
            if depth == 0:
                return match.start()
    raise ValueError(f"brackets must be balanced, got {text[start : start + 80]!r}")


def parse_type(text: str) -> Type:
    """The type that `text` spells, layouts and comments dropped."""
    text = COMMENT.sub("", text).strip()
    if text.startswith("("):
        return tuple(parse_type(part) for part in split_top(text[1:-1]))
    match = ARRAY.match(text)
    if match is None:
        raise ValueError(f"type must be an array or a tuple, got {text[:80]!r}")
    dims = match.group(2).replace("<=", "")
    return Shape(match.group(1), tuple(int(d) for d in dims.split(",") if d.strip()))


def split_type(rest: str) -> tuple[str, str]:
    """Cut ``type opcode(...)...`` after the type."""
    if rest.startswith("("):
        end = closing(rest, 0) + 1
    else:
        match = ARRAY.match(rest)
        if match is None:
            raise ValueError(f"instruction must start with a type, got {rest[:80]!r}")
        end = match.end()
    return rest[:end], rest[end:].strip()


def parse_instruction(line: str) -> Instruction | None:
    """The instruction on `line`, None where there is none."""
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    type_text, rest = split_type(match.group("rest"))
    opening = rest.index("(")
    end = closing(rest, opening)
    arguments = rest[opening + 1 : end]
    attributes = {}
    for part in split_top(rest[end + 1 :]):
        key, _, value = part.partition("=")
        attributes[key] = value
    opcode = rest[:opening].strip()
    operands: tuple[str, ...] = ()
    if opcode not in ("parameter", "constant"):
        operands = tuple(
            part.split()[-1].lstrip("%")
            for part in split_top(COMMENT.sub("", arguments))
        )
    return Instruction(
        name=match.group("name"),
        opcode=opcode,
        type=parse_type(type_text),
        operands=operands,
        arguments=arguments,
        attributes=attributes,
        is_root=match.group("root") is not None,
    )


def header_number(header: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", header)
    return int(match.group(1)) if match else 1


def parse(text: str) -> Module:
    """Read a module.

    Args:
      text: what ``compiled.as_text()`` returns.

    Raises:
      ValueError: `text` is not an HLO module, or has no entry computation.
    """
    start = text.find("HloModule ")
    if start < 0:
        raise ValueError(f"text must hold an HloModule, got {text[:60]!r}")
    lines = text[start:].splitlines()
    header, computations, entry = lines[0], {}, ""
    name, body = "", []
    for line in lines[1:]:
        opened = HEADER.match(line)
        if opened is not None:
            name, body = opened.group("name"), []
            entry = name if opened.group("entry") else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(body))
        elif name:
            instruction = parse_instruction(line)
            if instruction is not None:
                body.append(instruction)
    if not entry:
        raise ValueError("text must hold an ENTRY computation, got none")
    return Module(
        name=header.split()[1].rstrip(","),
        computations=computations,
        entry=computations[entry],
        is_scheduled="is_scheduled=true" in header,
        num_partitions=header_number(header, "num_partitions"),
        num_replicas=header_number(header, "replica_count"),
    )
