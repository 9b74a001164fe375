"""Time of a scheduled program on two streams, one of compute, one of communication.

The program is followed in schedule order. An operation takes its launch time plus
the larger of its matmul time and its memory time; a collective takes its start-up
time plus its bytes over the link, begins when both its turn and its start have come,
and makes the compute stream wait at its done (at once where it is synchronous). All
rates come from the `Device`. What the compute stream waits is *exposed*.

Loops run their body once, in full, and repeat it; of a conditional the slowest
branch runs unless told otherwise. Copies to and from host memory and the host's
wait for a conditional's predicate take no time here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dmuon_jax.planning.devices import Device
from dmuon_jax.proof.collective import (
    Issued,
    awaited,
    buffer_bytes,
    groups_of,
    issued,
    kind_in,
)
from dmuon_jax.proof.costs import Operands, collective_us, compute_us, matmul_operands
from dmuon_jax.proof.flops import Counter
from dmuon_jax.proof.hlo import Computation, Instruction, Module
from dmuon_jax.proof.loops import trip_count
from dmuon_jax.proof.traffic import memory_bytes

FREE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "partition-id",
        "replica-id",
        "after-all",
        "opt-barrier",
        "add-dependency",
        "domain",
        "get-dimension-size",
        "copy-start",
        "copy-done",
        "send",
        "send-done",
        "recv",
        "recv-done",
    )
)


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation on its stream.

    Attributes:
      name: of the instruction.
      kind: its opcode, or the kind of collective.
      lane: "compute" or "communication".
      start_us: when it begins; in a loop, in the first iteration.
      end_us: when it ends.
      times: how often it runs (loops).
      flops: matmul FLOPs of one execution.
      num_bytes: memory traffic, or the buffer of a collective.
      exposed_us: for a collective, what compute waits for it in one execution.
      hidden_by: names of the compute operations between its start and its done.
      op_name: JAX's path of the operation.
    """

    name: str
    kind: str
    lane: str
    start_us: float
    end_us: float
    times: int = 1
    flops: float = 0.0
    num_bytes: int = 0
    exposed_us: float = 0.0
    hidden_by: tuple[str, ...] = ()
    op_name: str = ""

    @property
    def duration_us(self) -> float:
        """Length of one execution."""
        return self.end_us - self.start_us


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The further iterations of a loop, whose first one is in the events."""

    name: str
    start_us: float
    end_us: float
    times: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All events of a step and what they add up to, microseconds."""

    device: str
    events: tuple[Event, ...]
    repeats: tuple[Repeat, ...]
    step_us: float

    def total_us(self, lane: str) -> float:
        """Busy time of one stream."""
        return sum(e.duration_us * e.times for e in self.events if e.lane == lane)

    @property
    def exposed_us(self) -> float:
        """Time compute waits for communication."""
        return sum(event.exposed_us * event.times for event in self.events)

    def exposed_share(self, part: str = "") -> float:
        """Share of the time of collectives whose ``op_name`` holds `part` that is exposed.

        Zero where there are none. A collective that waits for its turn behind another
        may be exposed for longer than it lasts.
        """
        chosen = [
            event
            for event in self.events
            if event.lane == "communication" and part in event.op_name
        ]
        total_us = sum(event.duration_us * event.times for event in chosen)
        exposed_us = sum(event.exposed_us * event.times for event in chosen)
        return exposed_us / total_us if total_us else 0.0


@dataclasses.dataclass
class Pending:
    """What one start put on the communication stream, and what ran since."""

    events: list[Event] = dataclasses.field(default_factory=list)
    hidden_by: list[str] = dataclasses.field(default_factory=list)


