"""The order of the exchange: which slots travel and are iterated together, and when.

A device has a link and a compute stream. Slots are packed (with the momentum's update),
sent to owners, iterated, sent back and applied in waves, one after another; while one wave
is iterated, the link carries the next one in and the last one back. The packing of later
waves covers the first arrival, the applying of earlier ones the last return. What remains
exposed is where the link takes longer than the work beside it. So the first and the last
wave should be small and what is between large; a group with several slots can be divided
among waves. Every further collective costs its start-up time, and every divided batch what
its matrices gain from being iterated together, so few waves are best.

`pipeline_us` is the clock of such a schedule, `choose_waves` a local search over schedules.
One wave, the plan without this module, is where it starts: it is never worse than that.
The program does not enforce the order: waves are independent of each other in it, and XLA's
scheduler interleaves them. In a step of qwen2.5-1.5b compiled for 8 H200 that hid all of
the exchange; with data dependencies from wave to wave, of several kinds, 16 to 55 % of it
stayed exposed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dmuon_jax.planning.devices import Rates
from dmuon_jax.planning.groups import Group, Part
from dmuon_jax.planning.problem import CostModel, Method, Shape

Wave = dict[int, int]
"""Slots of each group in a wave."""

MAX_WAVES = 8

GAIN = 5e-3
"""Share of the time that a change must save: each makes the program longer."""

PACK_BYTES = 14
"""Memory traffic of an element on its way out: float32 gradient and momentum read, momentum
and a 16-bit block written."""

APPLY_BYTES = 10
"""The same on its way back: a 16-bit block and a float32 parameter read, one written."""


class Times(NamedTuple):
    """Microseconds of a wave: packed, sent in, iterated, sent back, applied."""

    pack: float
    inward: float
    work: float
    back: float
    apply: float


@dataclasses.dataclass(frozen=True)
class Load:
    """An exchange group, as the order sees it.

    Attributes:
      slots: slots of every owner.
      buffer: groups with one number share a buffer, whose rows are as long as the longest
        of theirs.
      in_us: time on the link of one slot on its way to the owner.
      out_us: the same on its way back.
      elements: local elements of the momentum and of the parameter, by slot.
      matrices: oriented shapes of the matrices of one slot.
    """

    slots: int
    buffer: int
    in_us: float
    out_us: float
    elements: tuple[float, float]
    matrices: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True)
class Clock:
    """What the order of loads costs.

    Attributes:
      loads: the exchange groups.
      cost: times of batches of matrices.
      methods: the method of each shape.
      rates: start-up time of a collective, and memory bandwidth.
    """

    loads: tuple[Load, ...]
    cost: CostModel
    methods: tuple[tuple[Shape, Method], ...]
    rates: Rates

    def times(self, wave: Wave) -> Times:
        """What one wave takes on each stream.

        An owner works on one group of each buffer at most: on the costliest, say.
        """
        buffers: dict[int, list[int]] = {}
        for number in wave:
            buffers.setdefault(self.loads[number].buffer, []).append(number)
        inward = back = 0.0
        for numbers in buffers.values():
            inward += self.link_us(max(wave[i] * self.loads[i].in_us for i in numbers))
            back += self.link_us(max(wave[i] * self.loads[i].out_us for i in numbers))
        traffic = [(n, *self.loads[i].elements) for i, n in wave.items()]
        pack = self.rates.stream_us(PACK_BYTES * sum(n * x for n, x, _ in traffic))
        apply = self.rates.stream_us(APPLY_BYTES * sum(n * x for n, _, x in traffic))
        busiest = (
            max(numbers, key=lambda i: self.work_us({i: wave[i]}))
            for numbers in buffers.values()
        )
        work = self.work_us({i: wave[i] for i in busiest})
        return Times(pack, inward, work, back, apply)

    def link_us(self, sending_us: float) -> float:
        """Time of a collective that is on the link for ``sending_us``."""
        return self.rates.start_us + sending_us if sending_us else 0.0

    def work_us(self, wave: Wave) -> float:
        """Time of a device that computes all slots of ``wave``."""
        batches: dict[Shape, int] = {}
        for number, slots in wave.items():
            for shape in self.loads[number].matrices:
                batches[shape] = batches.get(shape, 0) + slots
        methods = dict(self.methods)
        return sum(
            self.cost.time_us(shape, batch, methods[shape])
            for shape, batch in batches.items()
        )

    def pipeline_us(self, waves: Sequence[Wave]) -> float:
        """Time of all waves; see the function of that name."""
        return pipeline_us([self.times(wave) for wave in waves])


def pipeline_us(waves: Sequence[Times]) -> float:
    """Time from the first momentum that is read to the last parameter that is written.

    The link carries the first two waves in, then by turns one back and one in.
    """
    packed = list(itertools.accumulate(times.pack for times in waves))
    compute, link, arrived = (packed[-1] if packed else 0.0), 0.0, []
    for index, times in enumerate(waves):
        for number in range(len(arrived), min(index + 2, len(waves))):
            link = max(link, packed[number]) + waves[number].inward
            arrived.append(link)
        compute = max(compute, arrived[index]) + times.work
        if times.back:
            link = max(link, compute) + times.back
    compute += sum(times.apply for times in waves[:-1])
    return max(compute, link) + (waves[-1].apply if waves else 0.0)


def choose_waves(clock: Clock, max_waves: int = MAX_WAVES) -> list[Wave]:
    """The waves that take the least time, as far as a local search sees.

    Returns:
      Every slot of every group is in exactly one; no wave is empty.
    """
    one = tidied([{i: load.slots for i, load in enumerate(clock.loads)}])
    alone = sorted(
        tidied([{i: load.slots} for i, load in enumerate(clock.loads)]),
        key=lambda wave: clock.times(wave).inward,
    )
    starts = [one, alone] if len(alone) <= max_waves else [one]

    @functools.cache
    def times(wave: tuple[tuple[int, int], ...]) -> Times:
        return clock.times(dict(wave))

    def total_us(waves: Sequence[Wave]) -> float:
        return pipeline_us([times(tuple(wave.items())) for wave in waves])

    found = [improved(total_us, start, max_waves) for start in starts]
    return min(found, key=total_us)


def improved(
    total_us: Callable[[Sequence[Wave]], float], waves: list[Wave], max_waves: int
) -> list[Wave]:
    """``waves`` after changes that each save most time, until none saves any.

    A change takes some or all slots of a group to another wave or to one of their own, or
    lets two waves change places.
    """
    best_us = total_us(waves)
    while True:
        tried = [
            (total_us(other), index, other)
            for index, other in enumerate(changed(waves))
            if len(other) <= max_waves
        ]
        least_us, _, other = min(tried, default=(best_us, 0, waves))
        if least_us >= best_us * (1 - GAIN):
            return waves
        best_us, waves = least_us, other


def changed(waves: Sequence[Wave]) -> Iterator[list[Wave]]:
    """Every schedule that is one change away."""
    places = range(len(waves))
    for source in places:
        for group, slots in waves[source].items():
            for taken in sorted({1, -(-slots // 2), slots} - {0}):
                rest = {**waves[source], group: slots - taken}
                for target in places:
                    moved = [dict(wave) for wave in waves]
                    moved[source] = rest
                    here = moved[target].get(group, 0)
                    moved[target] = {**moved[target], group: here + taken}
                    if target != source:
                        yield tidied(moved)
                for target in range(len(waves) + 1):
                    moved = [dict(wave) for wave in waves]
                    moved[source] = rest
                    moved.insert(target, {group: taken})
                    yield tidied(moved)
    for first, second in itertools.combinations(places, 2):
        moved = list(waves)
        moved[first], moved[second] = moved[second], moved[first]
        yield moved


def tidied(waves: Sequence[Wave]) -> list[Wave]:
    """Waves without groups that have no slots there, and without empty waves."""
    kept = [{g: wave[g] for g in sorted(wave) if wave[g]} for wave in waves]
    return [wave for wave in kept if wave]


def in_waves(groups: Sequence[Group], waves: Sequence[Wave]) -> tuple[Group, ...]:
    """``groups`` in parts, as ``waves`` say."""
    parts = [
        tuple(Part(wave[i], w) for w, wave in enumerate(waves) if i in wave)
        for i in range(len(groups))
    ]
    return tuple(
        dataclasses.replace(group, parts=mine or (Part(0),))
        for group, mine in zip(groups, parts, strict=True)
    )
