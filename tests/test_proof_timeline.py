"""The two-stream model against times worked out by hand."""

import dataclasses

import pytest

from dmuon_jax.planning.devices import DEVICES, Device, device_named
from dmuon_jax.proof import parse, simulate_streams
from dmuon_jax.proof.costs import collective_us
from dmuon_jax.proof.traffic import memory_bytes

# 1 FLOP, 1 byte of memory or of a link take 1 us; launches 10 us; collectives 100 us.
UNIT = Device(
    name="unit",
    peak_16bit_flops=1e6,
    peak_32bit_flops=0.25e6,
    peak_tf32_flops=0.5e6,
    memory_bandwidth=1e6,
    memory_bytes=10**9,
    intra_bandwidth=1e6,
    intra_latency_us=100.0,
    inter_bandwidth=0.1e6,
    inter_latency_us=1000.0,
    devices_per_node=4,
    kernel_latency_us=10.0,
    matrix_efficiency=1.0,
    memory_efficiency=1.0,
    link_efficiency=1.0,
)
HEAD = "HloModule test, is_scheduled=true, num_partitions=4\n\n"
DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
DOT_US = 10 + 2 * 8**3


def entry(*lines):
    return "ENTRY %main () -> f32[] {\n" + "\n".join(f"  {x}" for x in lines) + "\n}"


def run(text, **options):
    return simulate_streams(parse(HEAD + text), UNIT, **options)


def test_overlap_by_hand():
    """The exchange begins with the first dot, lasts longer, and is waited for."""
    timeline = run(
        entry(
            "%x = bf16[8,8] parameter(0)",
            "%big = bf16[1000] parameter(1)",
            "%s = ((bf16[1000]), bf16[1000]) all-to-all-start(%big), "
            "replica_groups=[1,4]<=[4]",
            f"%d = bf16[8,8] {DOT}",
            "%r = bf16[1000] all-to-all-done(%s)",
            f"ROOT %e = bf16[8,8] {DOT}",
        )
    )
    exchange_us = 100 + 2000 * 3 / 4
    by_name = {event.name: event for event in timeline.events}
    assert by_name["s"].duration_us == pytest.approx(exchange_us)
    assert by_name["s"].hidden_by == ("d",)
    assert by_name["d"].duration_us == pytest.approx(DOT_US)
    assert timeline.exposed_us == pytest.approx(exchange_us - DOT_US)
    assert timeline.step_us == pytest.approx(exchange_us + DOT_US)
    assert timeline.total_us("compute") == pytest.approx(2 * DOT_US)
    assert timeline.total_us("communication") == pytest.approx(exchange_us)
    share = (exchange_us - DOT_US) / exchange_us
    assert timeline.exposed_share() == pytest.approx(share)
    assert timeline.exposed_share("elsewhere") == 0


def test_the_communication_stream_is_one_lane():
    gather = (
        "((bf16[2]), bf16[8]) all-gather-start(%p), replica_groups={}, dimensions={0}"
    )
    timeline = run(
        entry(
            "%p = bf16[2] parameter(0)",
            f"%a = {gather}",
            f"%b = {gather}",
            "%c = bf16[8] all-gather-done(%b)",
            "ROOT %d = bf16[8] all-gather-done(%a)",
        )
    )
    one_us = 100 + 16 * 3 / 4
    assert timeline.step_us == pytest.approx(2 * one_us)
    assert [event.name for event in timeline.events] == ["a", "b"]
    assert timeline.events[1].start_us == pytest.approx(one_us)


@pytest.mark.parametrize("config", ["", ', backend_config={"is_sync":true}'])
def test_synchronous_collectives_hide_nothing(config):
    start = "-start" if config else ""
    timeline = run(
        entry(
            "%x = bf16[8,8] parameter(0)",
            f"%s = bf16[8,8] all-reduce{start}(%x), replica_groups={{}}{config}",
            f"%d = bf16[8,8] {DOT}",
            "ROOT %r = bf16[8,8] all-reduce-done(%s)"
            if config
            else "ROOT %r = () tuple()",
        )
    )
    reduce_us = 100 + 2 * 128 * 3 / 4
    assert timeline.exposed_us == pytest.approx(reduce_us)
    assert timeline.step_us == pytest.approx(reduce_us + DOT_US)


LOOP = f"""%body (p: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {{
  %p = (s32[], bf16[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[8,8] get-tuple-element(%p), index=1
  %d = bf16[8,8] {DOT}
  %r = bf16[8,8] all-reduce(%d), replica_groups={{}}
  ROOT %t = (s32[], bf16[8,8]) tuple(%i, %r)
}}

"""


def test_loops_repeat_their_body():
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    timeline = run(
        LOOP
        + entry(
            "%t = (s32[], bf16[8,8]) parameter(0)",
            f"ROOT %w = (s32[], bf16[8,8]) while(%t), body=%body, {config}",
        )
    )
    body_us = DOT_US + 100 + 2 * 128 * 3 / 4
    assert timeline.step_us == pytest.approx(5 * body_us)
    assert [event.times for event in timeline.events] == [5, 5]
    assert timeline.exposed_us == pytest.approx(5 * (body_us - DOT_US))
    (repeat,) = timeline.repeats
    assert repeat.end_us - repeat.start_us == pytest.approx(4 * body_us)


