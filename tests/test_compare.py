"""Owner axes by price, the memory of owners, and what lies idle."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import Plan, dmuon, plan_owners
from dmuon_jax.cli import main
from dmuon_jax.matrices import MeshShape
from dmuon_jax.planning.build import make_plan
from dmuon_jax.planning.clusters import Placement, cluster_settings, model_leaves
from dmuon_jax.planning.compare import (
    NEAR,
    cheapest_plan,
    owner_axes_candidates,
)
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.problem import MemoryLimitError
from dmuon_jax.planning.workloads import Matrices, Workload
from tests.references import orthogonalized, relative

HSDP = MeshShape(("data", "fsdp"), (4, 8))
ALL, NODE = ("data", "fsdp"), ("fsdp",)


@dataclasses.dataclass(frozen=True)
class PerMatrix:
    """The same time for each matrix."""

    each_us: float

    def time_us(self, shape, batch, method):
        return self.each_us * batch


def leaves_of(count, fsdp=NODE, shape=(512, 1024), mesh=HSDP):
    workload = Workload("w", count, (Matrices("w", shape, count),))
    return model_leaves(workload, Placement(mesh, fsdp))


def settings_for(each_us, **options):
    return cluster_settings(DEVICES["h200"], HSDP, cost=PerMatrix(each_us), **options)


def test_hsdp_pays_for_gathers_and_for_empty_slots():
    """9 matrices on 4 replicas of 8: one slot over all axes, two within a replica."""
    leaves, size = leaves_of(9), 512 * 1024 * 2
    inside, across = (bandwidth for _, bandwidth in settings_for(1.0).bandwidths[::-1])
    for each_us, cheaper in ((1000.0, ALL), (1.0, NODE)):
        plan = cheapest_plan(leaves, HSDP, settings_for(each_us))
        assert plan.owner_axes == cheaper
        (other,) = plan.alternatives
        found = {plan.owner_axes: plan, other.owner_axes: other}
        assert set(found) == {ALL, NODE}
        # Within a replica: both ways a block for each of 8, two slots, seven leave.
        assert found[NODE].makespan_us == 2 * each_us
        assert found[NODE].exchange_us == pytest.approx(2 * 2 * size * 7 / 8 / inside)
        # Over all: one slot each, EMPTY for 23 of 32; results gathered over the replicas.
        assert found[ALL].makespan_us == each_us
        moved, gathered = 2 * size * 7 / 8 / inside, 4 * size * 3 / 4 / across
        assert found[ALL].exchange_us == pytest.approx(moved + gathered)
        assert found[cheaper].objective_us == min(
            x.objective_us for x in found.values()
        )


def test_each_price_is_that_of_the_plan_itself():
    leaves = leaves_of(21)
    best = cheapest_plan(leaves, HSDP, settings_for(30.0))
    for each in (best, *best.alternatives):
        alone = make_plan(
            leaves,
            HSDP,
            dataclasses.replace(settings_for(30.0), owner_axes=each.owner_axes),
        )
        assert (alone.makespan_us, alone.exchange_us) == (
            each.makespan_us,
            each.exchange_us,
        )
        assert alone.objective_us >= best.objective_us
    assert dataclasses.replace(best, alternatives=()) == make_plan(
        leaves,
        HSDP,
        dataclasses.replace(settings_for(30.0), owner_axes=best.owner_axes),
    )


def test_the_report_says_which_is_cheaper_and_by_how_much():
    plan = cheapest_plan(leaves_of(9), HSDP, settings_for(1.0))
    (other,) = plan.alternatives
    more = other.objective_us - plan.objective_us
    text = plan.summary()
    assert (
        f"owners over ('fsdp',): {plan.objective_us / 1e3:.3f} ms of makespan and exchange"
        in text
    )
    assert (
        f"over ('data', 'fsdp') {other.objective_us / 1e3:.3f} ms: {more / 1e3:.3f} ms, "
        f"{more / plan.objective_us:.1%} more" in text
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.alternatives == plan.alternatives
    assert "costs: given by a PerMatrix" in text
    alone = make_plan(leaves_of(9), HSDP, settings_for(1.0))
    assert alone.alternatives == () and "owners over" not in alone.summary()


def test_candidates():
    three = MeshShape(("pod", "data", "fsdp"), (2, 4, 8))
    leaves = leaves_of(3, NODE, mesh=three)
    speeds = (("pod", 1.0), ("data", 5.0), ("fsdp", 5.0))
    assert owner_axes_candidates(leaves, three, speeds) == (
        ("pod", "data", "fsdp"),
        ("data", "fsdp"),
        ("fsdp",),
    )
    # Slow axes and replicas are left out wherever they stand; size 1 makes no difference.
    odd = MeshShape(("fsdp", "one", "pod"), (8, 1, 2))
    leaves = leaves_of(3, NODE, mesh=odd)
    speeds = (("fsdp", 5.0), ("one", 5.0), ("pod", 1.0))
    assert owner_axes_candidates(leaves, odd, speeds) == (
        ("fsdp", "one", "pod"),
        ("one", "pod"),
        ("fsdp", "one"),
    )
    nothing = MeshShape((), ())
    assert owner_axes_candidates((), nothing) == ((),)


def test_memory_forbids_what_few_owners_would_have_to_hold():
    leaves, size = leaves_of(9), 512 * 1024 * 2
    capped = settings_for(1.0, max_owner_bytes=size)
    plan = cheapest_plan(leaves, HSDP, capped)
    assert plan.owner_axes == ALL and plan.alternatives == ()
    with pytest.raises(
        MemoryLimitError, match="max_owner_bytes must hold an even spread"
    ):
        cheapest_plan(leaves, HSDP, settings_for(1.0, max_owner_bytes=size - 1))
    with pytest.raises(ValueError, match="max_owner_bytes must hold"):
        make_plan(leaves, HSDP, settings_for(1.0, max_owner_bytes=size - 1))


def test_the_memory_limit_changes_the_plan():
    """Small matrices would fill up the owners that have no large one."""
    mesh = MeshShape(("fsdp",), (2,))
    workload = Workload(
        "w", 1, (Matrices("a", (64, 64), 1), Matrices("b", (32, 32), 8))
    )
    leaves = model_leaves(workload, Placement(mesh, NODE))

    @dataclasses.dataclass(frozen=True)
    class Area:
        def time_us(self, shape, batch, method):
            return batch * shape[0] * shape[1] / 100

    def counts(limit):
        plan = make_plan(
            leaves,
            mesh,
            cluster_settings(DEVICES["cpu"], mesh, cost=Area(), max_owner_bytes=limit),
        )
        return sorted(max(group.counts) for group in plan.groups)

    assert counts(None)[-1] > 4
    assert counts(4 * (64 * 64 + 4 * 32 * 32)) == [1, 4]


def arrays():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ALL)
    rng = np.random.default_rng(0)
    host = {f"{i}": rng.normal(size=(16, 24)).astype(np.float32) for i in range(3)}
    return host, jax.device_put(host, NamedSharding(mesh, P("fsdp", None)))


@pytest.mark.parametrize(("each_us", "axes"), [(1e6, ALL), (1e-3, NODE)])
def test_dmuon_with_the_cheapest_axes_gives_the_same_update(each_us, axes):
    host, params = arrays()
    # Four matrices would have to wait for one another in a replica of four owners, had
    # they not all one; five of three do.
    costs = PerMatrix(each_us)
    plan = plan_owners(params, owner_axes="auto", costs=costs)
    if axes == NODE:
        assert plan.owner_axes == NODE
    tx = dmuon(1.0, ns_steps=1, owner_axes="auto", costs=costs)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    for name, x in host.items():
        want = -((24 / 16) ** 0.5) * orthogonalized(
            x, (0, 1), ((3.4445, -4.775, 2.0315),)
        )
        assert relative(updates[name], want) <= 1e-4
    given = dmuon(1.0, plan=plan, owner_axes="auto")
    given.init(params)


def test_wrong_words_and_limits_are_refused():
    with pytest.raises(ValueError, match="owner_axes must be None, 'auto' or a tuple"):
        dmuon(0.1, owner_axes="data")
    with pytest.raises(ValueError, match="max_owner_bytes must be positive, got 0"):
        dmuon(0.1, max_owner_bytes=0)
    _, params = arrays()
    words = "even spread, which takes [0-9]+ bytes of slots, EMPTY ones included, got 1"
    with pytest.raises(ValueError, match=f"max_owner_bytes must hold an {words}$"):
        dmuon(0.1, max_owner_bytes=1).init(params)


def test_idleness_is_counted_in_work_that_is_needed():
    mesh = MeshShape(("fsdp",), (8,))
    settings = cluster_settings(DEVICES["h200"], mesh, cost=PerMatrix(1.0))
    plan = make_plan(leaves_of(6, mesh=mesh), mesh, settings)
    # One matrix takes so little that all devices compute a slot, EMPTY or not.
    assert plan.buckets[0].padded and set(plan.owner_load_us) == {1.0}
    assert plan.idle_share == pytest.approx(2 / 8)
    assert (
        "idle or on EMPTY slots: 25.0% of what owners could do; 2 of 8 devices own no "
        "matrix (one matrix is never split over owners)" in plan.summary()
    )
    rows = [line for line in plan.summary().splitlines() if " ms #" in line]
    owned = plan.groups[0].counts
    assert [row.endswith("(owns no matrix)") for row in rows] == [not n for n in owned]
    wide = MeshShape(("fsdp",), (32,))
    settings = cluster_settings(DEVICES["h200"], wide, cost=PerMatrix(1.0))
    summary = make_plan(leaves_of(9, mesh=wide), wide, settings).summary()
    notes = re.findall(r"\((\d) of 2 own no matrix\)", summary)
    assert sum(map(int, notes)) == 32 - 9 and "the busiest of each 2)" in summary
    settings = cluster_settings(DEVICES["h200"], mesh, cost=PerMatrix(1.0))
    full = make_plan(leaves_of(16, mesh=mesh), mesh, settings)
    assert full.idle_share == 0 and "own no matrix" not in full.summary()
    nothing = plan_owners({"bias": jnp.zeros(3)})
    assert nothing.idle_share == 0


def test_the_summary_has_one_row_for_each_shape_whatever_the_waves():
    mesh = MeshShape(("fsdp",), (4,))
    settings = cluster_settings(DEVICES["h200"], mesh, max_wave_bytes=8 * 512 * 1024)
    plan = make_plan(leaves_of(20, mesh=mesh), mesh, settings)
    assert plan.num_waves > 1 and len(plan.buckets) > len({b.shape for b in plan.buckets})
    table = plan.summary().split("dtype\n")[1].split("  idle")[0].splitlines()
    rows = [line.split() for line in table]
    assert len({(shape, *kind) for shape, _, _, *kind in rows}) == len(rows)
    owned = np.sum([group.counts for group in plan.groups], axis=0)
    spread = f"{min(owned)}-{max(owned)}" if len(set(owned)) > 1 else f"{owned[0]}"
    assert [(row[1], row[2]) for row in rows] == [("20", spread)]


def test_a_plan_for_one_device_says_that_no_mesh_was_given():
    like = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    told = "on 1 device: no mesh of several was given, nor seen"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    one = NamedSharding(mesh, P("x"))
    for plan in (plan_owners(like), plan_owners(like, mesh, param_shardings=one)):
        assert told in plan.summary().splitlines()[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    plan = plan_owners(like, param_shardings=NamedSharding(mesh, P("x")))
    assert "on 2 devices (x=2)" in plan.summary()


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.json"
    path.write_text(
        json.dumps({"matrices": [{"name": "w", "shape": [8, 16], "count": 3}]})
    )
    return path


def test_plan_command_compares_and_names_its_costs(capsys, tiny):
    arguments = ["plan", "--shapes", tiny, "--mesh", "data=4,fsdp=8"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "costs: roofline of h200 in float16" in out
    assert "owner_axes=('fsdp',): update" in out and "if nothing hides it" in out
    record = json.loads(run(capsys, *arguments, "--json")[1])
    assert record["costs"] == "roofline of h200 in float16"
    assert [each["owner_axes"] for each in record["alternatives"]] == [["fsdp"]]
    assert 0 < record["idle_share"] < 1
    auto = json.loads(run(capsys, *arguments, "--owner-axes", "auto", "--json")[1])
    (other,) = record["alternatives"]
    prices = [x["makespan_us"] + x["exchange_us"] for x in (record, other)]
    assert auto["makespan_us"] + auto["exchange_us"] <= (1 + NEAR) * min(prices)
    assert len(auto["alternatives"]) == 1


def test_among_near_prices_the_exchange_may_hide():
    """One axis less saves 1 % of the sum, but costs more than twice the iteration."""
    leaves = leaves_of(64)
    over = {
        axes: make_plan(
            leaves, HSDP, dataclasses.replace(settings_for(1.0), owner_axes=axes)
        )
        for axes in (ALL, NODE)
    }
    extra_us = over[ALL].exchange_us - over[NODE].exchange_us
    slots = {axes: plan.makespan_us for axes, plan in over.items()}
    assert extra_us > 0 and slots[NODE] > 2 * slots[ALL]
    for share, chosen in ((0.98, ALL), (0.5, NODE)):
        each_us = share * extra_us / (slots[NODE] - slots[ALL])
        plan = cheapest_plan(leaves, HSDP, settings_for(each_us))
        assert plan.owner_axes == chosen
        assert over[NODE].exchange_us < over[ALL].exchange_us


def test_plan_command_measures_only_the_device_it_plans_for(
    capsys, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "dmuon_jax.measure.time_update_us", lambda point, *_: 7.0 * point.batch
    )
    arguments = ["plan", "--shapes", tiny, "--mesh", "fsdp=2", "--costs", "measured"]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "") and "got cpu here for --device h200" in err
    code, out, err = run(capsys, *arguments, "--device", "cpu")
    assert code == 0 and "costs: measured on cpu of" in out
    assert "timing 4 batches on cpu" in err and "[4/4]" in err
    assert "makespan 0.014 ms" in out
    code, out, err = run(capsys, *arguments, "--device", "cpu")
    assert (code, err) == (0, "")
    findings = json.loads(run(capsys, "doctor", "--json")[1])["findings"]
    (kept,) = [each for each in findings if each["name"] == "measurements"]
    assert kept["state"] == "ok" and kept["detail"].startswith("4 entries, ")
    assert kept["detail"].endswith(f"KiB in {tmp_path / 'cache' / 'dmuon_jax'}")


def test_plan_command_reads_a_table(capsys, tiny, tmp_path):
    from dmuon_jax.planning.cost import TableCost, Timing

    timings = tuple(Timing((8, 16), m, 1, 5.0) for m in ("direct", "gram"))
    path = tmp_path / "table.json"
    path.write_text(TableCost(timings, "my machine").to_json())
    arguments = ["plan", "--shapes", tiny, "--mesh", "fsdp=2", "--costs", path]
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "costs: my machine" in out and "makespan 0.010 ms" in out
    code, _, err = run(capsys, *arguments[:-1], "nowhere.json")
    assert code == 2 and "--costs must be a readable file" in err
    limited = [*arguments, "--max-owner-mib", "1"]
    assert run(capsys, *limited)[0] == 0
