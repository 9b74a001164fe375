"""Matmul FLOPs that one device runs in a compiled program.

A multiplication and an addition are two FLOPs. Counted are ``dot`` (also inside
fusions and calls), ``convolution`` (the form matmuls take on TPU), the library
calls that XLA makes of dots (cuBLAS, oneDNN, Eigen), bodies of loops times their
trip count, the costliest branch of a conditional, and this package's own kernels. Other
custom kernels carry no arithmetic in their text: their FLOPs must be told, or they are
listed as unknown.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from dmuon_jax.proof.hlo import Computation, Instruction, Module, Shape, leaves, parse
from dmuon_jax.proof.loops import trip_count
from dmuon_jax.proof.own_kernels import OWN_KERNELS

LIBRARY_MATMULS = ("__cublas$", "__onednn$matmul", "__hipblas$", "EigenMatMul")
KERNELS = ("triton", "mosaic", "tpu_custom_call", "pallas")


@dataclasses.dataclass(frozen=True)
class Conditional:
    """A ``conditional`` with matmuls: FLOPs of each branch, one execution.

    Attributes:
      name: of the instruction.
      op_name: JAX's path of it.
      times: executions in one run of the program.
      branches: FLOPs of each branch in order of index.
    """

    name: str
    op_name: str
    times: int
    branches: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Flops:
    """Matmul FLOPs of one device.

    Attributes:
      total: with the costliest branch of every conditional.
      conditionals: those whose branches differ or multiply.
      unknown_loops: loops with matmuls and no known trip count; counted once.
      unknown_kernels: custom kernels whose FLOPs were not told; counted as zero.
    """

    total: float
    conditionals: tuple[Conditional, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    unknown_kernels: tuple[str, ...] = ()

    def with_branches(self, weights: Mapping[str, tuple[float, ...]]) -> float:
        """Total with other weights of branches than 1 for the costliest.

        Args:
          weights: for conditionals by name, how often each branch runs per
            execution (a device's indicator, or shares of all devices for a mean).
            Conditionals that are left out keep their costliest branch.
        """
        total = self.total
        for item in self.conditionals:
            if item.name in weights:
                pairs = zip(weights[item.name], item.branches, strict=True)
                mean = sum(weight * flops for weight, flops in pairs)
                total += item.times * (mean - max(item.branches))
        return total


def dims(text: str) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", text)]


def array(computation: Computation, item: Instruction, index: int) -> Shape:
    return leaves(computation.operand_type(item, index))[0]


def dot(computation: Computation, item: Instruction) -> float:
    """FLOPs of a ``dot``: 2 x results x length of the contraction."""
    left = array(computation, item, 0)
    contracted = dims(item.attributes.get("lhs_contracting_dims", ""))
    return 2.0 * leaves(item.type)[0].size * math.prod(left.dims[d] for d in contracted)


def valid_taps(size: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """Pairs of output and kernel positions that meet an input element."""
    stride, low = window["stride"], window["low"]
    spread, gap = window["lhs_dilate"], window["rhs_dilate"]
    count = 0
    for position in range(out):
        for tap in range(kernel):
            at = position * stride + tap * gap - low
            count += 0 <= at <= (size - 1) * spread and at % spread == 0
    return count


def window_of(text: str, index: int) -> dict[str, int]:
    """Stride, low padding and dilations of spatial dimension `index`."""
    fields = dict(re.findall(r"(\w+)=([\dx_\-]+)", text))

    def field(key: str, default: str) -> str:
        return fields[key].split("x")[index] if key in fields else default

    return {
        "stride": int(field("stride", "1")),
        "low": int(field("pad", "0_0").split("_")[0]),
        "lhs_dilate": int(field("lhs_dilate", "1")),
        "rhs_dilate": int(field("rhs_dilate", "1")),
    }


def convolution(computation: Computation, item: Instruction) -> float:
    """FLOPs of a ``convolution`` without what multiplies padding or holes."""
    left, right = array(computation, item, 0), array(computation, item, 1)
    out = leaves(item.type)[0]
    match = re.match(r"(\w+)_(\w+)->(\w+)", item.attributes.get("dim_labels", ""))
    if match is None:
        raise ValueError(f"dim_labels must be set at convolution {item.name}, got none")
    lhs, rhs, res = match.groups()
    window = item.attributes.get("window", "")
    flops = 2.0 * out.dims[res.index("b")] * out.dims[res.index("f")]
    flops *= right.dims[rhs.index("i")]
    for index, label in enumerate(sorted(set(res) - {"b", "f"})):
        flops *= valid_taps(
            left.dims[lhs.index(label)],
            right.dims[rhs.index(label)],
            out.dims[res.index(label)],
            window_of(window, index),
        )
    return flops / int(item.attributes.get("batch_group_count", "1"))


def library_matmul(computation: Computation, item: Instruction) -> float:
    """FLOPs of a library call on operands [..., M, K] and [..., K, N] in any order.

    The length of the contraction follows from the sizes alone: the product of the
    operands' sizes over batch x result size is its square.
    """
    config = item.attributes.get("backend_config", "")
    left, right = array(computation, item, 0), array(computation, item, 1)
    out = leaves(item.type)[0]
    found = re.match(r'{.*"lhs_contracting_dimensions":\[([^\]]*)\]', config)
    if found is not None:
        length = math.prod(left.dims[d] for d in dims(found.group(1)))
    else:
        batch = math.prod(out.dims[:-2])
        length = math.isqrt(left.size * right.size // (out.size * batch))
    return 2.0 * out.size * length


def fused_attention(computation: Computation, item: Instruction) -> float:
    """FLOPs of cuDNN's fused attention on [batch, token, head, channel].

    Forward multiplies twice, backward five times; a causal mask halves both.
    """
    query, key = array(computation, item, 0), array(computation, item, 1)
    batch, queries, heads, channels = query.dims
    masked = '"CAUSAL"' in item.attributes.get("backend_config", "")
    products = 5 if "Backward" in item.custom_call_target else 2
    area = queries * key.dims[1] * (0.5 if masked else 1.0)
    return 2.0 * products * batch * heads * channels * area


def stated_flops(item: Instruction) -> float | None:
    """FLOPs that the author of a custom kernel stated (``pl.CostEstimate``)."""
    match = re.search(
        r'"cost_estimate":\{[^}]*"flops":"?([\d.e+]+)"?',
        item.attributes.get("backend_config", "").replace('\\"', '"'),
    )
    return float(match.group(1)) if match else None


@dataclasses.dataclass
class Counter:
    """Walks a module once and remembers what each computation costs."""

    module: Module
    kernel_flops: Mapping[str, float]
    scope: str = ""
    memo: dict[str, float] = dataclasses.field(default_factory=dict)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)
    unknown_kernels: list[str] = dataclasses.field(default_factory=list)

    def computation(self, name: str) -> float:
        """FLOPs of one execution."""
        if name not in self.memo:
            where = self.module.computations[name]
            self.memo[name] = sum(
                self.instruction(where, item) for item in where.instructions
            )
        return self.memo[name]

    def instruction(self, where: Computation, item: Instruction) -> float:
        """FLOPs of one execution, callees included."""
        if item.opcode in ("dot", "convolution", "custom-call"):
            if self.scope not in item.op_name:
                return 0.0
        if item.opcode == "dot":
            return dot(where, item)
        if item.opcode == "convolution":
            return convolution(where, item)
        if item.opcode == "custom-call":
            return self.custom_call(where, item)
        if item.opcode == "conditional":
            return max(self.branches(item), default=0.0)
        inside = sum(self.computation(name) for name in item.all_called)
        if item.opcode != "while":
            return inside
        trips = trip_count(self.module, where, item)
        if inside and trips is None:
            self.unknown_loops.append(item.name)
        return inside * (1 if trips is None else trips)

    def branches(self, item: Instruction) -> tuple[float, ...]:
        """FLOPs of each branch of a conditional."""
        return tuple(self.computation(name) for name in item.branches)

    def custom_call(self, where: Computation, item: Instruction) -> float:
        """FLOPs of a library call or of a kernel."""
        target = item.custom_call_target
        if target.startswith(LIBRARY_MATMULS):
            return library_matmul(where, item)
        if target.startswith("__cudnn$fmha"):
            return fused_attention(where, item)
        inside = sum(self.computation(name) for name in item.all_called)
        if inside or not any(key in target.lower() for key in KERNELS):
            return inside
        for key, value in self.kernel_flops.items():
            if key in item.op_name or key in item.name:
                return value
        for key, count in OWN_KERNELS.items():
            if key in item.op_name:
                types = [where.operand_type(item, i) for i in range(len(item.operands))]
                operands = [shape for type_ in types for shape in leaves(type_)]
                return count(operands, leaves(item.type)[0])
        stated = stated_flops(item)
        if stated is None:
            self.unknown_kernels.append(item.name)
        return stated or 0.0


def conditionals(counter: Counter, name: str, times: int) -> list[Conditional]:
    """Conditionals with matmuls below computation `name`, outermost only."""
    found = []
    where = counter.module.computations[name]
    for item in where.instructions:
        if item.opcode == "conditional":
            branches = counter.branches(item)
            if any(branches):
                found.append(Conditional(item.name, item.op_name, times, branches))
        elif item.opcode in ("while", "call", "async-start"):
            trips = (
                trip_count(counter.module, where, item) if item.opcode == "while" else 1
            )
            for called in item.all_called:
                found += conditionals(counter, called, times * (trips or 1))
    return found


def dot_flops(
    module_or_text: Module | str,
    *,
    kernel_flops: Mapping[str, float] | None = None,
    scope: str = "",
) -> Flops:
    """Matmul FLOPs of one device.

    Args:
      module_or_text: a parsed module or the text of one.
      kernel_flops: FLOPs of one call of custom kernels, by a part of their
        ``op_name`` or instruction name; the first part that fits counts.
      scope: count only operations whose ``op_name`` holds this.
    """
    module = module_or_text
    if isinstance(module, str):
        module = parse(module)
    counter = Counter(module, kernel_flops or {}, scope)
    total = counter.computation(module.entry.name)
    return Flops(
        total=total,
        conditionals=tuple(conditionals(counter, module.entry.name, 1)),
        unknown_loops=tuple(counter.unknown_loops),
        unknown_kernels=tuple(counter.unknown_kernels),
    )
