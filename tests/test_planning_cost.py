"""Cost models: formulas, interpolation, and tables as text."""

import dataclasses
import json
import math

import pytest

from dmuon_jax.planning.cost import (
    RooflineCost,
    TableCost,
    Timing,
    iteration_flops,
    iteration_work,
)
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.workloads import load_workload, read_json, workload_names

SHAPE = (3, 7)
TABLE = TableCost(
    (
        Timing(SHAPE, "direct", 2, 10.0),
        Timing(SHAPE, "direct", 4, 14.0),
        Timing(SHAPE, "gram", 3, 9.0),
    ),
    "a machine",
)


@pytest.mark.parametrize(
    ("method", "symmetric", "long", "cube"),
    [
        ("direct", False, 20, 10),
        ("gram", False, 8, 28),
        ("direct", True, 15, 5),
        ("gram", True, 6, 14),
    ],
)
def test_flops(method, symmetric, long, cube):
    expected = long * 3 * 3 * 7 + cube * 3**3
    assert iteration_flops(SHAPE, method, symmetric=symmetric) == expected


def test_flops_of_the_workloads():
    for name in workload_names():
        stored = read_json()["models"][name]["ns_tflop_per_step"]
        for key, method, symmetric in (
            ("direct", "direct", False),
            ("gram", "gram", False),
            ("gram_symmetric", "gram", True),
        ):
            total = sum(
                item.count
                * iteration_flops(
                    tuple(sorted(item.shape)), method, symmetric=symmetric
                )
                for item in load_workload(name).matrices
            )
            assert total / 1e12 == pytest.approx(stored[key], abs=0.06)


def test_restarts_of_the_gram_form():
    def products(steps, restarts):
        work = iteration_work(SHAPE, "gram", steps, restarts, False)
        return sum(item.num for item in work)

    # One step: R, R R, Q X. Two steps: R, R R, R Z, Z (R Z), R R, Q Z, Q X.
    assert products(1, 0) == 3
    assert products(2, 0) == 7
    assert products(2, 1) == 6


def test_roofline():
    cost = RooflineCost(DEVICES["h200"])
    large = cost.time_us((4096, 14336), 4, "gram")
    flops = 4 * iteration_flops((4096, 14336), "gram")
    bare = DEVICES["h200"].matmul_us(flops)
    assert bare < large < 1.3 * bare
    small = [cost.time_us((64, 64), batch, "direct") for batch in (1, 2)]
    assert small[1] < 1.1 * small[0]
    halved = dataclasses.replace(cost, symmetric=True)
    assert halved.time_us((4096, 4096), 1, "gram") < 0.6 * cost.time_us(
        (4096, 4096), 1, "gram"
    )
    single = dataclasses.replace(cost, dtype="float32")
    assert single.time_us((4096, 4096), 1, "gram") > large


@pytest.mark.parametrize("change", [{"dtype": "int8"}, {"steps": 0}, {"restarts": -1}])
def test_bad_roofline(change):
    with pytest.raises(ValueError, match="must be"):
        dataclasses.replace(RooflineCost(DEVICES["h200"]), **change)


def test_table_interpolates():
    times = [TABLE.time_us(SHAPE, batch, "direct") for batch in (1, 2, 3, 4, 5, 8)]
    assert times == [10.0, 10.0, 12.0, 14.0, 16.0, 22.0]
    assert [TABLE.time_us(SHAPE, b, "gram") for b in (1, 3, 6)] == [9.0, 9.0, 18.0]


def test_table_never_falls_beyond_what_was_measured():
    table = TableCost((Timing(SHAPE, "gram", 1, 9.0), Timing(SHAPE, "gram", 2, 8.0)))
    assert table.time_us(SHAPE, 50, "gram") == 8.0


def test_table_refuses_what_was_not_measured():
    with pytest.raises(ValueError, match=r"measured with 'gram', got \(3, 8\)"):
        TABLE.time_us((3, 8), 1, "gram")


def test_table_as_text():
    again = TableCost.from_json(TABLE.to_json())
    assert again == TABLE
    assert hash(again) == hash(TABLE)


@pytest.mark.parametrize(
    "row",
    [
        [[3, 7], "direct", 1, 0],
        [[3, 7], "direct", 1, math.nan],
        [[3, 7], "direct", 1, math.inf],
        [[3, 7], "direct", 0, 1.0],
        [[7, 3], "direct", 1, 1.0],
        [[3, 7], "fast", 1, 1.0],
        [[3, 7], "direct", 1],
        [[3, 7], "direct", "1", 1.0],
        "direct",
    ],
)
def test_damaged_tables(row):
    data = json.loads(TABLE.to_json())
    data["timings"].append(row)
    with pytest.raises(ValueError, match="must"):
        TableCost.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"format": "other"}'])
def test_foreign_tables(text):
    with pytest.raises(ValueError):
        TableCost.from_json(text)


def test_a_batch_measured_twice():
    with pytest.raises(ValueError, match="once"):
        TableCost((Timing(SHAPE, "gram", 1, 1.0), Timing(SHAPE, "gram", 1, 2.0)))


def test_workloads():
    assert len(workload_names()) == 14
    for name in workload_names():
        stored, model = read_json()["models"][name], load_workload(name)
        assert sum(item.count for item in model.matrices) == stored["num_matrices"]
        elements = sum(item.num_elements for item in model.matrices)
        assert elements == stored["num_elements"]
    with pytest.raises(ValueError, match="name must be one of"):
        load_workload("none")
