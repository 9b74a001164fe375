"""The clock of a step: its operations on two streams, and their sums."""

from __future__ import annotations

import dataclasses


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
      exposed_us: for a collective, what the last device's compute waits for it in one
        execution.
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
    """All events of a step and what they add up to, microseconds.

    Attributes:
      device: name of the device.
      events: of the devices that compute most in branches, in order of time.
      repeats: further iterations of loops.
      step_us: when the last device ends.
    """

    device: str
    events: tuple[Event, ...]
    repeats: tuple[Repeat, ...]
    step_us: float

    def total_us(self, lane: str) -> float:
        """Busy time of one stream."""
        return sum(e.duration_us * e.times for e in self.events if e.lane == lane)

    @property
    def exposed_us(self) -> float:
        """Time the last device's compute waits for communication."""
        return sum(event.exposed_us * event.times for event in self.events)

    @property
    def imbalance_us(self) -> float:
        """Time the devices of `events` wait for others: the rest of the step."""
        return self.step_us - self.total_us("compute") - self.exposed_us

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
