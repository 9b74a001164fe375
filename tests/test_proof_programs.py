"""Audits of real programs: CPU compiled here, GPU and TPU texts from tests/data.

All four are built from one recipe on a mesh (a=2, b=4): a scan of five matmuls with an
all-reduce, a switch of none, one or two matmuls, two all-to-alls, an all-gather, a
reduce-scatter and a permutation. So FLOPs and bytes are known by hand.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax.proof import AuditError, audit

DATA = Path(__file__).parent / "data"
# Rows of x on one device, width of x, and the stack [3, M, L].
N, M, L = 512, 1024, 2048
SWITCH = (0.0, 2.0 * N**3, 4.0 * N**3)
STACK = 3 * 4.0 * M * M * L
KINDS = {
    # kind: (itemsize-free elements of its buffer, group size, executions)
    "all-reduce": (N * N, 4, 5),
    "all-gather": (2 * N * N, 2, 1),
    "reduce-scatter": (2 * N * N, 4, 1),
    "collective-permute": (N * N // 2, 2, 1),
}


def program(x, w):
    """The recipe without the stack, on blocks."""

    def body(carry, _):
        return jnp.tanh(jax.lax.psum(carry @ w, "b")), None

    x, _ = jax.lax.scan(body, x, None, length=5)
    branch = jax.lax.axis_index("b") % 3
    x = jax.lax.switch(branch, [lambda y: y, lambda y: y @ w, lambda y: (y @ w) @ w], x)
    x = jax.lax.all_to_all(x, "b", 0, 0, tiled=True)
    x = jax.lax.all_gather(x, "a", axis=0, tiled=True)
    x = jax.lax.psum_scatter(x, "b", tiled=True)
    return jax.lax.ppermute(x, "b", [(0, 1), (1, 0)])


def on_cpu(function, *arguments):
    """Compiled `function` on blocks; arguments are (shape, spec)."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    specs = tuple(spec for _, spec in arguments)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=P(("a", "b")), check_vma=False
    )
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in arguments
    ]
    return jax.jit(mapped).lower(*shapes)


@pytest.fixture(scope="module")
def lowered():
    return on_cpu(program, ((1024, 2048), P("a", "b")), ((N, N), P()))


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


def test_cpu_program(compiled):
    report = audit(compiled)
    assert report.num_devices == 8
    assert report.dot_flops == 5 * 2 * N**3 + SWITCH[2]
    assert [item.branches for item in report.flops.conditionals] == [SWITCH]
    assert report.flops.unknown_loops == ()
    found = {item.kind: item for item in report.collectives}
    assert len(report.collectives) == len(found)
    assert set(found) == {*KINDS, "all-to-all"}
    for kind, (elements, group, times) in KINDS.items():
        item = found[kind]
        assert (item.num_bytes, item.group_size, item.times) == (
            4 * elements,
            group,
            times,
        )
        assert item.in_loop == (kind == "all-reduce")
        assert not item.asynchronous and not item.in_branch
    assert found["all-to-all"].num_bytes == 4 * N * N
    assert found["all-to-all"].groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["all-gather"].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["collective-permute"].groups == ((0, 1), (4, 5))
    elements = 5 * N * N + 2 * N * N + 2 * N * N + N * N // 2 + N * N
    assert report.collective_bytes == 4 * elements
    assert "all_to_all" in found["all-to-all"].op_name


