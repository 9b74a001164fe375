"""Gradients typed as still to be summed over devices are summed once, into place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon
from dmuon_jax.proof import audit
from tests.references import muon_updates, relative

# Axes of the mesh, those that the gradient is to be summed over, parameter's spec, axis types.
CASES = {
    "ddp": ({"data": 4}, {"data"}, P(None, None), "EE"),
    "fsdp": ({"data": 4}, {"data"}, P("data", None), "EE"),
    "tp": ({"data": 2, "model": 4}, {"data"}, P(None, "model"), "EE"),
    "fsdp and tp": ({"data": 2, "model": 4}, {"data"}, P("data", "model"), "EE"),
    "two axes": ({"data": 2, "model": 4}, {"data", "model"}, P(None, None), "EE"),
    "sum over the other": ({"data": 2, "model": 4}, {"model"}, P("data", None), "EE"),
    "model axis auto": ({"data": 2, "model": 4}, {"data"}, P(None, "model"), "EA"),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_of_the_sum(case):
    axes, summed, spec, letters = CASES[case]
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    mesh = Mesh(
        np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(
            *axes.values()
        ),
        tuple(axes),
        axis_types=tuple(kinds[x] for x in letters[: len(axes)]),
    )
    rng = np.random.default_rng(0)
    host = {"w": rng.normal(size=(16, 8)), "b": rng.normal(size=(8,))}
    host = {k: x.astype(np.float32) for k, x in host.items()}
    x = rng.normal(size=(32, 16)).astype(np.float32)
    y = rng.normal(size=(32, 8)).astype(np.float32)
    shardings = {"w": NamedSharding(mesh, spec), "b": NamedSharding(mesh, P(None))}
    params = jax.device_put(host, shardings)
    tx = dmuon(0.05, ns_steps=2, param_shardings=shardings)
    state = tx.init(params)
    columns = spec[1] if letters[:2] == "EE" and spec[1] not in summed else None

    @jax.jit
    def step(params, state, x, y):
        rows = tuple(sorted(summed))
        x, y = jax.sharding.reshard((x, y), P(rows, None))
        into = P(None, columns, unreduced=summed)
        grads = {
            "w": jnp.einsum("bi,bo->io", x, y, out_sharding=into),
            "b": jnp.einsum("bo->o", y, out_sharding=P(None, unreduced=summed)),
        }
        for grad in grads.values():
            assert jax.typeof(grad).sharding.spec.unreduced == summed
        return tx.update(grads, state, params)

    with jax.set_mesh(mesh):
        batch = jax.device_put((x, y), NamedSharding(mesh, P(None, None)))
        updates, state = step(params, state, *batch)
        compiled = step.lower(params, state, *batch).compile()
    (want, _), *_ = muon_updates(host["w"], [x.T @ y], (0, 1), rate=0.05, steps=2)
    assert relative(updates["w"], want) <= 1e-5
    # Adam's first step, with Nesterov momentum: the gradient's sign times a number.
    sizes = np.asarray(updates["b"]) / -np.sign(y.sum(axis=0))
    assert sizes[0] > 0.05
    assert relative(sizes, np.full(8, sizes[0])) <= 1e-4
    assert updates["w"].sharding.is_equivalent_to(shardings["w"], 2)
    # One reduction for each leaf (or for both in one), and nothing is gathered before it.
    sums = [c for c in audit(compiled).collectives if c.kind == "all-reduce"]
    assert 1 <= len(sums) <= 2
    assert "shard_map" not in {c.op_name for c in sums}
