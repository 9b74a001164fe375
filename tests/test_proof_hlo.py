"""The HLO reader on hand-written text: types, groups, loops, kernels, chains."""

import pytest

from dmuon_jax.proof import collectives, dot_flops, parse
from dmuon_jax.proof.groups import permute_groups, replica_groups
from dmuon_jax.proof.hlo import Shape, parse_instruction, parse_type, total_bytes
from dmuon_jax.proof.loops import trip_count


def module(entry, *others, header="is_scheduled=true, num_partitions=8"):
    """A module of an entry body and whole computations."""
    body = "\n".join(f"  {line}" for line in entry)
    blocks = "\n\n".join(others)
    return f"HloModule test, {header}\n\n{blocks}\n\nENTRY %main () -> f32[] {{\n{body}\n}}"


def test_types():
    text = "((bf16[2,3]{1,0:T(8,128)(2,1)S(1)}), /*index=1*/f32[<=4], s4[3], token[])"
    parsed = parse_type(text)
    assert parsed == (
        (Shape("bf16", (2, 3)),),
        Shape("f32", (4,)),
        Shape("s4", (3,)),
        Shape("token", ()),
    )
    assert total_bytes(parsed) == 12 + 16 + 2 + 0
    assert total_bytes(Shape("f8e4m3fn", (5,))) == 5
    assert total_bytes(Shape("pred", (5,))) == 5
    assert total_bytes(Shape("c64", (5,))) == 40
    with pytest.raises(ValueError, match="type must be an array or a tuple"):
        parse_type("{}")


def test_instruction():
    line = (
        "  ROOT %f.1 = (f32[2]{0}, /*index=1*/u32[]) fusion(f32[2]{0} %a, %b.2), "
        'kind=kCustom, calls=%c.3, metadata={op_name="jit(f)/x[a, b]{c}" line=3}, '
        'backend_config={"x":{"y":["1,2","}"]}}'
    )
    item = parse_instruction(line)
    assert (item.name, item.opcode, item.is_root) == ("f.1", "fusion", True)
    assert item.operands == ("a", "b.2")
    assert item.called("calls") == item.all_called == ("c.3",)
    assert item.op_name == "jit(f)/x[a, b]{c}"
    assert set(item.attributes) == {"kind", "calls", "metadata", "backend_config"}
    assert parse_instruction("FileNames") is None
    two_way = parse_instruction(
        "  %c = f32[] conditional(%p, %x, %y), true_computation=%t, "
        "false_computation=%f"
    )
    assert two_way.branches == ("f", "t")


def test_not_a_module():
    with pytest.raises(ValueError, match="must hold an HloModule"):
        parse("module @jit_f {}")
    with pytest.raises(ValueError, match="must hold an ENTRY"):
        parse("HloModule empty\n")


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh[a=2,b=2] {b,a}", ((0, 2, 1, 3),)),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_replica_groups(text, groups):
    assert replica_groups({"replica_groups": text}, 4) == groups


def test_replica_groups_with_device_order():
    line = (
        "  %r = f32[2] all-reduce(%x), channel_id=1, "
        "replica_groups=mesh['a'=2,'b'=2], device_ids=([3,2,1,0]) {'b'}, to_apply=%add"
    )
    item = parse_instruction(line)
    assert replica_groups(item.attributes, 4) == ((3, 2), (1, 0))
    for order in ("[2,2]<=[2,2]T(1,0)", "[2,2]T(1,0)"):
        attributes = {
            "replica_groups": "mesh['a'=2,'b'=2]",
            "device_ids": f"({order}) {{'b'}}",
        }
        assert replica_groups(attributes, 4) == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match="must name axes of its mesh"):
        replica_groups({"replica_groups": "mesh['a'=2] {'c'}"}, 2)


def test_permute_groups_join_chains():
    pairs = {"source_target_pairs": "{{0,1},{2,3},{1,2},{6,5}}"}
    assert permute_groups(pairs) == ((0, 1, 2, 3), (5, 6))


CONDITION = """%cond (p: (s32[], f32[4,4])) -> pred[] {
  %limit = s32[] constant(7)
  %p = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=DIRECTION
}"""
BODY = """%body (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]) parameter(0)
  %two = s32[] constant(2)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,4] get-tuple-element(%p), index=1
  %next = s32[] add(%i, %two)
  %d = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,4]) tuple(%next, %d)
}"""
LOOP = (
    "%zero = s32[] constant(1)",
    "%x = f32[4,4] constant({...})",
    "%t = (s32[], f32[4,4]) tuple(%zero, %x)",
    "ROOT %w = (s32[], f32[4,4]) while(%t), condition=%cond, body=%body",
)


@pytest.mark.parametrize("direction, trips", [("LT", 3), ("NE", None)])
def test_trips_from_the_condition(direction, trips):
    text = module(LOOP, CONDITION.replace("DIRECTION", direction), BODY)
    parsed = parse(text)
    assert trip_count(parsed, parsed.entry, parsed.entry.root) == trips
    assert dot_flops(text).total == (trips or 1) * 2 * 4**3
    assert dot_flops(text).unknown_loops == (() if trips else ("w",))


