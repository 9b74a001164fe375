"""Measured costs: what is timed, what is kept, and what happens when it cannot be."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from optax.contrib import MuonDimensionNumbers

from dmuon_jax import UpdatePath, measure, measure_costs, plan_owners, update_time
from dmuon_jax.measure import NOT_NEEDED, OUT_OF_MEMORY, OUT_OF_TIME, ordered_points
from dmuon_jax.planning.batches import even_batches, measured_batches, plan_batches
from dmuon_jax.planning.cost import (
    RooflineCost,
    TableCost,
    iteration_flops,
    source_of,
)
from dmuon_jax.planning.devices import CPU
from dmuon_jax.planning.problem import METHODS
from dmuon_jax.proof import audit
from dmuon_jax.update_time import Point
from tests.references import relative, textbook_newton_schulz

WORK = {(8, 16): 7, (4, 4): 1}
PLAIN = RooflineCost(CPU, "float32")


def roofline(*point):
    return PLAIN.time_us(*point)


@pytest.fixture
def timer(monkeypatch):
    """Instead of the clock: 10 times the roofline, and a list of what was timed."""
    timed = []

    def time_update_us(point, path, device):
        timed.append((point, path))
        assert device == measure.default_device()
        return 10 * roofline(point.shape, point.batch, point.method)

    monkeypatch.setattr(measure, "time_update_us", time_update_us)
    return timed


def by_point(table):
    """The points asked for, without what comes after the largest batch."""
    return {
        (t.shape, t.batch, t.method): t
        for t in table.timings
        if t.estimated != NOT_NEEDED
    }


def estimated(table):
    return [t for t in by_point(table).values() if t.estimated]


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_what_is_timed_is_the_update(method):
    x = np.random.default_rng(0).normal(size=(2, 12, 8)).astype(np.float32)
    for dtypes in (("float32", "float32"), ("float16", "float16")):
        path = UpdatePath(*dtypes, steps=3, preconditioning="aol")
        update = jax.jit(
            lambda x, c, path=path: update_time.update_blocks(
                x, c, path=path, method=method
            )
        )
        got = update(jnp.asarray(x, dtypes[1]), jnp.asarray(update_time.JORDAN))
        assert got.dtype == dtypes[1]
        table = (update_time.JORDAN,) * 3
        for one, whole in zip(got, x, strict=True):
            want = textbook_newton_schulz(whole, table, preconditioning="aol")
            assert relative(one, want) < (1e-4 if dtypes[0] == "float32" else 0.03)


def test_a_real_timing_runs_the_method_on_the_device_in_any_mesh(monkeypatch):
    programs = []
    real = update_time.run_s

    def run_s(program, x, coefficients, count):
        programs.append((program, x.shape, x.devices()))
        return real(program, x, coefficients, count)

    monkeypatch.setattr(update_time, "run_s", run_s)
    monkeypatch.setattr(update_time, "RUN_S", 1e-4)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    path, device = UpdatePath().on("cpu"), jax.devices()[3]
    with jax.set_mesh(mesh):
        for method in ("direct", "gram"):
            us = update_time.time_update_us(Point((8, 24), method, 3), path, device)
            assert 0 < us < 1e7
    assert all(where == [(3, 24, 8), {device}] for _, *where in programs)
    for (program, *_), method in zip(
        programs[:: len(programs) - 1], METHODS, strict=True
    ):
        flops = iteration_flops((8, 24), method)
        assert audit(program).dot_flops == 3 * flops


def test_the_table_holds_each_point_and_interpolates_between(timer):
    table = measure_costs(WORK, cache=False)
    points = {
        (shape, batch, method)
        for shape, batches in (((8, 16), (1, 2, 8)), ((4, 4), (1, 2)))
        for batch in batches
        for method in ("direct", "gram")
    }
    assert set(by_point(table)) == points and len(timer) == len(points)
    low, high = (10 * roofline((8, 16), batch, "gram") for batch in (2, 8))
    assert table.time_us((8, 16), 5, "gram") == pytest.approx((low + high) / 2)
    assert table.time_us((8, 16), 8, "gram") == pytest.approx(high)
    assert "measured on cpu of" in source_of(table) and "roofline" not in table.about
    assert TableCost.from_json(table.to_json()) == table


def test_the_most_telling_points_come_first(timer):
    measure_costs(WORK, method="gram", cache=False)
    points = [(point.shape, point.batch) for point, _ in timer]
    large, small = (8, 16), (4, 4)
    assert points == [(large, 8), (small, 2), (large, 1), (small, 1), (large, 2)]
    batches = {(4, 4): 1000}
    rank = ordered_points(batches, ("gram",), PLAIN)
    assert [p.batch for p in rank] == [1024, 1, 64, 2]


def test_larger_batches_never_take_less(monkeypatch):
    noisy = {1: 9.0, 2: 3.0, 4: 20.0, 16: 12.0}
    monkeypatch.setattr(measure, "time_update_us", lambda point, *_: noisy[point.batch])
    table = measure_costs({(8, 16): 16}, method="direct", cache=False)
    times = [table.time_us((8, 16), batch, "direct") for batch in range(1, 40)]
    assert times[:2] == [9.0, 9.0] and times[3] == 20.0
    assert times == sorted(times)


def test_a_row_that_is_level_rises_beyond_the_largest_batch(monkeypatch):
    monkeypatch.setattr(measure, "time_update_us", lambda *_: 50.0)
    table = measure_costs({(8, 16): 3}, method="gram", cache=False)
    assert [table.time_us((8, 16), batch, "gram") for batch in (1, 2, 4)] == [50.0] * 3
    rise = roofline((8, 16), 16, "gram") / roofline((8, 16), 4, "gram")
    assert rise > 1.1
    assert table.time_us((8, 16), 16, "gram") == pytest.approx(50.0 * rise)
    assert table.time_us((8, 16), 30, "gram") > table.time_us((8, 16), 16, "gram")


def test_results_are_kept_and_not_timed_again(timer, tmp_path, caplog):
    first = measure_costs(WORK, cache=tmp_path)
    number = len(timer)
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"timing {number} batches on cpu" in said and str(tmp_path) in said
    caplog.clear()
    assert measure_costs(WORK, cache=str(tmp_path)) == first
    assert len(timer) == number and not caplog.records
    # One shape more: only that is timed.
    measure_costs(WORK | {(2, 2): 1}, cache=tmp_path)
    assert {point.shape for point, _ in timer[number:]} == {(2, 2)}


@pytest.mark.parametrize(
    "change",
    [
        {"compute_dtype": "float16"},
        {"exchange_dtype": "float16"},
        {"steps": 6},
        {"restarts": (1,)},
        {"preconditioning": "aol"},
        {"implementation": "xla"},
    ],
    ids=str,
)
def test_another_path_is_another_entry(timer, tmp_path, change):
    path = UpdatePath()
    measure_costs({(4, 4): 1}, path, method="gram", cache=tmp_path)
    number = len(timer)
    path = dataclasses.replace(path, **change)
    measure_costs({(4, 4): 1}, path, method="gram", cache=tmp_path)
    assert len(timer) == 2 * number
    assert vars(timer[-1][1]).items() >= change.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax.__version__", "0.0.1"),
        ("importlib.metadata.version", lambda name: "0.0.1"),
        ("dmuon_jax.update_time.KERNELS_VERSION", 0),
    ],
)
def test_another_version_is_another_entry(timer, tmp_path, monkeypatch, name, value):
    measure_costs({(4, 4): 1}, cache=tmp_path)
    number = len(timer)
    monkeypatch.setattr(name, value)
    measure_costs({(4, 4): 1}, cache=tmp_path)
    assert len(timer) == 2 * number


def test_damaged_entries_cost_one_warning_and_are_timed_again(timer, tmp_path):
    first = measure_costs(WORK, cache=tmp_path)
    number = len(timer)
    damaged = sorted(tmp_path.iterdir())[:3]
    for path, value in zip(damaged, (-1.0, None, True), strict=True):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"value": {"time_us": value}}))
    with pytest.warns(UserWarning, match="3 ignored") as caught:
        assert measure_costs(WORK, cache=tmp_path) == first
    assert len(caught) == 1 and len(timer) == number + 3
    assert measure_costs(WORK, cache=tmp_path) == first
    assert len(timer) == number + 3


def test_a_cache_that_cannot_be_written_costs_one_warning(timer, tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.warns(UserWarning, match="10 not kept") as caught:
        table = measure_costs(WORK, cache=tmp_path / "home" / "cache")
    assert len(caught) == 1 and not estimated(table)


def test_without_time_the_roofline_is_used_and_said(timer):
    table = measure_costs(WORK, cache=False, budget_s=0)
    assert timer == []
    for (shape, batch, method), timing in by_point(table).items():
        assert timing.time_us == pytest.approx(roofline(shape, batch, method))
        assert timing.estimated == OUT_OF_TIME
    assert "10 of 10 times are the roofline's, scaled (10 out of time)" in table.about
    assert TableCost.from_json(table.to_json()) == table


def test_time_that_runs_out_leaves_the_scaled_roofline(monkeypatch, tmp_path):
    now = [0.0]

    def time_update_us(point, path, device):
        now[0] += 10.0
        factor = {"direct": 5.0, "gram": 7.0}[point.method]
        return factor * roofline(point.shape, point.batch, point.method)

    monkeypatch.setattr(measure, "time_update_us", time_update_us)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    table = measure_costs(WORK, cache=tmp_path, budget_s=35.0)
    missing = {key: t for key, t in by_point(table).items() if t.estimated}
    assert len(missing) == 6 and now[0] == 40.0
    for (shape, batch, method), timing in missing.items():
        factor = {"direct": 5.0, "gram": 7.0}[method]
        assert timing.time_us == pytest.approx(factor * roofline(shape, batch, method))
    # Estimates are not kept: the next run times them, and then nothing is missing.
    assert len(list(tmp_path.iterdir())) == 4
    again = measure_costs(WORK, cache=tmp_path, budget_s=1000.0)
    assert not estimated(again) and now[0] == 100.0


def test_no_timing_is_begun_that_would_take_too_long(monkeypatch):
    # The first shape shows that all takes a million times what the roofline says.
    def time_update_us(point, path, device):
        return 1e6 * roofline(point.shape, point.batch, point.method)

    monkeypatch.setattr(measure, "time_update_us", time_update_us)
    table = measure_costs({(8, 16): 2, (4, 4): 2}, cache=False, budget_s=50.0)
    done = [key for key, t in by_point(table).items() if not t.estimated]
    assert len(done) == 1
    for (shape, batch, method), timing in by_point(table).items():
        assert timing.time_us == pytest.approx(1e6 * roofline(shape, batch, method))


def test_what_does_not_fit_into_memory_is_scaled_and_said(monkeypatch, tmp_path):
    """The rest is measured.

    Fault: the device runs out of memory while costs are measured
    Happens: those times are the roofline's, scaled by the others, and the table says so
    Kept: all results that fitted
    """

    def time_update_us(point, path, device):
        if point.shape == (8, 16) and point.batch > 2:
            jnp.zeros((1 << 50,), jnp.float32).block_until_ready()  # 4 PiB
        return 3 * roofline(point.shape, point.batch, point.method)

    monkeypatch.setattr(measure, "time_update_us", time_update_us)
    work = {(8, 16): 16, (4, 4): 16}
    table = measure_costs(work, method="gram", cache=tmp_path)
    found = by_point(table)
    for batch in (4, 16):
        timing = found[(8, 16), batch, "gram"]
        assert timing.estimated == OUT_OF_MEMORY
        assert timing.time_us == pytest.approx(3 * roofline((8, 16), batch, "gram"))
        assert found[(4, 4), batch, "gram"].estimated == ""
    assert found[(8, 16), 2, "gram"].estimated == ""
    assert "2 of 8 times are the roofline's, scaled (2 out of memory)" in table.about
    assert len(list(tmp_path.iterdir())) == 6


def test_other_failures_are_raised_and_lose_nothing(monkeypatch, tmp_path):
    def time_update_us(point, path, device):
        if point.batch == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: a kernel failed")
        return 1.0

    monkeypatch.setattr(measure, "time_update_us", time_update_us)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        measure_costs({(8, 16): 2}, method="gram", cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_kill_while_measuring_keeps_what_was_done(tmp_path):
    """Each result is kept at once.

    Fault: the process is killed while it measures costs
    Happens: the next run measures only what is missing
    Kept: all results so far
    """
    code = """
