"""The tuner: what may win, what is kept, what counts as a failure."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest

from dmuon_jax import kernels
from dmuon_jax.kernels import pallas_triton, tune
from dmuon_jax.kernels.select import INTERPRETED, Choice, Problem, choose
from dmuon_jax.kernels.support import target_device
from dmuon_jax.kernels.tiles import ChainConfig, TileConfig
from tests import kernel_cases as cases

PROBLEM = Problem("gram", 2, 60, 100, "float16")
TILE = "d[slot, rows, columns] = tile\n"
CANDIDATE = Choice(INTERPRETED, TileConfig(64, 64, num_warps=4), "candidate")


@pytest.fixture
def quick(monkeypatch):
    """Every call takes as long as a kernel's number of warps says; XLA takes 5."""
    names = []

    def time_us(function, *operands):
        (_, choice) = function.keywords["implementation"].entries[0]
        names.append(choice.implementation)
        return 5.0 if choice.config is None else float(choice.config.num_warps)

    monkeypatch.setattr(tune, "time_us", time_us)
    return names


def test_the_timed_loop_keeps_its_calls():
    x = jnp.ones((64, 64))
    text = tune._loop(kernels.matmul, 3, (x, x)).as_text()
    (body,) = re.findall(r"while\(.*body=%([\w.]+)", text)
    assert "dot" in text.split(f"%{body} ", 1)[1].split("\n}", 1)[0]
    assert tune.time_us(kernels.matmul, x, x, repeats=2, target_s=0.002) > 0


def test_a_right_and_faster_candidate_wins(quick):
    found = tune.measure(PROBLEM, [CANDIDATE])
    assert [each.failure for each in found] == ["", ""]
    assert found[1].error <= 1.5 * found[0].error
    assert quick == ["xla", INTERPRETED]
    ((problem, choice),) = tune.judge("cpu", found).entries
    assert problem == PROBLEM and choice.config == CANDIDATE.config
    assert choice.reason == "measured: 4 microseconds"


def test_a_right_and_slower_candidate_loses(quick):
    config = TileConfig(64, 64, num_warps=8)
    found = tune.measure(PROBLEM, [dataclasses.replace(CANDIDATE, config=config)])
    ((_, choice),) = tune.judge("cpu", found).entries
    assert choice.implementation == "xla"


@pytest.mark.parametrize(
    ("old", "new", "failure"),
    [
        ("= tile.T", "= tile", "error must be at most"),
        (TILE, TILE.replace("tile", "1.05 * tile"), "error must be at most"),
        (TILE, TILE.replace("tile", "tile * jnp.nan"), "error must be at most"),
        ("pl.when(valid[slot] == 0)", "pl.when(valid[slot] == 2)", "EMPTY slot"),
        ("d[slot, columns, rows] = tile.T", "raise ValueError('no')", "ValueError: no"),
        (
            "d[slot, columns, rows] = tile.T",
            "raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: shared memory')",
            "JaxRuntimeError: RESOURCE_EXHAUSTED: shared memory",
        ),
        (
            "d[slot, columns, rows] = tile.T",
            "raise NotImplementedError('not here')",
            "NotImplementedError: not here",
        ),
    ],
    ids=[
        "transposed",
        "5 % off",
        "NaN",
        "EMPTY slots not zeroed",
        "does not compile",
        "out of memory",
        "not implemented",
    ],
)
def test_a_wrong_candidate_cannot_win(quick, monkeypatch, old, new, failure):
    """However fast it is.

    Fault: a kernel does not compile, returns NaN, is 5 % off or transposes a tile
    Happens: tuning compares it with float64, reports it and chooses XLA
    Kept: the measurements of the others
    """
    wrong = cases.faulty(pallas_triton, old, new)
    monkeypatch.setattr(pallas_triton, "gram", wrong.gram)
    xla, other = tune.measure(dataclasses.replace(PROBLEM, rows=100), [CANDIDATE])
    assert failure in other.failure and other.time_us is None
    # A relative error, or none where it did not run; NaN where there are NaNs.
    assert (other.error is None) == ("Error" in failure)
    ((_, choice),) = tune.judge("cpu", [xla, other]).entries
    assert choice.implementation == "xla" and quick == ["xla"]


def test_a_candidate_that_fails_when_timed_cannot_win(monkeypatch):
    def time_us(function, *operands):
        ((_, choice),) = function.keywords["implementation"].entries
        if choice.implementation != "xla":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return 5.0

    monkeypatch.setattr(tune, "time_us", time_us)
    found = tune.measure(PROBLEM, [CANDIDATE])
    assert found[1].failure == "JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"
    ((_, choice),) = tune.judge("cpu", found).entries
    assert choice.implementation == "xla"


