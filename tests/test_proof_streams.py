"""The two-stream model where devices run different branches, against clocks of each device."""

import random

import pytest

from dmuon_jax.proof import parse, simulate_streams
from tests.test_proof_timeline import DOT, DOT_US, HEAD, UNIT, entry

# Branches of none to three dots, and one that communicates.
MOST = 3
SIZES = (100, 4000)


def branch(name, *lines):
    return "\n".join([f"%{name} (x: bf16[8,8]) -> bf16[8,8] {{", *lines, "}\n\n"])


def dots(count):
    x = "  %x = bf16[8,8] parameter(0)"
    lines = [f"  %d{count}{i} = bf16[8,8] {DOT}" for i in range(count)]
    return branch(f"b{count}", x, *lines, f"  ROOT %r{count} = bf16[8,8] bitcast(%x)")


REDUCE = "all-reduce(%x), replica_groups={}"
BRANCHES = "".join(map(dots, range(MOST + 1))) + branch(
    "talks",
    "  %x = bf16[8,8] parameter(0)",
    f"  ROOT %a = bf16[8,8] {REDUCE}",
)
REDUCE_US = 100 + 2 * 128 * 3 / 4


def switch(name, *branches):
    names = ", ".join(f"%{item}" for item in branches)
    return (
        f"%{name} = bf16[8,8] conditional(%i, %x, %x), branch_computations={{{names}}}"
    )


def lines_of(ops):
    """HLO of operations: dot, sync, (switch, branches), (start, size) and (done, size)."""
    lines = []
    for number, op in enumerate(ops):
        kind, argument = op[0], op[-1]
        if kind == "dot":
            lines.append(f"%op{number} = bf16[8,8] {DOT}")
        elif kind == "sync":
            lines.append(f"%op{number} = bf16[8,8] {REDUCE}")
        elif kind == "switch":
            lines.append(switch(f"op{number}", *(f"b{count}" for count in argument)))
        elif kind == "start":
            array = f"bf16[{argument}]"
            lines.append(
                f"%s{argument} = (({array}), {array}) all-to-all-start(%p{argument}), "
                "replica_groups=[1,4]<=[4]"
            )
        else:
            lines.append(
                f"%op{number} = bf16[{argument}] all-to-all-done(%s{argument})"
            )
    return lines


HEADING = [
    "%i = s32[] parameter(0)",
    "%x = bf16[8,8] parameter(1)",
    *(f"%p{size} = bf16[{size}] parameter({2 + n})" for n, size in enumerate(SIZES)),
]


def follow(ops, told):
    """Clocks of every device, op by op.

    Returns:
      The step, what the last device waits, and of each device its waits beyond that and the
      starts of its dots.
    """
    devices = len(next(iter(told.values())))
    now, free, exposed = [0.0] * devices, 0.0, 0.0
    waits, starts, ends = [0.0] * devices, [[] for _ in now], {}

    def work(device, count):
        for _ in range(count):
            starts[device].append(now[device])
            now[device] += DOT_US

    def transfer(length):
        return max(*now, free) + length

    def wait(end):
        last = max(0.0, end - max(now))
        for device in range(devices):
            waits[device] += max(end - now[device], 0.0) - last
            now[device] = max(now[device], end)
        return last

    for number, op in enumerate(ops):
        if op[0] in ("dot", "switch"):
            for device in range(devices):
                counts = op[1] if op[0] == "switch" else (1,)
                runs = told[f"op{number}"][device] if op[0] == "switch" else 0
                work(device, counts[runs])
        elif op[0] == "sync":
            free = transfer(REDUCE_US)
            exposed += wait(free)
        elif op[0] == "start":
            free = ends[op[1]] = transfer(100 + 2 * op[1] * 3 / 4)
        else:
            exposed += wait(ends.pop(op[1]))
    step = max(now)
    waits = [waited + step - own for waited, own in zip(waits, now, strict=True)]
    return step, exposed, waits, starts


