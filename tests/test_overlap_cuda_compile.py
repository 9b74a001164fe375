"""Whether the exchange hides, in train steps compiled for GPUs that are not there."""

import dataclasses
import math

import numpy as np
import pytest
from jax.sharding import Mesh

from dmuon_jax.proof import audit
from dmuon_jax.proof.expected import expect
from dmuon_jax.proof.models import model_named
from dmuon_jax.proof.steps import Cluster, compile_step
from dmuon_jax.proof.topology import compile_devices

pytestmark = pytest.mark.cuda_compile


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange in a compiled step, microseconds of the two-stream model."""

    collectives: tuple
    events: tuple
    iteration_us: float

    @property
    def total_us(self):
        return sum(event.duration_us for event in self.events)

    @property
    def exposed_us(self):
        return sum(event.exposed_us for event in self.events)


def exchange_of(found):
    def is_exchange(item):
        return "/to_owners/" in item.op_name or "/from_owners/" in item.op_name

    events = found.timeline.events
    iteration = [e for e in events if "/newton_schulz/" in e.op_name]
    assert all(event.lane == "compute" for event in iteration)
    return Exchange(
        collectives=tuple(filter(is_exchange, found.collectives)),
        events=tuple(e for e in events if e.lane == "communication" and is_exchange(e)),
        iteration_us=sum(event.duration_us for event in iteration),
    )


def step_of(model, optimizer="dmuon", **axes):
    """A step with clipping on a mesh of such axes."""
    sizes = tuple(axes.values())
    count = math.prod(sizes)
    try:
        devices = compile_devices("h200", count)
    except NotImplementedError as error:
        pytest.skip(str(error))
    cluster = Cluster(Mesh(np.array(devices).reshape(sizes), tuple(axes)), "h200")
    return compile_step(model_named(model), cluster, optimizer, (count, 4096), clip=True)


@pytest.fixture(scope="module", params=[8, 64], ids=["1x8", "8x8"])
def step(request):
    """A step of qwen2.5-1.5b: its plan, its audit, its exchange."""
    step = step_of("qwen2.5-1.5b", fsdp=request.param)
    found = audit(step.compiled, plan=step.plan, device="h200")
    return step.plan, found, exchange_of(found)


def test_exchange_is_what_the_plan_says(step):
    plan, found, exchange = step
    assert plan.num_waves >= 3
    assert len(exchange.collectives) == plan.exchange_bytes.collectives
    assert sum(x.num_bytes for x in exchange.collectives) == plan.exchange_bytes.total
    assert not any(item.in_loop for item in exchange.collectives)
    assert found.flops.unknown_kernels == ()


def test_exchange_runs_beside_the_iteration(step):
    _, found, exchange = step
    iteration = {
        e.name for e in found.timeline.events if "/newton_schulz/" in e.op_name
    }
    # XLA makes those synchronous beside which it finds nothing to run.
    synchronous = [item for item in exchange.collectives if not item.asynchronous]
    assert len(synchronous) <= 1
    around = [e for e in exchange.events if iteration & set(e.hidden_by)]
    assert len(around) >= len(exchange.events) // 2


def test_exposed_exchange(step):
    """A tenth of the exchange at most on one node.

    There, none of 1.8 ms were exposed. On 8 nodes the exchange crosses network cards and
    takes 3.0 ms, a third of it EMPTY slots (28 and 56 matrices on 64 owners), beside 1.0 ms
    of iteration and 0.3 ms of passes over memory: 2.0 ms were exposed, and no order could
    do with less than 1.7.
    """
    plan, _, exchange = step
    most = 0.1
    if plan.mesh.num_devices == 64:
        assert exchange.total_us > 2 * exchange.iteration_us
        most = 0.72
    assert exchange.exposed_us <= most * exchange.total_us


@pytest.mark.parametrize(("model", "most"), [("qwen2.5-1.5b", 0.1), ("qwen2.5-7b", 0.2)])
def test_owners_within_their_node_hide_the_exchange_on_eight_nodes(model, most):
    """Of the larger model's, jax 0.11.2 exposes 16 %, jax 0.12 exposes 7 %."""
    step = step_of(model, "dmuon-local", data=8, fsdp=8)
    assert step.plan.owner_axes == ("fsdp",)
    exchange = exchange_of(audit(step.compiled, plan=step.plan, device="h200"))
    assert len(exchange.collectives) == step.plan.exchange_bytes.collectives > 0
    assert exchange.exposed_us <= most * exchange.total_us


def test_clock_of_owners_that_take_turns():
    """Of the larger model's matrices no device computes one of every kind."""
    step = step_of("qwen2.5-7b", fsdp=64)
    plan = step.plan
    slowest = audit(step.compiled, device="h200", scope="newton_schulz")
    found = audit(step.compiled, device="h200", scope="newton_schulz", plan=plan)
    several = [number for number, x in enumerate(plan.buckets) if len(x.branches) > 1]
    path = "jit(step)/shard_map/newton_schulz/bucket"
    names = sorted(item.op_name for item in found.flops.conditionals)
    assert names == [f"{path}{number}/cond" for number in several] and names
    # Tiles on the diagonal of symmetric products and EMPTY slots of small matrices.
    assert 1.0 <= found.redundancy < 1.05
    assert slowest.scope_mean_flops / found.ideal_flops > 1.5
    # Every product is a kernel's that computes half; all of it would be this much.
    whole = expect(plan).ideal_flops
    assert found.ideal_flops < 0.8 * whole
    assert found.step_us < slowest.step_us
    most = exchange_of(slowest).iteration_us
    assert exchange_of(found).iteration_us < 0.8 * most