def test_nothing_is_judged_where_xla_fails(monkeypatch):
    def time_us(function, *operands):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(tune, "time_us", time_us)
    with pytest.raises(RuntimeError, match="XLA failed on .*gram.* RESOURCE_EXHAUSTED"):
        tune.measure(PROBLEM, [CANDIDATE])


@pytest.mark.parametrize(
    "problem",
    [
        Problem("symmetric_matmul", 2, 60, 60, "bfloat16"),
        Problem("polynomial_chain", 2, 33, 33, "float16"),
        Problem("direct_chain", 2, 33, 60, "float16"),
    ],
    ids=lambda problem: problem.kernel,
)
def test_every_kernel_can_be_measured(quick, problem):
    is_product = problem.kernel == "symmetric_matmul"
    config = CANDIDATE.config if is_product else ChainConfig(4)
    found = tune.measure(problem, [Choice(INTERPRETED, config, "candidate")])
    assert [each.failure for each in found] == ["", ""]


def test_results_are_kept_and_not_measured_again(quick, tmp_path):
    reported = []
    kind = target_device().kind
    verdicts = tune.tune([PROBLEM, PROBLEM], tmp_path, reported.append)
    assert len(reported) == 1 and quick == ["xla"]
    other = dataclasses.replace(PROBLEM, columns=300)
    verdicts = tune.tune([PROBLEM, other], tmp_path, reported.append)
    assert len(reported) == 2 and quick == ["xla", "xla"]
    (path,) = tmp_path.iterdir()
    assert path == tune.table_path(tmp_path, kind)
    assert tune.load(path) == verdicts and len(verdicts.entries) == 2
    assert json.loads(path.read_text())["device_kind"] == kind
    assert choose(PROBLEM, verdicts).reason.startswith("measured")


def test_files_keep_configs_and_failures(tmp_path):
    measurements = (
        tune.Measurement(PROBLEM, CANDIDATE, 1.5, 1e-4, ""),
        tune.Measurement(PROBLEM, Choice("x", ChainConfig(4), ""), None, None, "no"),
        tune.Measurement(PROBLEM, Choice("xla", None, ""), 2.5, 1e-4, ""),
    )
    tune.write(tmp_path / "new" / "table.json", "cpu", measurements)
    assert tune.read(tmp_path / "new" / "table.json") == ("cpu", measurements)


def test_a_damaged_table_costs_one_warning_and_is_measured_anew(quick, tmp_path):
    """As for costs.

    Fault: a file of tuned kernels is damaged
    Happens: one warning; the kernels are measured anew
    Kept: nothing is taken from it
    """
    path = tune.table_path(tmp_path, target_device().kind)
    tune.tune([PROBLEM], tmp_path)
    whole = path.read_text()
    foreign = json.dumps({"device_kind": "cpu", "measurements": [{"problem": 1}]})
    for damaged in ("", whole[: len(whole) // 2], "[]", foreign, "[" * 10**5):
        path.write_text(damaged)
        quick.clear()
        with pytest.raises(ValueError, match="must hold measurements of kernels"):
            tune.load(path)
        with pytest.warns(UserWarning, match="measurements of kernels: ignored") as caught:
            tune.tune([PROBLEM], tmp_path)
        assert len(caught) == 1 and quick == ["xla"]
        assert path.read_text() == whole


def test_a_table_that_cannot_be_written_costs_one_warning(quick, tmp_path):
    (tmp_path / "home").write_text("")
    other = dataclasses.replace(PROBLEM, columns=300)
    with pytest.warns(UserWarning, match="measurements of kernels: not kept") as caught:
        verdicts = tune.tune([PROBLEM, other], tmp_path / "home" / "cache")
    assert len(caught) == 1 and len(verdicts.entries) == 2


def test_what_others_measured_meanwhile_is_kept(quick, tmp_path):
    other = dataclasses.replace(PROBLEM, columns=300)
    late = dataclasses.replace(PROBLEM, columns=200)
    kind = target_device().kind
    found = tune.measure(other)

    def meanwhile(measurement):
        if measurement.problem == PROBLEM:
            path = tune.table_path(tmp_path, kind)
            tune.write(path, kind, (*tune.read(path)[1], *found))

    verdicts = tune.tune([PROBLEM, late], tmp_path, meanwhile)
    assert {problem for problem, _ in verdicts.entries} == {PROBLEM, other, late}
    assert tune.load(tune.table_path(tmp_path, kind)) == verdicts