def test_custom_kernels_are_told_or_named():
    lines = (
        "%x = bf16[64,32] constant({...})",
        "%k = bf16[64,64] custom-call(%x), "
        'custom_call_target="__gpu$xla.gpu.triton", '
        'metadata={op_name="jit(f)/newton_schulz/gram"}',
        "%s = bf16[64,64] custom-call(%x), custom_call_target="
        '"tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":'
        '{"flops":"123","transcendentals":"0"}}}',
        'ROOT %h = bf16[64,64] custom-call(%x), custom_call_target="Sharding"',
    )
    found = dot_flops(module(lines))
    assert (found.total, found.unknown_kernels) == (123.0, ("k",))
    told = dot_flops(module(lines), kernel_flops={"newton_schulz": 7.0})
    assert (told.total, told.unknown_kernels) == (130.0, ())


@pytest.mark.parametrize(
    "name, operands, result, flops",
    [
        # Three of four tiles; six of nine; all but the diagonal's halves.
        (
            "gram",
            ("s32[3,2]", "f16[5,64,96]", "f16[5,64,96]"),
            64,
            0.75 * 5 * 64**2 * 96,
        ),
        ("symmetric_matmul", ("s32[6,2]", "f16[5,48,48]"), 48, 6 / 9 * 5 * 48**3),
        ("gram", ("f16[5,64,96]",), 64, 0.5 * 5 * 64**2 * 96),
        ("polynomial_kernel", ("f32[4,3]", "f16[5,64,64]"), 64, 4 * 4 * 5 * 64**3),
        ("direct_kernel", ("f32[4,3]", "f16[5,64,64]"), 64, 4 * 3 * 5 * 64**3),
    ],
)
def test_own_kernels(name, operands, result, flops):
    lines = [f"%p{i} = {type_} parameter({i})" for i, type_ in enumerate(operands)]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    lines.append(
        f"ROOT %k = f16[5,{result},{result}] custom-call({names}), "
        'custom_call_target="mosaic_gpu_v2", '
        f'metadata={{op_name="jit(f)/jit(_product)/{name}/mpmd_map"}}'
    )
    found = dot_flops(module(lines))
    assert found.total == pytest.approx(2 * flops)
    assert found.unknown_kernels == ()


def test_library_matmuls_without_dimension_numbers():
    lines = (
        "%x = f32[3,64,32] constant({...})",
        "%y = f32[3,16,32] constant({...})",
        "ROOT %m = f32[3,64,16] custom-call(%x, %y), "
        'custom_call_target="__onednn$matmul"',
    )
    assert dot_flops(module(lines)).total == 2 * 3 * 64 * 16 * 32


def test_library_matmuls_with_dimension_numbers():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{'
        '"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["1"]}}}'
    )
    lines = (
        "%x = f16[32,64] constant({...})",
        "%y = f16[16,32] constant({...})",
        "ROOT %m = (f16[64,16], s8[4096]) custom-call(%x, %y), "
        f'custom_call_target="__cublas$gemm", backend_config={config}',
    )
    assert dot_flops(module(lines)).total == 2 * 64 * 16 * 32


def test_convolution_counts_no_padding():
    lines = (
        "%x = f32[1,5,2] constant({...})",
        "%k = f32[3,2,4] constant({...})",
        "ROOT %c = f32[1,5,4] convolution(%x, %k), window={size=3 pad=1_1}, "
        "dim_labels=b0f_0io->b0f",
    )
    # Three taps at five places; the two at the edges have one tap less.
    assert dot_flops(module(lines)).total == 2 * (3 * 5 - 2) * 2 * 4


WRAPPED = """%wrapped (p: f32[8,4], q: f32[4]) -> (f32[64,4], f32[4]) {
  %p = f32[8,4] parameter(0)
  %q = f32[4] parameter(1)
  %g = f32[64,4] all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
  %r = f32[4] all-reduce(%q), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %t = (f32[64,4], f32[4]) tuple(%g, %r)
}"""


def test_generic_async_start_with_two_collectives():
    lines = (
        "%p = f32[8,4] parameter(0)",
        "%q = f32[4] parameter(1)",
        "%s = ((f32[8,4], f32[4]), (f32[64,4], f32[4])) async-start(%p, %q), "
        "calls=%wrapped",
        "ROOT %d = (f32[64,4], f32[4]) async-done(%s)",
    )
    found = collectives(module(lines, WRAPPED))
    assert [(item.kind, item.num_bytes, item.asynchronous) for item in found] == [
        ("all-gather", 1024, True),
        ("all-reduce", 16, True),
    ]


def test_reduce_scatter_as_a_fusion():
    body = """%all-reduce-scatter.1 (p: f32[64]) -> f32[8] {
  %p = f32[64] parameter(0)
  %r = f32[64] all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  %i = u32[] partition-id()
  ROOT %s = f32[8] dynamic-slice(%r, %i), dynamic_slice_sizes={8}
}"""
    lines = (
        "%p = f32[64] parameter(0)",
        "ROOT %f = f32[8] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
    )
    (item,) = collectives(module(lines, body))
    assert (item.kind, item.num_bytes, item.asynchronous) == (
        "reduce-scatter",
        256,
        False,
    )


def test_start_types_do_not_change_bytes():
    """Versions type starts differently; bytes come from operands and the done."""
    for kind in ("f32[64]", "((f32[64]), f32[64])"):
        lines = (
            "%p = f32[64] parameter(0)",
            f"%s = {kind} all-reduce-start(%p), replica_groups={{}}, to_apply=%add",
            "ROOT %d = f32[64] all-reduce-done(%s)",
        )
        (item,) = collectives(module(lines))
        assert (item.num_bytes, item.group_size, item.asynchronous) == (256, 8, True)
