"""What a compiled step does: collectives, matmul FLOPs, memory and time in a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import jax

from dmuon_jax.planning.devices import Device, device_named
from dmuon_jax.planning.plan import Plan
from dmuon_jax.proof.checks import AuditError, over_count, over_ratio
from dmuon_jax.proof.collective import Collective, collectives
from dmuon_jax.proof.expected import expect, halved_buckets, told_branches, weights
from dmuon_jax.proof.flops import Flops, dot_flops
from dmuon_jax.proof.program import Memory, read_program
from dmuon_jax.proof.report import table
from dmuon_jax.proof.streams import simulate_streams
from dmuon_jax.proof.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Audit:
    """What one device of a compiled program does in one run.

    Attributes:
      name: of the module.
      num_devices: devices that run it together.
      collectives: all of them, a start and its done as one.
      flops: matmul FLOPs of the whole program.
      scope: part of ``op_name`` that marks the update's operations, may be empty.
      scope_flops: matmul FLOPs of the operations in `scope`.
      scope_mean_flops: the same with the given weights of branches.
      ideal_flops: FLOPs per device if no work were repeated, None if not told.
      plan_bytes: bytes of the plan's exchange, None without a plan.
      memory: None where only text was given.
      timeline: None where no device was given.
    """

    name: str
    num_devices: int
    collectives: tuple[Collective, ...]
    flops: Flops
    scope: str
    scope_flops: float
    scope_mean_flops: float
    ideal_flops: float | None
    plan_bytes: int | None
    memory: Memory | None
    timeline: Timeline | None

    @property
    def dot_flops(self) -> float:
        """Matmul FLOPs of one device, costliest branches."""
        return self.flops.total

    @property
    def collective_bytes(self) -> int:
        """Bytes of all collectives of one device, each execution counted."""
        return sum(item.run_bytes for item in self.collectives)

    @property
    def collectives_in_loops(self) -> tuple[Collective, ...]:
        """The collectives that run inside a ``while``."""
        return tuple(item for item in self.collectives if item.in_loop)

    @property
    def synchronous(self) -> tuple[Collective, ...]:
        """The collectives that no other work can hide."""
        return tuple(item for item in self.collectives if not item.asynchronous)

    @property
    def peak_bytes(self) -> int | None:
        """Device memory of one device, None where only text was given."""
        return None if self.memory is None else self.memory.peak_bytes

    @property
    def redundancy(self) -> float | None:
        """FLOPs that a device runs in `scope` over `ideal_flops`."""
        if self.ideal_flops is None:
            return None
        return self.scope_mean_flops / self.ideal_flops

    @property
    def scope_bytes(self) -> int:
        """Bytes of the collectives in `scope`."""
        return sum(item.run_bytes for item in self.in_scope(self.scope))

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes of the collectives in `scope` over those of the plan's exchange."""
        if self.plan_bytes is None:
            return None
        return self.scope_bytes / max(self.plan_bytes, 1)

    @property
    def step_us(self) -> float | None:
        """Model time of one run."""
        return None if self.timeline is None else self.timeline.step_us

    @property
    def exposed_us(self) -> float | None:
        """Model time that the last device's compute waits for communication."""
        return None if self.timeline is None else self.timeline.exposed_us

    @property
    def imbalance_us(self) -> float | None:
        """Model time that the devices that compute most in branches wait for others."""
        return None if self.timeline is None else self.timeline.imbalance_us

    @property
    def exposed_fraction(self) -> float | None:
        """Share of the model's step that compute waits for communication."""
        if self.timeline is None:
            return None
        return self.timeline.exposed_us / max(self.timeline.step_us, 1e-9)

    def in_scope(self, part: str) -> tuple[Collective, ...]:
        """Collectives whose ``op_name`` holds `part`."""
        return tuple(item for item in self.collectives if part in item.op_name)

    def check(
        self,
        *,
        redundancy: float | None = None,
        collectives_in_loops: int | None = 0,
        exposed_fraction: float | None = None,
        bytes_ratio: float | None = None,
        synchronous: int | None = None,
    ) -> Audit:
        """Raise if the program does more than allowed; return the audit.

        Args:
          redundancy: largest FLOPs in scope over `ideal_flops`.
          collectives_in_loops: most collectives inside loops.
          exposed_fraction: largest share of the step that compute waits.
          bytes_ratio: largest bytes of collectives in scope over the plan's exchange.
          synchronous: most collectives without a start and a done.

        Raises:
          AuditError: naming the operations that break a limit.
          ValueError: a limit was given on what this audit does not know.
        """
        if redundancy is not None and not self.scope_flops:
            raise ValueError(f"scope must hold matmuls, got none in {self.scope!r}")
        failures = [
            *over_ratio(
                "redundancy", self.redundancy, redundancy, self.flop_offenders()
            ),
            *over_count(
                "collectives_in_loops", self.collectives_in_loops, collectives_in_loops
            ),
            *over_ratio(
                "exposed_fraction",
                self.exposed_fraction,
                exposed_fraction,
                self.exposed_offenders(),
            ),
            *over_ratio(
                "bytes_ratio",
                self.bytes_ratio,
                bytes_ratio,
                self.bytes_offenders(),
            ),
            *over_count("synchronous", self.synchronous, synchronous),
        ]
        if failures:
            raise AuditError("\n".join([f"audit of {self.name}:", *failures]))
        return self

    def flop_offenders(self) -> tuple[str, ...]:
        """What to look at when FLOPs are too many."""
        return tuple(
            f"conditional {item.name} with branches of "
            f"{', '.join(f'{flops:.3g}' for flops in item.branches)} FLOPs"
            for item in self.flops.conditionals
        )

    def bytes_offenders(self) -> tuple[Collective, ...]:
        """The collectives in scope, those that move most first."""
        return tuple(sorted(self.in_scope(self.scope), key=lambda c: -c.run_bytes))

    def exposed_offenders(self) -> tuple[str, ...]:
        """The collectives that compute waits for, longest first."""
        events = self.timeline.events if self.timeline else ()
        waited = sorted(events, key=lambda event: -event.exposed_us * event.times)
        return tuple(
            f"{event.kind} {event.name}: {event.exposed_us:.1f} us x {event.times} "
            f"({event.op_name or 'no op_name'})"
            for event in waited
            if event.exposed_us > 0
        )

    def summary(self) -> str:
        """Tables in plain text."""
        return table(self)

    def to_json(self) -> str:
        """The audit as JSON text, without device groups and single events."""
        record = {
            "name": self.name,
            "num_devices": self.num_devices,
            "collective_bytes": self.collective_bytes,
            "dot_flops": self.dot_flops,
            "scope": self.scope,
            "scope_flops": self.scope_flops,
            "ideal_flops": self.ideal_flops,
            "redundancy": self.redundancy,
            "bytes_ratio": self.bytes_ratio,
            "peak_bytes": self.peak_bytes,
            "memory": None if self.memory is None else dataclasses.asdict(self.memory),
            "step_us": self.step_us,
            "exposed_us": self.exposed_us,
            "imbalance_us": self.imbalance_us,
            "device": None if self.timeline is None else self.timeline.device,
            "unknown_loops": self.flops.unknown_loops,
            "unknown_kernels": self.flops.unknown_kernels,
            "conditionals": [dataclasses.asdict(c) for c in self.flops.conditionals],
            "collectives": [
                {k: v for k, v in vars(item).items() if k != "groups"}
                for item in self.collectives
            ],
        }
        return json.dumps(record, indent=1)


