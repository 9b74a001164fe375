"""``owner_axes``: along the axes that are left out, the iteration is repeated instead."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from dmuon_jax import dmuon, plan_owners
from dmuon_jax.proof import audit
from tests.layouts import TWO, make_case
from tests.references import muon_updates, relative

AXES = (("data", "fsdp"), ("fsdp",), ("data",), ())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_updates_are_equal_whatever_axes_have_owners(kind):
    case = make_case(TWO, kind, seed=0)
    names = list(case.params)[::4]
    shardings = {k: case.shardings[k] for k in names}
    params = jax.device_put({k: case.params[k] for k in names}, shardings)
    rng = np.random.default_rng(1)
    host = {k: rng.normal(size=x.shape).astype(np.float32) for k, x in params.items()}
    grads = jax.device_put(host, shardings)
    options = dict(
        muon_weight_dimension_numbers={k: case.dims[k] for k in names},
        momentum_shardings={k: x for k, x in case.momentum.items() if k in names},
    )
    for owner_axes in AXES:
        tx = dmuon(0.02, ns_steps=2, owner_axes=owner_axes, **options)
        plan = plan_owners(params, owner_axes=owner_axes, **options)
        assert plan.owner_axes == owner_axes
        free = {axis for layout in plan.layouts for axis in layout.layout.free}
        assert free == set(owner_axes)
        state = tx.init(params)
        program = jax.jit(tx.update).lower(grads, state, params).compile()
        updates, _ = program(grads, state, params)
        for name, x in host.items():
            (want, _), *_ = muon_updates(
                case.params[name], [x], case.dims[name], rate=0.02, steps=2
            )
            assert relative(updates[name], want) <= 1e-5, (owner_axes, name)
            target = case.shardings[name]
            assert updates[name].sharding.is_equivalent_to(target, x.ndim), name
        expected, found = plan.exchange_bytes, audit(program).collectives
        exchange = [item for item in found if "shard_map" in item.op_name]
        assert sum(item.run_bytes for item in exchange) == (
            expected.all_to_all + expected.all_gather
        )
        assert len(exchange) == expected.collectives

