"""``costs=``: who measures, when, and that what was asked for is done or refused."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import (
    Measured,
    dmuon,
    measure,
    measure_costs,
    orthogonalize,
    plan_owners,
)
from dmuon_jax import costs as costs_module
from dmuon_jax.find_plan import PlanFinder
from dmuon_jax.planning.cost import RooflineCost, TableCost
from dmuon_jax.planning.devices import DEVICES
from tests.processes import run_processes

OFF = Measured(cache=False)


@dataclasses.dataclass(frozen=True)
class Prefer:
    """Costs that make one method, and one owner for all, as cheap as can be."""

    method: str

    def time_us(self, shape, batch, method):
        return 1.0 + batch * (1.0 if method == self.method else 100.0)


@pytest.fixture
def timer(monkeypatch, tmp_path):
    """Times by which the form that the roofline dislikes is the faster one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    timed = []

    def time_update_us(point, path, device):
        timed.append((point, path, device))
        return Prefer("gram").time_us(point.shape, point.batch, point.method)

    monkeypatch.setattr(measure, "time_update_us", time_update_us)
    return timed


@pytest.fixture
def plans(monkeypatch):
    """The plans by which updates are made."""
    used = []
    real = PlanFinder.find

    def find(self, *args, **kwargs):
        found = real(self, *args, **kwargs)
        used.append(found.plan)
        return found

    monkeypatch.setattr(PlanFinder, "find", find)
    return used


