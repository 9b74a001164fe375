"""Waves: their clock, their choice against every schedule, and that values do not change."""

import dataclasses
import functools
import itertools
import json
import random

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from dmuon_jax import Split, dmuon, plan_owners
from dmuon_jax.owners import map_owners
from dmuon_jax.planning import build
from dmuon_jax.planning.devices import DEVICES, Rates, overlap_rates
from dmuon_jax.planning.groups import Part
from dmuon_jax.planning.order import Clock, Load, Times, choose_waves, pipeline_us
from dmuon_jax.planning.plan import Plan
from dmuon_jax.proof import audit
from dmuon_jax.scales import restored
from tests.layouts import make_mesh
from tests.planning_cases import compositions
from tests.references import relative

RATES = Rates(start_us=10.0, memory_bandwidth=1e6)


@dataclasses.dataclass(frozen=True)
class Affine:
    """``base + each * batch`` microseconds by shape."""

    by_shape: tuple

    def time_us(self, shape, batch, method):
        base, each = dict(self.by_shape)[shape]
        return base + each * batch


def test_clock_of_one_wave_hides_nothing():
    assert pipeline_us([Times(5, 10, 100, 20, 7)]) == 5 + 10 + 100 + 20 + 7
    assert pipeline_us([]) == 0


def test_clock_hides_the_middle_and_covers_the_ends():
    small = Times(0, 1, 50, 1, 0)
    large = Times(0, 40, 100, 40, 0)
    # In 1, iterations 50 + 100 + 50, back 1: the large wave's exchanges are hidden.
    assert pipeline_us([small, large, small]) == 1 + 50 + 100 + 50 + 1
    assert pipeline_us([large, small, small]) == 40 + 100 + 50 + 50 + 1
    # Packing the second wave covers the first arrival; applying the first, the return.
    first, second = Times(5, 30, 50, 30, 8), Times(40, 0, 50, 6, 3)
    assert pipeline_us([first, second]) == 5 + 40 + 50 + 50 + 8 + 3


def test_clock_when_the_link_is_the_bottleneck():
    wave = Times(0, 100, 10, 100, 0)
    # in, in, back, in, back, back: the link is never idle.
    assert pipeline_us([wave, wave, wave]) == 6 * 100


def clock_of(seed):
    rng = random.Random(seed)
    shapes = [(1, 8), (2, 8)]
    cost = Affine(tuple((s, (rng.uniform(0, 20), rng.uniform(5, 300))) for s in shapes))
    loads = tuple(
        Load(
            slots=rng.randint(1, 2 if number else 3),
            buffer=rng.randint(0, number) if seed % 2 else number,
            in_us=rng.choice([0.0, rng.uniform(1, 200)]),
            out_us=rng.uniform(1, 200),
            elements=(rng.uniform(0, 5e6), rng.uniform(0, 5e6)),
            matrices=(rng.choice(shapes),),
        )
        for number in range(rng.randint(1, 3))
    )
    return Clock(loads, cost, tuple((s, "direct") for s in shapes), RATES)


def least_us(clock, most):
    """The best of all schedules with at most `most` waves."""
    totals = []
    for count in range(1, most + 1):
        ways = [list(compositions(load.slots, count)) for load in clock.loads]
        for chosen in itertools.product(*ways):
            waves = [
                {g: row[w] for g, row in enumerate(chosen) if row[w]}
                for w in range(count)
            ]
            if all(waves):
                totals.append(clock.pipeline_us(waves))
    return min(totals)


def test_choice_against_every_schedule():
    ratios = []
    for seed in range(40):
        clock = clock_of(seed)
        waves = choose_waves(clock, max_waves=3)
        held = [sum(w.get(g, 0) for w in waves) for g in range(len(clock.loads))]
        assert held == [load.slots for load in clock.loads]
        assert all(min(wave.values()) > 0 for wave in waves)
        one = clock.pipeline_us([{g: x.slots for g, x in enumerate(clock.loads)}])
        assert clock.pipeline_us(waves) <= one
        ratios.append(clock.pipeline_us(waves) / least_us(clock, 3))
    assert max(ratios) <= 1.08
    assert sum(ratio <= 1.006 for ratio in ratios) >= 32


def test_nothing_to_send():
    empty = Load(0, 0, 0.0, 0.0, (0.0, 0.0), ((1, 8),))
    assert choose_waves(Clock((empty,), Affine(()), (), RATES)) == []
    assert choose_waves(Clock((), Affine(()), (), RATES)) == []


def test_only_gpus_overlap():
    assert overlap_rates("cpu", DEVICES["cpu"], 8) is None
    assert overlap_rates("tpu", DEVICES["tpu-v5e"], 8) is None
    one, two = (overlap_rates("gpu", DEVICES["h200"], num) for num in (8, 16))
    assert (one.start_us, two.start_us) == (12.0, 30.0)
    assert one.stream_us(3.6e6) == pytest.approx(1.0)


SHAPES = {"a": (6, 16, 24), "b": (6, 16, 24), "c": (3, 24, 16), "qk": (16, 32)}


def tree():
    """Three exchange groups: two stacks, one of them uneven, and a fused weight."""
    mesh = make_mesh((("x", 4),), AxisType.Auto)
    rng = np.random.default_rng(0)
    specs = {"a": P(None, "x"), "b": P(None, "x"), "c": P(None, "x"), "qk": P("x")}
    return {
        name: jax.device_put(
            rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, specs[name])
        )
        for name, shape in SHAPES.items()
    }


def rules(params):
    stack = MuonDimensionNumbers(1, 2)
    fused = Split(2)
    return {name: fused if name == "qk" else stack for name in params}


