"""A state outlives its mesh: saved with Orbax, continued on others, and by optax."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon, plan_owners, state_shardings
from tests.references import relative

SHAPES = {
    "rows": (16, 10),
    "columns": (14, 8),
    "stack": (3, 8, 6),
    "whole": (14, 10),  # over 4 devices neither side divides
    "bias": (14,),
}
STACK = optax.contrib.MuonDimensionNumbers(1, 2)
MATRIX = optax.contrib.MuonDimensionNumbers(0, 1)
DIMS = {
    "rows": MATRIX,
    "columns": MATRIX,
    "stack": STACK,
    "whole": MATRIX,
    "bias": None,
}
OPTIONS = dict(
    weight_decay=0.1,
    ns_steps=2,
    muon_weight_dimension_numbers=DIMS,
)
SPECS = {"rows": P("x"), "columns": P(None, "x"), "stack": P(None, "x"), "whole": P()}
TWO = {"rows": P(None, "b"), "columns": P("a", "b"), "stack": P(None, "b", "a")}
# Mesh axes, specs and options of the run that continues.
RESUMED = {
    "same": ({"x": 4}, SPECS, {}),
    "another plan": ({"x": 4}, SPECS, {"owner_axes": ()}),
    "two devices": ({"x": 2}, SPECS, {}),
    "eight devices": ({"x": 8}, SPECS, {}),
    "two axes": ({"a": 2, "b": 2}, TWO, {}),
    "one device": ({"x": 1}, SPECS, {}),
}


def values(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def shardings_on(axes, specs, kind):
    size = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:size]).reshape(*axes.values())
    mesh = Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))
    found = {}
    for name, shape in SHAPES.items():
        spec = specs.get(name, P())
        if AxisType.Explicit == kind:
            spec = P(*spec, *(None,) * (len(shape) - len(spec)))
        found[name] = NamedSharding(mesh, spec)
    return found


def typed(shardings):
    """Abstract parameters."""
    return {
        name: jax.ShapeDtypeStruct(SHAPES[name], np.float32, sharding=s)
        for name, s in shardings.items()
    }


def step_of(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, params, state, shardings, seeds):
    step = step_of(tx)
    for seed in seeds:
        params, state = step(params, state, jax.device_put(values(seed), shardings))
    return params, state


def targets(tx, shardings, options):
    """What Orbax restores to: types of parameters and state."""
    params = typed(shardings)
    plan = plan_owners(params, muon_weight_dimension_numbers=DIMS, **options)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        state_shardings(tx, params, plan),
    )
    return params, state


def save(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def restore(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, tree)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three steps on four devices, saved; and the uninterrupted fourth and fifth."""
    folder = tmp_path_factory.mktemp("state") / "three"
    shardings = shardings_on({"x": 4}, SPECS, AxisType.Auto)
    params = jax.device_put(values(0), shardings)
    tx = dmuon(0.05, **OPTIONS)
    params, state = run(tx, params, tx.init(params), shardings, (1, 2, 3))
    save(folder, (params, state))
    return folder, run(tx, params, state, shardings, (4, 5))


@pytest.mark.parametrize("name", RESUMED)
def test_steps_after_a_restore_equal_the_uninterrupted_run(saved, name):
    """Owners are not part of the state.

    Fault: a run goes on with another number of devices, another mesh or another plan
    Happens: the checkpoint is restored as it is
    Kept: parameters and state; later steps equal those of the uninterrupted run
    """
    folder, (want_params, want_state) = saved
    axes, specs, options = RESUMED[name]
    kind = AxisType.Explicit if name == "eight devices" else AxisType.Auto
    shardings = shardings_on(axes, specs, kind)
    tx = dmuon(0.05, param_shardings=shardings, **OPTIONS, **options)
    params, state = restore(folder, targets(tx, shardings, options))
    placed = jax.tree.map(lambda x: x.sharding, state)
    params, state = run(tx, params, state, shardings, (4, 5))
    limit = 0.0 if name == "same" else 1e-5
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path((params, state)),
        jax.tree.leaves((want_params, want_state)),
        strict=True,
    ):
        assert x.shape == y.shape and x.dtype == y.dtype, path
        assert relative(x, y) <= limit, (jax.tree_util.keystr(path), relative(x, y))
    after = jax.tree.map(lambda x: x.sharding, state)
    assert jax.tree.leaves(placed) == jax.tree.leaves(after)


def test_the_state_has_no_trace_of_mesh_or_plan(saved):
    _, (params, state) = saved
    host = jax.tree.map(np.asarray, params)
    theirs = jax.eval_shape(optax.contrib.muon(0.05, **OPTIONS).init, host)
    assert jax.tree.structure(theirs) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(theirs), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)


def test_a_checkpoint_of_optax_is_continued_and_given_back(tmp_path):
    # Reference: five steps of optax on one device.
    theirs = optax.contrib.muon(0.05, **OPTIONS)
    one = jax.tree.map(lambda _: jax.devices()[0], values(0))
    start = jax.device_put(values(0))
    params, state = run(theirs, start, theirs.init(start), one, (1, 2))
    save(tmp_path / "optax", (params, state))
    want = run(theirs, params, state, one, (3, 4))
    # Step 3 is ours, on four devices; step 4 is theirs again.
    shardings = shardings_on({"x": 4}, SPECS, AxisType.Auto)
    tx = dmuon(0.05, param_shardings=shardings, method="direct", **OPTIONS)
    params, state = restore(tmp_path / "optax", targets(tx, shardings, {}))
    params, state = run(tx, params, state, shardings, (3,))
    save(tmp_path / "ours", (params, state))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), want
    )
    params, state = restore(tmp_path / "ours", like)
    got = run(theirs, params, state, one, (4,))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(x, y) <= 1e-5