def test_memory_is_what_jax_says(compiled):
    report = audit(compiled)
    assert report.memory.argument_bytes == 4 * (N * N + N * N)
    assert report.memory.output_bytes == 4 * N * N // 2
    assert report.peak_bytes == 4 * (2 * N * N + N * N // 2) + report.memory.temp_bytes


def test_lowered_compiled_and_text_agree(lowered, compiled):
    reports = [audit(lowered), audit(compiled), audit(compiled.as_text())]
    assert reports[0].collectives == reports[1].collectives == reports[2].collectives
    assert reports[2].peak_bytes is None
    with pytest.raises(TypeError, match="program must be compiled"):
        audit(lambda x: x)


def test_check_names_the_operation(compiled):
    report = audit(compiled, device="h200", ideal_flops=5 * 2 * N**3)
    assert report.check(collectives_in_loops=1, redundancy=1.4) is report
    with pytest.raises(AuditError, match=r"collectives_in_loops.*got 1(.|\n)*psum"):
        report.check()
    with pytest.raises(AuditError, match=r"redundancy .* 1\.05, got 1\.4(.|\n)*branch"):
        report.check(redundancy=1.05, collectives_in_loops=None)
    with pytest.raises(AuditError, match=r"exposed_fraction(.|\n)*all-to-all"):
        report.check(exposed_fraction=0.1, collectives_in_loops=None)
    with pytest.raises(AuditError, match=r"synchronous must be at most 2, got 5"):
        report.check(synchronous=2, collectives_in_loops=None)
    bare = audit(compiled)
    with pytest.raises(ValueError, match="needs an audit that was given device"):
        bare.check(exposed_fraction=0.1, collectives_in_loops=None)
    with pytest.raises(ValueError, match="needs an audit that was given ideal_flops"):
        bare.check(redundancy=1.05, collectives_in_loops=None)
    with pytest.raises(ValueError, match="needs an audit that was given plan"):
        bare.check(bytes_ratio=1.05, collectives_in_loops=None)
    with pytest.raises(ValueError, match="scope must hold matmuls, got none in 'ns'"):
        audit(compiled, scope="ns", ideal_flops=1.0).check(redundancy=1.05)


def test_branch_weights(compiled):
    name = audit(compiled).flops.conditionals[0].name
    # Of four devices, two run branch 0, one branch 1, one branch 2.
    report = audit(compiled, ideal_flops=1.0, branch_weights={name: (0.5, 0.25, 0.25)})
    assert report.redundancy == 5 * 2 * N**3 + 0.25 * 2 * N**3 + 0.25 * 4 * N**3
    assert report.dot_flops == 5 * 2 * N**3 + 4 * N**3


def test_summary_and_json(compiled):
    report = audit(compiled, device="cpu", ideal_flops=1e9)
    text = report.summary()
    for word in ("all-to-all", "reduce-scatter", "loop", "redundancy", "peak memory"):
        assert word in text
    record = json.loads(report.to_json())
    assert record["collective_bytes"] == report.collective_bytes
    assert record["device"] == "cpu"
    assert len(record["collectives"]) == 5
    assert record["collectives"][0].keys() >= {"kind", "num_bytes", "op_name", "times"}


@pytest.mark.parametrize("name", ["gpu", "gpu_cublas", "tpu"])
def test_stored_programs(name):
    text = (DATA / f"step_{name}.hlo.txt").read_text()
    report = audit(text, scope="newton_schulz")
    assert report.num_devices == 8
    # The stack is multiplied twice (g = x x', g x), in and out of the scope.
    assert report.scope_flops == STACK
    assert report.dot_flops == 5 * 2 * N**3 + SWITCH[2] + 2 * STACK
    assert [item.branches for item in report.flops.conditionals] == [SWITCH]
    assert report.flops.unknown_loops == () == report.flops.unknown_kernels
    singles = [item for item in report.collectives if item.kind != "all-to-all"]
    assert sorted(
        (item.kind, item.num_bytes, item.group_size, item.times) for item in singles
    ) == sorted((kind, 2 * size, *rest) for kind, (size, *rest) in KINDS.items())
    exchanges = [item for item in report.collectives if item.kind == "all-to-all"]
    assert sorted((item.num_bytes, item.group_size) for item in exchanges) == [
        (2 * N * N, 4),
        (2 * 3 * M * L, 8),
    ]
    assert [item.kind for item in report.collectives_in_loops] == ["all-reduce"]
    gather = next(item for item in singles if item.kind == "all-gather")
    assert gather.asynchronous
    # The GPU backend marks the last all-to-all's start as synchronous.
    synchronous = {"gpu": 1, "gpu_cublas": 1, "tpu": 4}
    assert len(report.synchronous) == synchronous[name]


@pytest.mark.parametrize("name, device", [("gpu", "h200"), ("tpu", "tpu-v5e")])
def test_compute_between_start_and_done(name, device):
    report = audit((DATA / f"step_{name}.hlo.txt").read_text(), device=device)
    events = {event.kind: event for event in report.timeline.events}
    gather = events["all-gather"]
    assert gather.exposed_us == 0 and len(gather.hidden_by) >= 2
    compute = {event.name: event for event in report.timeline.events}
    assert any(compute[item].flops for item in gather.hidden_by)
    exposed = sum(e.exposed_us * e.times for e in report.timeline.events)
    assert report.exposed_us == pytest.approx(exposed)
    busy_us = report.timeline.total_us("compute")
    assert report.step_us == pytest.approx(busy_us + exposed)


def test_flops_against_the_cost_analysis_of_xla():
    """Straight-line matmuls of several forms, counted by XLA itself."""

    def products(x, y, z):
        a = jnp.einsum("bij,bkj->bik", x, y)
        return jnp.einsum("bik,klm->bilm", a, z).sum()

    shapes = [(3, 32, 48), (3, 40, 48), (40, 5, 7)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(products).lower(*shapes).compile()
    report = audit(compiled)
    assert report.dot_flops == 2 * 3 * 32 * 40 * 48 + 2 * 3 * 32 * 40 * 35
    # XLA counts additions of the sum as well.
    assert 0 <= compiled.cost_analysis()["flops"] - report.dot_flops < 3 * 32 * 35 * 2


def test_nested_loops_multiply():
    def inner(x, _):
        return x @ x, None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=3)[0], None

    def run(x):
        return jax.lax.scan(outer, x, None, length=4)[0]

    def data_dependent(x):
        return jax.lax.while_loop(lambda y: y[0, 0] < 1.0, lambda y: y @ y, x)

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert audit(jax.jit(run).lower(shape)).dot_flops == 12 * 2 * 8**3
    report = audit(jax.jit(data_dependent).lower(shape))
    assert report.dot_flops == 2 * 8**3
    assert len(report.flops.unknown_loops) == 1
    assert "loops of unknown length" in report.summary()


def test_collective_in_a_branch():
    def run(x):
        branch = jax.lax.axis_index("a")
        return jax.lax.cond(branch == 0, lambda y: jax.lax.psum(y, "b"), lambda y: y, x)

    report = audit(on_cpu(run, ((16, 4), P(("a", "b")))))
    assert [(item.kind, item.in_branch) for item in report.collectives] == [
        ("all-reduce", True)
    ]
