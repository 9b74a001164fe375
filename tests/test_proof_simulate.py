"""Simulated training steps on virtual CPU devices, of a model small enough to compile."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from dmuon_jax.planning.workloads import load_workload, workload_names
from dmuon_jax.proof.models import (
    CONFIGS,
    Model,
    Tower,
    is_matrix,
    model_named,
    parameter_shapes,
)
from dmuon_jax.proof.simulate import simulate
from dmuon_jax.proof.steps import Cluster, compile_step
from dmuon_jax.proof.topology import GPU_TARGETS, compile_devices, gpu_config, tpu_grid

LAYERS, WIDTH, WIDE, VOCABULARY, TOKENS = 3, 64, 128, 256, 16
MATRICES = {
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, 32),
    "v": (WIDTH, 32),
    "o": (WIDTH, WIDTH),
    "gate": (WIDTH, WIDE),
    "up": (WIDTH, WIDE),
    "down": (WIDE, WIDTH),
}
TINY = Model(
    name="tiny",
    towers=(Tower("layers", LAYERS, MATRICES, {}),),
    vocabulary=VOCABULARY,
    tied=False,
    head_size=16,
)


@pytest.fixture(scope="module")
def simulation():
    return simulate(
        TINY,
        {"data": 2, "fsdp": 4},
        "cpu",
        sequence=TOKENS,
        batch_per_device=2,
        optimizers=("adamw", "dmuon", "dmuon-local"),
    )


def test_flops_of_the_step_are_those_of_a_transformer(simulation):
    """Forward, forward again but for the last matrix, and twice that backward."""
    weights = sum(rows * columns for rows, columns in MATRICES.values())
    tokens = 2 * TOKENS
    layer = 2 * tokens * (4 * weights - WIDTH * WIDE)
    attention = 8 * 2 * 2 * WIDTH * TOKENS**2
    head = 3 * 2 * tokens * WIDTH * VOCABULARY
    adamw = simulation.runs[0].audit
    assert adamw.dot_flops == LAYERS * (layer + attention) + head
    assert adamw.flops.unknown_loops == ()


def test_weights_are_gathered_twice_and_reduced_once(simulation):
    weights = LAYERS * sum(rows * columns for rows, columns in MATRICES.values())
    found = {}
    for item in simulation.runs[0].audit.collectives:
        if item.in_loop and item.num_bytes >= 4 * WIDTH * 32:
            found[item.kind] = found.get(item.kind, 0) + item.run_bytes
    # XLA on CPU widens bf16 collectives to four bytes.
    assert found["all-gather"] == 2 * 4 * weights
    assert found.get("reduce-scatter", 0) + found.get("all-reduce", 0) >= 4 * weights


def test_dmuon_adds_an_exchange_and_no_loops(simulation):
    adamw, ours = (run.audit for run in simulation.runs[:2])
    kinds = [item.kind for item in ours.collectives]
    assert "all-to-all" in kinds
    assert len(ours.collectives_in_loops) == len(adamw.collectives_in_loops)
    assert ours.dot_flops > adamw.dot_flops
    assert simulation.ratio(simulation.runs[0]) == 1.0
    owners = [*ours.in_scope("to_owners"), *ours.in_scope("from_owners")]
    assert adamw.plan_bytes is None and adamw.imbalance_us == pytest.approx(0)
    assert ours.plan_bytes == sum(item.run_bytes for item in owners)
    split = simulation.runs[1].split_us()
    assert split["imbalance"] == ours.imbalance_us
    assert sum(split.values()) == pytest.approx(ours.step_us)


def test_owners_of_one_replica_repeat_the_work_and_stay_inside(simulation):
    adamw, ours, local = (run.audit for run in simulation.runs)
    spread, kept = (audit.in_scope("from_owners") for audit in (ours, local))
    assert {item.group_size for item in kept} == {4}
    assert any(item.kind == "all-gather" and item.group_size == 2 for item in spread)
    assert not any(item.kind == "all-gather" for item in kept)
    assert local.dot_flops > ours.dot_flops > adamw.dot_flops
    exchange = simulation.runs[2].exchange_us()
    assert 0 < exchange["exposed"] <= exchange["total"] < local.step_us
    assert simulation.runs[0].exchange_us() == {"total": 0, "exposed": 0}


def test_report(simulation):
    text = simulation.summary()
    assert "tiny on cpu (data=2, fsdp=4), 2 x 16 tokens" in text
    assert "layers as a scan" in text.replace("\n", " ")
    record = json.loads(simulation.to_json())
    names = [run["optimizer"] for run in record["runs"]]
    assert names == ["adamw", "dmuon", "dmuon-local"]
    assert record["mesh"] == {"data": 2, "fsdp": 4}


def test_optimizer_and_shape_that_do_not_fit():
    cluster = Cluster(Mesh(np.array(jax.devices()), ("fsdp",)), "cpu")
    with pytest.raises(ValueError, match="optimizer must be one of adamw, muon, dmuon"):
        compile_step(TINY, cluster, "sgd", (8, TOKENS), True)
    odd = dataclasses.replace(TINY, towers=(Tower("layers", 1, {"q": (9, 9)}, {}),))
    with pytest.raises(ValueError, match=r"must divide by 8 \(at q\)"):
        compile_step(odd, cluster, "adamw", (8, TOKENS), True)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_models_hold_the_matrices_of_their_workload(name):
    model, workload = model_named(name), load_workload(name)
    shapes = parameter_shapes(model)
    held = {}
    for tower, leaves in shapes.items():
        for role, leaf in leaves.items():
            if is_matrix(tower, role):
                count = math.prod(leaf.shape[:-2])
                held[leaf.shape[-2:]] = held.get(leaf.shape[-2:], 0) + count
    wanted = {}
    for item in workload.matrices:
        wanted[item.shape] = wanted.get(item.shape, 0) + item.count
    assert held == wanted


def test_models_that_cannot_be_run():
    assert "grug-moe-h100" in workload_names()
    with pytest.raises(NotImplementedError, match="model must be one of"):
        model_named("grug-moe-h100")
    with pytest.raises(ValueError, match="name must be one of"):
        model_named("gpt-17")


def test_devices_to_compile_for():
    assert compile_devices("cpu", 4) == jax.devices()[:4]
    with pytest.raises(ValueError, match="at most 8 CPUs, got 9"):
        compile_devices("cpu", 9)
    with pytest.raises(ValueError, match="must fill nodes of 8, got 12"):
        compile_devices("h200", 12)
    with pytest.raises(NotImplementedError, match="device must be one to compile for"):
        compile_devices("tpu-v5p", 8)
    assert [tpu_grid(count) for count in (4, 8, 16, 256)] == [
        "2x2",
        "2x4",
        "4x4",
        "16x16",
    ]
    with pytest.raises(ValueError, match="power of two"):
        tpu_grid(12)
    for name in GPU_TARGETS:
        assert gpu_config(name).count("{") == gpu_config(name).count("}")