def plan_in(waves, params, monkeypatch, **options):
    """The plan of ``params`` with the given waves; None: all in one."""
    settings = build.Settings
    monkeypatch.setattr(build, "choose_waves", lambda clock: waves)
    with monkeypatch.context() as patch:
        patch.setattr(
            "dmuon_jax.leaves.Settings",
            lambda **fields: settings(**fields | {"overlap": waves and RATES}),
        )
        return plan_owners(params, muon_weight_dimension_numbers=rules, **options)


def orders(plan):
    """Waves for the plan's groups, of which the first has several slots."""
    most = plan.groups[0].slots
    assert most >= 3 and [group.slots for group in plan.groups[1:]] == [1, 1]
    return [
        [{0: most, 1: 1, 2: 1}],
        [{0: 1}, {1: 1}, {0: 1, 2: 1}, {0: most - 2}],
        [{2: 1}, {0: most - 1}, {1: 1, 0: 1}],
    ]


def backwards(plan):
    """``plan`` with its last wave first."""
    groups = [
        dataclasses.replace(
            group,
            parts=tuple(
                Part(x.slots, plan.num_waves - 1 - x.wave) for x in group.parts
            ),
        )
        for group in plan.groups
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def num_buffers(plan, waves):
    """Buffers of all waves."""
    return sum(len({plan.groups[group].buffer for group in wave}) for wave in waves)


def as_they_are(x, exponent, bucket, operands):
    return restored(x, exponent)


def same_bits(first, second):
    return all(np.array_equal(first[name], second[name]) for name in SHAPES)


@pytest.mark.parametrize("exchange_dtype", ["float32", "float16"])
def test_any_order_moves_the_same_bits(monkeypatch, exchange_dtype):
    params, mesh = tree(), make_mesh((("x", 4),), AxisType.Auto)
    options = {"exchange_dtype": exchange_dtype}
    whole = plan_in(None, params, monkeypatch, **options)
    paths = [leaf.path for leaf in whole.leaves]
    results = []
    plans = [plan_in(x, params, monkeypatch, **options) for x in orders(whole)]
    numbers = [plan.exchange_bytes.collectives for plan in plans]
    assert numbers == [2 * num_buffers(whole, waves) for waves in orders(whole)]
    assert numbers < [2 * sum(map(len, waves)) for waves in orders(whole)]
    for plan in [whole, plans[1], backwards(plans[2])]:
        arrays = [params[path[2:-2]] for path in paths]
        moved = functools.partial(map_owners, as_they_are, plan=plan, mesh=mesh)
        program = jax.jit(moved).lower(arrays).compile()
        results.append(dict(zip(sorted(SHAPES), program(arrays), strict=True)))
        found = audit(program).collectives
        assert len(found) == plan.exchange_bytes.collectives
        # The results are not float16, so blocks carry exponents both ways.
        assert sum(x.num_bytes for x in found) == plan.exchange_bytes.total
    assert all(same_bits(other, results[0]) for other in results[1:])
    if exchange_dtype == "float32":
        assert same_bits(results[0], params)


def test_the_order_of_equal_batches_changes_no_bit(monkeypatch):
    params = tree()
    whole = plan_in(None, params, monkeypatch, method="direct")
    waves = orders(whole)[1]
    updates = []
    for order in (waves, [waves[1], waves[0], *waves[2:]], orders(whole)[0]):
        plan = plan_in(order, params, monkeypatch, method="direct")
        tx = dmuon(0.1, ns_steps=3, muon_weight_dimension_numbers=rules, plan=plan)
        updates.append(jax.jit(tx.update)(params, tx.init(params), params)[0])
    assert same_bits(updates[1], updates[0])
    # XLA may sum a batch of another size in another order.
    assert all(relative(updates[2][x], updates[0][x]) <= 1e-6 for x in SHAPES)


def test_plan_in_waves_as_json(monkeypatch):
    whole = plan_in(None, tree(), monkeypatch)
    plan = plan_in(orders(whole)[1], tree(), monkeypatch)
    assert [[p.wave for p in g.parts] for g in plan.groups] == [[0, 2, 3], [1], [2]]
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.waves == (
        (((0, 0),),),
        (((1, 0),),),
        (((0, 1), (2, 0)),),
        (((0, 2),),),
    )
    assert whole.waves == ((((0, 0), (2, 0)), ((1, 0),)),)
    assert "4 waves" in plan.summary()
    assert whole.digest() != plan.digest()
    # Groups of one buffer save only what they send in one wave.
    assert whole.exchange_bytes.total <= plan.exchange_bytes.total


def test_plans_written_before_there_were_parts(monkeypatch):
    data = json.loads(plan_in(None, tree(), monkeypatch).to_json())
    with pytest.raises(ValueError, match="a plan must have format 3, got 2"):
        Plan.from_json(json.dumps(data | {"format": 2}))


def test_parts_that_do_not_fit(monkeypatch):
    whole = plan_in(None, tree(), monkeypatch)
    plan = plan_in(orders(whole)[2], tree(), monkeypatch)
    most = whole.groups[0].slots

    def with_parts(*parts):
        first = dataclasses.replace(plan.groups[0], parts=parts)
        return dataclasses.replace(plan, groups=(first, *plan.groups[1:]))

    assert with_parts(Part(most - 1, 1), Part(1, 2)) == plan
    with pytest.raises(ValueError, match=r"parts must divide . slots, got \[1, 1\]"):
        with_parts(Part(1, 1), Part(1, 2))
    with pytest.raises(ValueError, match="each piece of a part once"):
        with_parts(Part(most, 1))
    with pytest.raises(ValueError, match=r"waves must be numbered from 0, got \[0, 2, 5\]"):
        with_parts(Part(most - 1, 5), Part(1, 2))
    with pytest.raises(ValueError, match="members must be of one wave"):
        with_parts(Part(most - 1, 1), Part(1, 0))