def random_ops(chance, kinds):
    """A program, and the branch of each of five devices."""
    ops, told, under_way = [], {}, []
    for number in range(chance.randint(4, 14)):
        kind = chance.choice(kinds)
        if kind == "switch":
            counts = chance.sample(range(MOST + 1), chance.randint(2, 3))
            ops.append(("switch", tuple(counts)))
            told[f"op{number}"] = [chance.randrange(len(counts)) for _ in range(5)]
        elif kind == "start" and len(under_way) < len(SIZES):
            under_way.append(min(set(SIZES) - set(under_way)))
            ops.append(("start", under_way[-1]))
        elif kind == "start":
            ops.append(("done", under_way.pop(0)))
        else:
            ops.append((kind,))
    return ops + [("done", size) for size in under_way], told


def run(text, told):
    return simulate_streams(parse(HEAD + BRANCHES + text), UNIT, branches=told)


@pytest.mark.parametrize("seed", range(60))
def test_classes_follow_the_clocks_of_their_devices(seed):
    chance = random.Random(seed)
    ops, told = random_ops(
        chance, ("dot", "switch", "switch", "sync", "start", "start")
    )
    told = told or {"op-1": [0] * 5}
    step, exposed, waits, starts = follow(ops, told)
    timeline = run(entry(*HEADING, *lines_of(ops)), told)
    assert timeline.step_us == pytest.approx(step)
    assert timeline.exposed_us == pytest.approx(exposed)
    # The device shown is one of those with most dots.
    shown = [event for event in timeline.events if event.lane == "compute"]
    begun = pytest.approx([event.start_us for event in shown])
    assert len(shown) == max(map(len, starts))
    same = [waits[device] for device in range(5) if starts[device] == begun]
    assert pytest.approx(timeline.imbalance_us) in same
    # Between its operations it waits, for the link or for others.
    edges = [0.0, *(t for e in shown for t in (e.start_us, e.end_us)), step]
    gaps = sum(b - a for a, b in zip(edges[::2], edges[1::2], strict=True))
    assert gaps == pytest.approx(exposed + timeline.imbalance_us)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("syncs", [True, False])
def test_loops_repeat_the_steady_length_of_each_class(seed, syncs):
    """As the same operations without a loop, whatever classes did before it."""
    chance = random.Random(seed)
    kinds = ("dot", "switch", "sync") if syncs else ("dot", "switch")
    before = [("switch", (0, 3))]
    ops, told = random_ops(chance, kinds)
    first = [chance.randrange(2) for _ in range(5)]
    step, *_ = follow(
        before + ops * 5,
        {"op0": first}
        | {
            f"op{1 + len(ops) * trip + int(name[2:])}": branches
            for name, branches in told.items()
            for trip in range(5)
        },
    )
    body = "\n".join(
        [
            "%body (p: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {",
            "  %p = (s32[], bf16[8,8]) parameter(0)",
            "  %i = s32[] get-tuple-element(%p), index=0",
            "  %x = bf16[8,8] get-tuple-element(%p), index=1",
            *(f"  {line}" for line in lines_of(ops)),
            "  ROOT %t = (s32[], bf16[8,8]) tuple(%i, %x)",
            "}\n\n",
        ]
    )
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    text = body + entry(
        *HEADING,
        switch("first", "b0", "b3"),
        "%t0 = (s32[], bf16[8,8]) tuple(%i, %x)",
        f"ROOT %w = (s32[], bf16[8,8]) while(%t0), body=%body, {config}",
    )
    assert run(text, {"first": first} | told).step_us == pytest.approx(step)


def test_the_slowest_branch_runs_where_none_is_told():
    text = entry(*HEADING, switch("one", "b0", "b2"), switch("two", "b1", "b0"))
    assert run(text, None).step_us == pytest.approx(3 * DOT_US)
    told = run(text, {"one": [0, 1, 0]})
    assert told.step_us == pytest.approx(3 * DOT_US)
    assert told.imbalance_us == 0
    # No device runs the slowest of both.
    told = run(text, {"one": [0, 1, 0], "two": [0, 1, 1]})
    assert told.step_us == pytest.approx(2 * DOT_US)
    assert [event.name for event in told.events] == ["d20", "d21"]


def test_branches_that_communicate_are_run_by_all():
    """Nothing says how devices meet that do not run the same collectives."""
    text = entry(*HEADING, switch("one", "b0", "talks"), switch("two", "b2", "b0"))
    told = run(text, {"one": [0, 0], "two": [0, 1]})
    assert told.step_us == pytest.approx(REDUCE_US + 2 * DOT_US)
    assert told.exposed_us == pytest.approx(REDUCE_US)
    assert told.imbalance_us == pytest.approx(0)
