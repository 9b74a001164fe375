"""Time of a scheduled program on two streams, one of compute, one of communication.

The program is followed in schedule order. An operation takes its launch time plus
the larger of its matmul time and its memory time; a collective takes its start-up
time plus its bytes over the link, begins when both its turn and its start have come,
and makes the compute stream wait at its done (at once where it is synchronous). All
rates come from the `Device`. What the compute stream waits is *exposed*.

Devices differ in the branches that they run where those are told; devices with equal
branches are a *class*, and each class has its own compute clock. A collective begins
when the last class has come to it, whatever its groups, and what the last class waits
for it is exposed; what another class waits beyond that is *imbalance*. Of other
conditionals, and of those whose branches hold collectives, the slowest branch runs.

Loops run their body once, in full, and repeat it (where classes wait in it for those
that began it late, a second run gives the length to repeat). Copies to and from host memory and
the host's wait for a conditional's predicate take no time here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

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
from dmuon_jax.proof.timeline import Event, Repeat, Timeline
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


@dataclasses.dataclass
class Pending:
    """What one start put on the communication stream, and what ran since."""

    events: list[Event] = dataclasses.field(default_factory=list)
    hidden_by: list[str] = dataclasses.field(default_factory=list)


class Simulator:
    """Follows one module; the clocks are `now_us`, of each class, and `link_free_us`.

    Events are those of the first class. `classes` has, by name of conditional, the branch
    that each class runs, int ``[classes]``.
    """

    def __init__(
        self, counter: Counter, device: Device, classes: Mapping[str, np.ndarray]
    ):
        self.counter = counter
        self.module = counter.module
        self.device = device
        self.classes = classes
        self.now_us = np.zeros(max(map(len, classes.values()), default=1))
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
        start_us = float(self.now_us[0])
        event = Event(
            name=item.name,
            kind=item.opcode,
            lane="compute",
            start_us=start_us,
            end_us=start_us + duration_us,
            times=self.times,
            flops=flops,
            num_bytes=num_bytes,
            op_name=item.op_name,
        )
        self.events.append(event)
        self.now_us = self.now_us + duration_us
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
        start_us = max(self.last_us, self.link_free_us)
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
        """Let the compute streams wait for what `start` issued."""
        for pending in filter(None, [self.pending.pop(start, None)]):
            for event in pending.events:
                exposed_us = max(0.0, event.end_us - self.last_us)
                self.now_us = np.maximum(self.now_us, event.end_us)
                hidden_by = tuple(pending.hidden_by)
                self.events.append(
                    dataclasses.replace(
                        event, exposed_us=exposed_us, hidden_by=hidden_by
                    )
                )

    @property
    def last_us(self) -> float:
        """The clock of the last class."""
        return float(self.now_us.max())

    def loop(self, where: Computation, item: Instruction) -> None:
        """Run the body once and repeat its length."""
        trips = trip_count(self.module, where, item) or 1
        outer_times, start_us, link_us = self.times, self.now_us, self.link_free_us
        self.times = outer_times * trips
        self.body(item)
        self.times = outer_times
        once_us = self.now_us - start_us
        if self.link_free_us > link_us:
            once_us = self.steady_us(item, once_us)
            self.link_free_us += (trips - 1) * float(once_us.max())
        end_us = self.now_us + (trips - 1) * once_us
        shown_us = float(self.now_us[0]), float(end_us[0])
        self.repeats.append(Repeat(item.name, *shown_us, trips - 1))
        self.now_us = end_us

    def body(self, item: Instruction) -> None:
        """One iteration of a loop."""
        for name in item.called("body"):
            self.run(self.module.computations[name])

    def steady_us(self, item: Instruction, once_us: np.ndarray) -> np.ndarray:
        """What one more iteration of a loop takes each class, given the one before.

        Where that was not the same for all, classes waited for those that began it late.
        """
        if (once_us == once_us[0]).all():
            return once_us
        other = copy.copy(self)
        other.events, other.repeats, other.pending = [], [], {}
        other.body(item)
        return other.now_us - self.now_us

    def conditional(self, item: Instruction) -> None:
        """Run each class's branch where it is told, else the slowest."""
        alone = [self.alone(name) for name in item.branches]
        lengths_us = self.lengths_us(item, alone)
        if lengths_us is None:
            chosen = max(range(len(alone)), key=lambda index: alone[index].last_us)
            self.run(self.module.computations[item.branches[chosen]])
            return
        chosen = int(self.classes[item.name][0])
        self.run(self.module.computations[item.branches[chosen]])
        self.now_us = self.now_us + (lengths_us - lengths_us[0])

    def alone(self, name: str) -> Simulator:
        """A computation followed on its own."""
        fresh = Simulator(self.counter, self.device, self.classes)
        fresh.run(self.module.computations[name])
        return fresh

    def lengths_us(
        self, item: Instruction, alone: Sequence[Simulator]
    ) -> np.ndarray | None:
        """What its branch of a conditional takes each class, None where that is not told.

        Args:
          item: the conditional.
          alone: its branches, followed on their own.
        """
        if item.name not in self.classes or any(x.link_free_us for x in alone):
            return None
        branch_us = np.stack([x.now_us for x in alone])
        return branch_us[self.classes[item.name], np.arange(len(self.now_us))]


def classes_of(branches: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """The distinct combinations of branches, by conditional, of those of each device."""
    if not branches:
        return {}
    distinct = np.unique(np.array(list(branches.values())), axis=1)
    return dict(zip(branches, distinct, strict=True))


def by_work(simulator: Simulator) -> np.ndarray:
    """Positions of the classes, those that compute longest in branches first."""
    work_us = np.zeros_like(simulator.now_us)
    for computation in simulator.module.computations.values():
        for item in computation.instructions:
            if item.name in simulator.classes:
                alone = [simulator.alone(name) for name in item.branches]
                lengths_us = simulator.lengths_us(item, alone)
                work_us += 0.0 if lengths_us is None else lengths_us
    return np.argsort(-work_us, kind="stable")


def simulate_streams(
    module: Module,
    device: Device,
    *,
    kernel_flops: Mapping[str, float] | None = None,
    branches: Mapping[str, Sequence[int]] | None = None,
) -> Timeline:
    """Follow a scheduled module on `device`.

    Args:
      module: parsed text; its order is taken for the schedule.
      device: rates and links.
      kernel_flops: FLOPs of one call of custom kernels by part of their name.
      branches: the branch that each device runs, by name of conditional, the devices in
        one order for all; others run their slowest branch.
    """
    counter = Counter(module, kernel_flops or {})
    classes = classes_of(branches or {})
    order = by_work(Simulator(counter, device, classes))
    classes = {name: numbers[order] for name, numbers in classes.items()}
    simulator = Simulator(counter, device, classes)
    simulator.run(module.entry)
    for start in tuple(simulator.pending):
        simulator.wait(start)
    return Timeline(
        device=device.name,
        events=tuple(sorted(simulator.events, key=lambda event: event.start_us)),
        repeats=tuple(simulator.repeats),
        step_us=simulator.last_us,
    )