@pytest.mark.parametrize(
    "dtype, attribute, rate", [("f32", "", 2), ("f32", "{highest,highest}", 4)]
)
def test_matmul_rate_follows_the_operands(dtype, attribute, rate):
    precision = f", operand_precision={attribute}" if attribute else ""
    timeline = run(
        entry(f"%x = {dtype}[8,8] parameter(0)", f"ROOT %d = f32[8,8] {DOT}{precision}")
    )
    assert timeline.step_us == pytest.approx(10 + rate * 2 * 8**3)


STACK = """%slice (s: f32[100,8], i: s32[]) -> f32[8] {
  %s = f32[100,8] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %d = f32[1,8] dynamic-slice(%s, %i, %z), dynamic_slice_sizes={1,8}
  ROOT %b = f32[8] bitcast(%d)
}

%update (s: f32[100,8], u: f32[1,8], i: s32[]) -> f32[100,8] {
  %s = f32[100,8] parameter(0)
  %u = f32[1,8] parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = f32[100,8] dynamic-update-slice(%s, %u, %i, %z)
}

"""


def test_stacks_are_charged_by_the_slice():
    text = STACK + entry(
        "%s = f32[100,8] parameter(0)",
        "%u = f32[1,8] parameter(1)",
        "%i = s32[] parameter(2)",
        "%a = f32[8] fusion(%s, %i), kind=kLoop, calls=%slice",
        "%b = f32[100,8] fusion(%s, %u, %i), kind=kLoop, calls=%update",
        "ROOT %n = f32[100,8] negate(%s)",
    )
    module = parse(HEAD + text)
    sizes = {
        name: memory_bytes(module, module.entry, module.entry.by_name[name])
        for name in "abn"
    }
    assert sizes == {"a": 32 + 32 + 4, "b": 32 + 32 + 4, "n": 2 * 3200}


def test_casts_and_repeated_operands_are_charged_once_and_whole():
    cast = """%cast (s: f16[8]) -> f32[8] {
  %s = f16[8] parameter(0)
  ROOT %c = f32[8] convert(%s)
}

"""
    text = cast + entry(
        "%s = f16[8] parameter(0)",
        "%c = f32[8] fusion(%s), kind=kLoop, calls=%cast",
        "ROOT %m = f32[8] multiply(%c, %c)",
    )
    module = parse(HEAD + text)
    sizes = [
        memory_bytes(module, module.entry, module.entry.by_name[name]) for name in "cm"
    ]
    assert sizes == [16 + 32, 32 + 32]


def test_collectives_within_and_across_nodes():
    def cost(kind, groups):
        return collective_us(UNIT, kind, 1000, groups)

    inside, across = ((0, 1, 2, 3),), (tuple(range(8)),)
    assert cost("all-gather", inside) == pytest.approx(100 + 750)
    assert cost("reduce-scatter", inside) == pytest.approx(100 + 750)
    assert cost("all-reduce", inside) == pytest.approx(100 + 1500)
    # Two nodes of four: half of the buffer crosses, over four cards of a tenth.
    assert cost("all-gather", across) == pytest.approx(1000 + 1000 / 2 / 4 * 10)
    # All-to-all: half of the peers live on the other node.
    assert cost("all-to-all", across) == pytest.approx(1000 + 1000 / 2 * 10)
    assert cost("all-to-all", ((0, 4), (1, 5))) == pytest.approx(1000 + 500 * 10)
    assert cost("collective-permute", ((0, 1),)) == pytest.approx(100 + 1000)
    assert cost("collective-permute", ((3, 4),)) == pytest.approx(1000 + 10000)
    assert cost("all-gather", ((0,),)) == 10


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_devices_are_sensible(device):
    assert device.peak_16bit_flops >= device.peak_tf32_flops or device.name == "cpu"
    assert device.peak_tf32_flops >= device.peak_32bit_flops
    assert device.memory_bandwidth > device.intra_bandwidth >= device.inter_bandwidth
    assert device.intra_latency_us < device.inter_latency_us
    shares = dataclasses.asdict(device)
    assert all(0 < shares[key] <= 1 for key in shares if key.endswith("_efficiency"))
    assert device_named(device.name.upper()) is device


def test_unknown_device():
    with pytest.raises(ValueError, match="device must be one of a100.*'abacus'"):
        device_named("abacus")


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from dmuon_jax.proof.picture import draw, spans

    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    timeline = run(
        LOOP
        + entry(
            "%t = (s32[], bf16[8,8]) parameter(0)",
            f"ROOT %w = (s32[], bf16[8,8]) while(%t), body=%body, {config}",
        )
    )
    bars = spans(timeline)
    shown_us = sum(length for ranges in bars.values() for _, length in ranges) * 1e3
    reduce_us = 100 + 2 * 128 * 3 / 4
    body_us = DOT_US + reduce_us
    # Dot, transfer, the wait for it, and four more iterations on either lane.
    assert shown_us == pytest.approx(DOT_US + 2 * reduce_us + 2 * 4 * body_us)
    path = tmp_path / "timeline.png"
    draw(timeline, path, title="a loop")
    assert path.read_bytes().startswith(b"\x89PNG")