import os, signal, sys
from dmuon_jax import measure, measure_costs
done = []
def time_update_us(point, path, device):
    if len(done) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(point)
    return 100.0 * point.batch
measure.time_update_us = time_update_us
table = measure_costs({(8, 16): 7, (4, 4): 1}, cache=sys.argv[1])
print(len(done), table.time_us((8, 16), 8, "gram"), table.time_us((4, 4), 1, "gram"))
"""

    def run(deadly):
        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            code,
            str(tmp_path),
            str(deadly),
        ]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120
        )

    assert run(3).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3
    done = run(99)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", "800.0", "100.0"]


def test_the_device_is_the_default_one_or_as_named(monkeypatch):
    devices = []
    monkeypatch.setattr(
        measure,
        "time_update_us",
        lambda point, path, device: devices.append(device) or 1.0,
    )
    work = {"work": {(4, 4): 1}, "method": "gram", "cache": False}
    first, second, third = jax.devices()[:3]
    measure_costs(**work)
    with jax.default_device(second):
        measure_costs(**work)
        measure_costs(**work, device=third)
    with jax.default_device("cpu"):
        measure_costs(**work)
    assert devices[::2] == [first, second, third, first]


def test_complex_plans_are_timed_in_the_platforms_dtypes(timer):
    plan = plan_owners({"a": jnp.zeros((4, 4), jnp.complex64)})
    measure_costs(plan, cache=False)
    assert {(p.compute_dtype, p.exchange_dtype) for _, p in timer} == {
        ("float32", "float32")
    }


def test_a_plan_tells_what_to_measure(timer):
    params = {"a": jnp.zeros((5, 16, 8)), "b": jnp.zeros((4, 4))}
    plan = plan_owners(params, compute_dtype="bfloat16")
    assert plan_batches(plan) == {(4, 4): 1}
    table = measure_costs(plan, cache=False)
    assert {path.compute_dtype for _, path in timer} == {"bfloat16"}
    assert {t.method for t in table.timings} == {"direct"}
    dims = {"a": MuonDimensionNumbers(1, 2), "b": MuonDimensionNumbers()}
    plan = plan_owners(params, muon_weight_dimension_numbers=dims)
    assert plan_batches(plan) == {(4, 4): 1, (8, 16): 5}
    assert even_batches(plan.leaves, plan.mesh, [()]) == {(4, 4): 1, (8, 16): 5}


def test_few_batches_up_to_what_is_needed():
    assert [measured_batches(n) for n in (1, 3, 8, 9, 26, 1000)] == [
        (1, 2),
        (1, 2, 4),
        (1, 2, 8),
        (1, 2, 4, 16),
        (1, 2, 8, 32),
        (1, 2, 64, 1024),
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"work": [1]}, TypeError, "work must be a Plan or a mapping"),
        ({"work": {(8, 4): 1}}, ValueError, "shape must be oriented"),
        ({"work": {(4, 8): 0}}, ValueError, "batches >= 1"),
        ({"method": "fast"}, ValueError, "method must be None or one of"),
        ({"budget_s": -1}, ValueError, "budget_s must be at least 0"),
        ({"budget_s": float("nan")}, ValueError, "budget_s must be at least 0"),
        ({"cache": 3}, TypeError, "cache must be a bool or a path"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_timed(
    timer, arguments, error, words
):
    with pytest.raises(error, match=words):
        measure_costs(**{"work": {(4, 8): 1}, "cache": False} | arguments)
    assert timer == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute_dtype": "int8"}, "compute_dtype must be"),
        ({"exchange_dtype": "int8"}, "exchange_dtype must be"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"preconditioning": "none"}, "preconditioning must be"),
        ({"restarts": (5,)}, "restarts must lie"),
        ({"implementation": "cuda"}, "implementation must be"),
    ],
)
def test_wrong_paths_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        UpdatePath(**change)