class Simulator:
    """Follows one module; the two clocks are `now_us` and `link_free_us`."""

    def __init__(self, counter: Counter, device: Device, branches: Mapping[str, int]):
        self.counter = counter
        self.module = counter.module
        self.device = device
        self.branches = branches
        self.now_us = 0.0
        self.link_free_us = 0.0
        self.times = 1
        self.events: list[Event] = []
        self.repeats: list[Repeat] = []
        self.pending: dict[str, Pending] = {}

    def run(self, computation: Computation) -> None:
        """Follow every instruction of `computation`."""
        for item in computation.instructions:
            if item.opcode in FREE:
                continue
            launched = issued(self.module, computation, item)
            start = awaited(self.module, item)
            if launched:
                self.launch(launched)
            elif start is not None:
                self.wait(start)
            elif item.opcode == "while":
                self.loop(computation, item)
            elif item.opcode == "conditional":
                self.conditional(item)
            elif item.opcode == "call":
                for name in item.all_called:
                    self.run(self.module.computations[name])
            elif item.opcode != "async-update":
                self.compute(computation, item)

    def compute(self, where: Computation, item: Instruction) -> None:
        """One operation on the compute stream."""
        flops = self.counter.instruction(where, item)
        num_bytes = memory_bytes(self.module, where, item)
        operands = matmul_operands(self.module, where, item) if flops else Operands()
        duration_us = compute_us(self.device, flops, num_bytes, operands)
        event = Event(
            name=item.name,
            kind=item.opcode,
            lane="compute",
            start_us=self.now_us,
            end_us=self.now_us + duration_us,
            times=self.times,
            flops=flops,
            num_bytes=num_bytes,
            op_name=item.op_name,
        )
        self.events.append(event)
        self.now_us = event.end_us
        for pending in self.pending.values():
            pending.hidden_by.append(item.name)

    def launch(self, launched: Issued) -> None:
        """Issue collectives; wait for them at once if they are synchronous."""
        for where, inner in launched.collectives:
            self.issue(where, inner, launched.key)
        if not launched.asynchronous:
            self.wait(launched.key)

    def issue(self, where: Computation, item: Instruction, key: str) -> None:
        """Put a collective on the communication stream; its done will name `key`."""
        kind = kind_in(where, item)
        groups = groups_of(item, self.module.num_devices)
        num_bytes = buffer_bytes(where, item)
        start_us = max(self.now_us, self.link_free_us)
        end_us = start_us + collective_us(self.device, kind, num_bytes, groups)
        event = Event(
            name=item.name,
            kind=kind,
            lane="communication",
            start_us=start_us,
            end_us=end_us,
            times=self.times,
            num_bytes=num_bytes,
            op_name=item.op_name,
        )
        self.link_free_us = end_us
        self.pending.setdefault(key, Pending()).events.append(event)

    def wait(self, start: str) -> None:
        """Let the compute stream wait for what `start` issued."""
        for pending in filter(None, [self.pending.pop(start, None)]):
            for event in pending.events:
                exposed_us = max(0.0, event.end_us - self.now_us)
                self.now_us += exposed_us
                hidden_by = tuple(pending.hidden_by)
                self.events.append(
                    dataclasses.replace(
                        event, exposed_us=exposed_us, hidden_by=hidden_by
                    )
                )

    def loop(self, where: Computation, item: Instruction) -> None:
        """Run the body once and repeat its length."""
        trips = trip_count(self.module, where, item) or 1
        outer_times, start_us = self.times, self.now_us
        self.times = outer_times * trips
        for name in item.called("body"):
            self.run(self.module.computations[name])
        self.times = outer_times
        rest_us = (trips - 1) * (self.now_us - start_us)
        end_us = self.now_us + rest_us
        self.repeats.append(Repeat(item.name, self.now_us, end_us, trips - 1))
        self.now_us = end_us
        self.link_free_us += rest_us

    def conditional(self, item: Instruction) -> None:
        """Run the branch that is told, else the slowest."""
        if item.name in self.branches:
            chosen = item.branches[self.branches[item.name]]
        else:
            chosen = max(item.branches, key=self.alone_us)
        self.run(self.module.computations[chosen])

    def alone_us(self, name: str) -> float:
        """Length of a computation that runs alone."""
        fresh = Simulator(self.counter, self.device, self.branches)
        fresh.run(self.module.computations[name])
        return fresh.now_us


def simulate_streams(
    module: Module,
    device: Device,
    *,
    kernel_flops: Mapping[str, float] | None = None,
    branches: Mapping[str, int] | None = None,
) -> Timeline:
    """Follow a scheduled module on `device`.

    Args:
      module: parsed text; its order is taken for the schedule.
      device: rates and links.
      kernel_flops: FLOPs of one call of custom kernels by part of their name.
      branches: branch that runs, by name of conditional; others run the slowest.
    """
    counter = Counter(module, kernel_flops or {})
    simulator = Simulator(counter, device, branches or {})
    simulator.run(module.entry)
    for start in tuple(simulator.pending):
        simulator.wait(start)
    return Timeline(
        device=device.name,
        events=tuple(sorted(simulator.events, key=lambda event: event.start_us)),
        repeats=tuple(simulator.repeats),
        step_us=simulator.now_us,
    )