def arrays(kind=AxisType.Auto):
    """Squares, for which a roofline prefers the direct form."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(kind,))
    rng = np.random.default_rng(0)
    tree = {name: rng.normal(size=(16, 16)).astype(np.float32) for name in "abcde"}
    return jax.device_put(tree, NamedSharding(mesh, P("x", None)))


def methods(plan):
    return {bucket.method for bucket in plan.buckets}


def test_the_roofline_prefers_another_form():
    assert methods(plan_owners(arrays())) == {"direct"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_an_eager_init_measures_once_and_all_updates_use_it(timer, plans, kind):
    params = arrays(kind)
    tx = dmuon(0.1, ns_steps=3, costs="measured")
    state = tx.init(params)
    number = len(timer)
    assert {(p.shape, p.batch, p.method) for p, _, _ in timer} == {
        ((16, 16), batch, method) for batch in (1, 2) for method in ("direct", "gram")
    }
    assert {path.steps for _, path, _ in timer} == {3}
    assert {device for _, _, device in timer} == {jax.devices()[0]}
    jax.eval_shape(tx.update, params, state, params)
    tx.init(params)
    assert len(timer) == number and len(set(plans)) == 1
    assert methods(plans[0]) == {"gram"} and "measured on cpu" in plans[0].costs
    # A second transform finds the results in the user's cache.
    dmuon(0.1, ns_steps=3, costs="measured").init(params)
    assert len(timer) == number and plans[-1] == plans[0]


def test_the_cache_can_be_elsewhere_or_off(timer, tmp_path):
    params = arrays()
    dmuon(0.1, costs=OFF).init(params)
    assert list(tmp_path.iterdir()) == []
    dmuon(0.1, costs=Measured(cache=tmp_path / "mine")).init(params)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert len(list((tmp_path / "mine").iterdir())) == 4


def test_nothing_is_measured_on_a_cpu_unless_it_is_asked_for(timer, plans):
    params = arrays()
    for options in ({}, {"costs": "roofline"}, {"costs": Prefer("direct")}):
        tx = dmuon(0.1, **options)
        jax.eval_shape(tx.update, params, tx.init(params), params)
        plan_owners(params, **options)
    assert timer == []
    assert [plans[i].costs for i in (0, 2, 4)] == [
        "roofline of cpu in float32",
        "roofline of cpu in float32",
        "given by a Prefer",
    ]


def test_where_measuring_is_the_default_only_an_eager_init_does_it(
    timer, plans, monkeypatch
):
    monkeypatch.setattr(costs_module, "MEASURED_BY_DEFAULT", ("cpu",))
    params = arrays()
    shardings = jax.tree.map(lambda x: x.sharding, params)
    traced = dmuon(0.1, ns_steps=1, param_shardings=shardings)
    state = jax.jit(traced.init)(params)
    jax.eval_shape(traced.update, params, state, params)
    one = {"a": np.ones((16, 16), np.float32)}
    eager = dmuon(0.1, ns_steps=1)
    eager.update(one, jax.jit(eager.init)(one), one)
    orthogonalize(one, ns_steps=1)
    plan_owners(params)
    dmuon(0.1, plan=plan_owners(params)).init(params)
    dmuon(0.1, costs="roofline").init(params)
    dmuon(0.1, costs=Prefer("direct")).init(params)
    assert timer == [] and all(methods(plan) == {"direct"} for plan in plans)
    traced.init(params)
    assert len(timer) == 4 and methods(plans[-1]) == {"gram"}
    number = len(plans)
    jax.eval_shape(lambda *args: traced.update(*args), params, state, params)
    assert len(plans) == number + 1 and plans[-1] == plans[-2]


def test_measuring_is_refused_in_a_trace_that_nothing_preceded(timer):
    params = arrays(AxisType.Explicit)
    tx = dmuon(0.1, costs="measured")
    for costs in ("measured", OFF):
        tx = dmuon(0.1, costs=costs)
        with pytest.raises(
            ValueError, match="costs must be measured beforehand .*traced"
        ):
            jax.jit(tx.init)(params)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            params,
        )
        with pytest.raises(ValueError, match="costs must be measured beforehand"):
            plan_owners(shapes, costs=costs)
    assert timer == []


def test_nothing_is_measured_around_arrays_that_a_trace_closes_over(timer, monkeypatch):
    params = arrays(AxisType.Explicit)
    with pytest.raises(ValueError, match="costs must be measured beforehand"):
        jax.jit(lambda: dmuon(0.1, costs=OFF).init(params))()
    monkeypatch.setattr(costs_module, "MEASURED_BY_DEFAULT", ("cpu",))
    jax.jit(lambda: dmuon(0.1).init(params))()
    assert timer == []


def test_without_matrices_there_is_nothing_to_measure(timer):
    dmuon(0.1, costs="measured").init({"bias": np.zeros(3, np.float32)})
    assert timer == []


def test_a_table_measured_beforehand_is_used_in_a_trace(timer, plans):
    params = arrays(AxisType.Explicit)
    table = measure_costs(plan_owners(params), cache=False)
    number = len(timer)
    tx = optax.inject_hyperparams(functools.partial(dmuon, costs=table))(0.1)
    state = tx.init(params)
    jax.eval_shape(tx.update, params, state, params)
    assert len(timer) == number and len(set(plans)) == 1
    assert methods(plans[0]) == {"gram"} and plans[0].costs == table.about


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_given_costs_decide(method, plans):
    params = arrays()
    dmuon(0.1, costs=Prefer(method)).init(params)
    assert methods(plans[-1]) == {method}
    assert methods(plan_owners(params, costs=Prefer(method))) == {method}


def test_plan_owners_measures_where_it_is_told_to(timer):
    params = arrays()
    plan = plan_owners(params, costs=OFF)
    assert len(timer) == 4 and methods(plan) == {"gram"}
    assert methods(plan_owners(params, costs=OFF, method="direct")) == {"direct"}
    assert {p.method for p, _, _ in timer[4:]} == {"direct"}


def test_orthogonalize_measures_where_it_is_told_to(timer, plans):
    orthogonalize({"a": np.ones((16, 16), np.float32)}, ns_steps=1, costs=OFF)
    assert len(timer) == 4 and methods(plans[0]) == {"gram"}


def test_costs_of_a_roofline_of_another_device():
    cost = RooflineCost(DEVICES["h200"])
    plan = plan_owners(arrays(), costs=cost)
    assert plan.costs == "roofline of h200 in float16"


@pytest.mark.parametrize(
    ("costs", "error", "words"),
    [
        ("fast", ValueError, "costs must be None, 'measured'.*got 'fast'"),
        (3, TypeError, "time_us.*got int"),
        (print, TypeError, "got builtin_function_or_method"),
    ],
)
def test_other_costs_are_refused_at_once(costs, error, words):
    with pytest.raises(error, match=words):
        dmuon(0.1, costs=costs)


def test_costs_beside_a_plan_are_refused():
    plan = plan_owners(arrays())
    with pytest.raises(ValueError, match="costs must be None with plan="):
        dmuon(0.1, plan=plan, costs="roofline")


@pytest.mark.parametrize("change", [{"budget_s": -1.0}, {"budget_s": float("nan")}])
def test_other_budgets_are_refused(change):
    with pytest.raises(ValueError, match="budget_s must be at least 0"):
        Measured(**change)
    with pytest.raises(TypeError, match="cache must be"):
        Measured(cache=3)


def test_a_table_without_the_shapes_is_refused(timer):
    table = measure_costs({(8, 8): 1}, cache=False)
    with pytest.raises(ValueError, match=r"measured with 'direct', got \(16, 16\)"):
        dmuon(0.1, costs=table).init(arrays())


def test_two_processes_use_the_first_ones_table(tmp_path):
    outcomes = run_processes(
        2, "measure", tmp_path / "run", cache=str(tmp_path / "cache"), how="differ"
    )
    assert [o.code for o in outcomes] == [0, 0], outcomes[-1].text
    first, second = (o.json() for o in outcomes)
    assert first["timed"] == 12 and second["timed"] == 0
    assert first["plan"] == second["plan"]
    assert "measured in one process" in first["refused"]
    table = TableCost.from_json(first["table"])
    assert (
        first["table"] == second["table"] and table.time_us((12, 16), 1, "gram") == 2.0
    )
    assert len(list((tmp_path / "cache").iterdir())) == 12


def test_no_process_waits_for_one_that_cannot_measure(tmp_path):
    """The failure travels.

    Fault: of several processes, the one that measures fails
    Happens: all of them raise; the others name the one whose error says why
    Kept: nothing has run
    """
    outcomes = run_processes(2, "measure", tmp_path / "run", cache=False, how="fail")
    assert all(outcome.code != 0 for outcome in outcomes)
    assert "INTERNAL: a kernel failed" in outcomes[0].text
    assert "process 0 failed, see its error" in outcomes[1].text


def test_processes_that_would_not_all_measure_are_told_so(tmp_path):
    outcomes = run_processes(2, "measure", tmp_path / "run", cache=False, how="odd")
    for outcome in outcomes:
        assert outcome.code != 0
        assert (
            "got other costs or options on process 1 than on process 0" in outcome.text
        )


def test_a_kill_of_the_measuring_process_ends_the_others(tmp_path):
    """They wait for its table.

    Fault: of several processes, the one that measures is killed
    Happens: the others end with an error; none hangs
    Kept: the results so far, in the cache
    """
    outcomes = run_processes(2, "measure", tmp_path / "run", cache=False, how="die")
    assert outcomes[0].code == -9 and outcomes[1].code != 0


def test_what_stands_in_the_way_of_measuring(monkeypatch):
    x = [np.zeros((4, 4), np.float32)]
    assert costs_module.obstacle(x, None) == ""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    assert costs_module.obstacle(x, mesh) == ""
    assert costs_module.obstacle(x, mesh.abstract_mesh) == "the mesh has no devices"
    shape = [jax.ShapeDtypeStruct((4, 4), np.float32)]
    assert "abstract" in costs_module.obstacle(shape, mesh)
    # As if some of the mesh's devices were another process's, and a third had none.
    monkeypatch.setattr(costs_module, "spans_processes", lambda mesh: True)
    assert costs_module.obstacle(x, mesh) == ""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert "processes [0], neither one's own nor all" in costs_module.obstacle(x, mesh)