def audit(
    program: jax.stages.Compiled | jax.stages.Lowered | str,
    *,
    plan: Plan | None = None,
    device: Device | str | None = None,
    scope: str = "",
    ideal_flops: float | None = None,
    kernel_flops: Mapping[str, float] | None = None,
    branch_weights: Mapping[str, tuple[float, ...]] | None = None,
) -> Audit:
    """Read a compiled program and say what one device does in it.

    Args:
      program: ``jitted.lower(...)``, its ``.compile()``, or text of optimized HLO.
      plan: of the update in the program; gives `ideal_flops` (of five steps), the bytes
        of the exchange, and what each device runs of the conditionals of its buckets, for
        `branch_weights` and the model of time.
      device: an entry of `DEVICES` or its name, for the model of time.
      scope: part of ``op_name`` that marks the orthogonalization; the redundancy
        compares its FLOPs only. Empty means the whole program.
      ideal_flops: FLOPs per device if no matrix were orthogonalized twice.
      kernel_flops: FLOPs of one call of custom kernels by part of their name.
      branch_weights: how often each branch of a conditional runs on a mean device,
        by name of conditional; others count their costliest branch.

    Raises:
      TypeError: `program` is none of the three.
      ValueError: the text is no HLO module, `device` is unknown, or `plan` is another
        program's.
    """
    module, memory = read_program(program)
    scoped = dot_flops(module, kernel_flops=kernel_flops, scope=scope)
    told = {} if plan is None else told_branches(module, plan)
    shares = {**weights(scoped.conditionals, told), **(branch_weights or {})}
    expected = None if plan is None else expect(plan, halved=halved_buckets(module))
    if expected is not None and ideal_flops is None:
        ideal_flops = expected.ideal_flops
    timeline = None
    if device is not None:
        device = device_named(device) if isinstance(device, str) else device
        timeline = simulate_streams(
            module, device, kernel_flops=kernel_flops, branches=told
        )
    return Audit(
        name=module.name,
        num_devices=module.num_devices,
        collectives=collectives(module),
        flops=dot_flops(module, kernel_flops=kernel_flops),
        scope=scope,
        scope_flops=scoped.total,
        scope_mean_flops=scoped.with_branches(shares),
        ideal_flops=ideal_flops,
        plan_bytes=None if expected is None else expected.exchange_bytes,
        memory=memory,
        timeline=timeline,
    )
