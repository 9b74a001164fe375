"""The command line: what it prints, what it refuses, and with which exit code."""

import contextlib
import json
import os
import pathlib
import pty
import subprocess
import sys
import time

import pytest

from dmuon_jax import Plan
from dmuon_jax.cli import main
from dmuon_jax.cli.terminal import Terminal, bar, table
from dmuon_jax.cli.tune_command import plan_problems
from dmuon_jax.matrices import MeshShape
from dmuon_jax.planning import clusters
from dmuon_jax.planning.build import make_plan
from dmuon_jax.planning.devices import DEVICES
from dmuon_jax.planning.estimate import estimate
from dmuon_jax.planning.workloads import Matrices, Workload

DATA = pathlib.Path(__file__).parent / "data"
STEP = str(DATA / "step_gpu.hlo.txt")
TINY = {
    "matrices": [
        {"name": "up", "shape": [64, 128], "count": 6},
        {"name": "down", "shape": [128, 64], "count": 6},
        {"name": "experts", "shape": [32, 64], "count": 16, "stack": [8]},
    ]
}


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def run(capsys, *arguments):
    """Exit code, stdout and stderr of a command, however it ends."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_prints_load_bytes_memory_and_time(capsys):
    code, out, err = run(
        capsys, "plan", "--model", "llama-3.1-8b", "--mesh", "data=16,fsdp=8"
    )
    assert (code, err) == (0, "")
    assert "224 matrices of 224 leaves on 128 devices (data=16, fsdp=8)" in out
    for part in (
        "makespan",
        "bound",
        "gap",
        "all-to-all",
        "4096x14336",
        "gram",
        "####",
    ):
        assert part in out
    # 6979321856 elements on 8 shards: momentum of 4 bytes, AdamW's moments of 8.
    (state,) = [line.split() for line in out.splitlines() if "state MiB" in line]
    assert state == ["state", "MiB", "6656", "3328"]
    assert "owner_axes=('fsdp',)" in out
    assert "--fsdp-axis data,fsdp shards them there too" in out


def test_plan_as_json_file_and_picture(capsys, tmp_path, shapes):
    saved, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["--shapes", shapes, "--mesh", "fsdp=4", "--json", "--save", saved]
    code, out, _ = run(capsys, "plan", *arguments, "--plot", picture)
    assert code == 0
    record = json.loads(out)
    plan = Plan.from_json(saved.read_text())
    assert record["num_matrices"] == plan.num_matrices == 28
    assert record["exchange_bytes"]["collectives"] == plan.exchange_bytes.collectives
    assert record["owner_load_us"] == list(plan.owner_load_us)
    assert (
        record["estimate"]["muon_state_bytes"] == 4 * (12 * 64 * 128 + 16 * 32 * 64) / 4
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_counts_idle_owners_and_tips_only_where_they_help(capsys, shapes):
    _, out, _ = run(capsys, "plan", "--shapes", shapes, "--mesh", "fsdp=32")
    assert "fewer matrices than owners: 4 or more own none" in out
    _, out, _ = run(capsys, "plan", "--shapes", shapes, "--mesh", "fsdp=4")
    assert "replicated" not in out and "own none" not in out


def test_experts_stay_on_their_axis(capsys, shapes):
    arguments = ["--shapes", shapes, "--mesh", "fsdp=2,expert=4", "--json"]
    code, out, _ = run(capsys, "plan", *arguments)
    assert code == 0 and json.loads(out)["mesh"] == {"fsdp": 2, "expert": 4}
    where = clusters.Placement(
        MeshShape(("fsdp", "expert"), (2, 4)), ("fsdp",), ("expert",)
    )
    workload = Workload("tiny", 2, (Matrices("experts", (32, 64), 16, (8,)),))
    leaves = clusters.model_leaves(workload, where)
    assert [leaf.shape for leaf in leaves] == [(8, 32, 64)] * 2
    assert leaves[0].spec_out == (("expert",), ("fsdp",), ())


def test_axes_that_do_not_divide_move_on_or_stay_away():
    mesh = MeshShape(("a", "b"), (2, 3))
    assert clusters.shard(((), ()), (4, 6), ("a", "b"), (0, 1), mesh) == (
        (),
        ("a", "b"),
    )
    assert clusters.shard(((), ()), (4, 9), ("a", "b"), (0, 1), mesh) == (
        ("a",),
        ("b",),
    )
    assert clusters.shard(((), ()), (5, 7), ("a", "b"), (0, 1), mesh) == ((), ())


def test_estimate_counts_every_array_once():
    mesh = MeshShape(("data", "fsdp"), (2, 4))
    where = clusters.Placement(mesh, ("fsdp",), momentum_axes=("data",))
    workload = Workload("one", 1, (Matrices("w", (64, 128), 3),))
    device = DEVICES["h200"]
    plan = make_plan(
        clusters.model_leaves(workload, where),
        mesh,
        clusters.cluster_settings(device, mesh),
    )
    found = estimate(plan, device)
    elements = 3 * 64 * 128
    assert found.muon_state_bytes == 4 * elements // 8
    assert found.adamw_state_bytes == 8 * elements // 4
    assert found.whole_bytes == 4 * 64 * 128  # one slot on each of eight owners
    assert found.adamw_us == pytest.approx(device.stream_us(28 * elements / 4))
    # Shards of 1/8 in (12 bytes and a float16 block), of 1/4 out (8 bytes and a block).
    moved = elements / 8 * (12 + 2) + elements / 4 * (8 + 2)
    assert found.passes_us == pytest.approx(device.stream_us(moved))
    assert found.exposed_us == found.hidden_us + plan.exchange_us


def test_plot_stacks_up_to_each_owners_load(capsys, tmp_path, shapes):
    saved = tmp_path / "plan.json"
    run(capsys, "plan", "--shapes", shapes, "--mesh", "fsdp=4", "--save", saved)
    plan = Plan.from_json(saved.read_text())
    (axes,) = plan.plot().axes
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    for owner, load in enumerate(plan.owner_load_us):
        assert max(tops[owner::4]) == pytest.approx(load / 1e3)


def test_audit_prints_checks_and_draws(capsys, tmp_path):
    picture = tmp_path / "step.png"
    code, out, err = run(
        capsys, "audit", STEP, "--device", "h200", "--picture", picture
    )
    assert code == 0 and "exposed communication ms" in out and str(picture) in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, err = run(capsys, "audit", STEP, "--json", "--collectives-in-loops", "0")
    assert code == 1 and json.loads(out)["num_devices"] == 8
    assert "collectives_in_loops must be at most 0, got 1" in err
    code, _, err = run(capsys, "audit", STEP, "--collectives-in-loops", "1")
    assert (code, err) == (0, "")


def test_simulate_without_a_plugin_shows_the_plan_and_says_what_to_install(
    capsys, monkeypatch
):
    def missing(*_, **__):
        raise NotImplementedError(
            "compiling for h200 needs the CUDA plugin: pip install x"
        )

    monkeypatch.setattr("dmuon_jax.cli.simulate_command.simulate", missing)
    code, out, err = run(
        capsys, "simulate", "--model", "qwen2.5-1.5b", "--mesh", "fsdp=8"
    )
    assert code == 1 and "196 matrices" in out
    assert err.strip().endswith("needs the CUDA plugin: pip install x")


def test_tune_lists_what_it_would_measure_and_refuses_on_a_cpu(capsys, shapes):
    code, out, _ = run(
        capsys, "tune", "--shapes", shapes, "--mesh", "fsdp=4", "--dry-run"
    )
    assert code == 0 and "gram 4 x 32 x 64 float16" in out
    code, out, err = run(capsys, "tune", "--shapes", shapes, "--mesh", "fsdp=4")
    assert (code, out) == (1, "") and "nothing to tune on cpu" in err


def test_tune_covers_every_bucket(capsys, tmp_path, shapes):
    saved = tmp_path / "plan.json"
    run(capsys, "plan", "--shapes", shapes, "--mesh", "fsdp=4", "--save", saved)
    plan = Plan.from_json(saved.read_text())
    problems = plan_problems(plan)
    for bucket in plan.buckets:
        for counts in bucket.branches:
            assert any(
                (p.kernel, p.batch, p.rows, p.columns)
                == ("gram", sum(counts), *bucket.shape)
                for p in problems
            )


def test_bench_compares_three_updates(capsys, tmp_path):
    shapes = tmp_path / "one.json"
    shapes.write_text('{"matrices": [{"name": "w", "shape": [32, 64], "count": 1}]}')
    code, out, _ = run(capsys, "bench", "--shapes", shapes, "--repeats", "2", "--json")
    record = json.loads(out)
    assert code == 0 and set(record["median_ms"]) == {
        "adamw",
        "optax.contrib.muon",
        "dmuon",
    }
    assert all(len(times) == 2 for times in record["times_ms"].values())


def test_doctor_says_what_is_here(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    findings = {each["name"]: each for each in json.loads(out)["findings"]}
    assert code == 0 and findings["jax"]["state"] == "ok"
    assert "8 x cpu" in findings["devices"]["detail"]
    assert "xla in float32" in findings["kernels"]["detail"]
    assert "15 matrices" in findings["planner"]["detail"]


def test_doctor_says_that_a_cache_cannot_be_written(capsys, monkeypatch, tmp_path):
    def found():
        code, out, _ = run(capsys, "doctor", "--json")
        (line,) = [x for x in json.loads(out)["findings"] if x["name"] == "measurements"]
        return code, line["state"], "cannot be written" in line["detail"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert found() == (0, "ok", False) and not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found() == (0, "note", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert found() == (0, "note", True)


def test_doctor_fails_where_something_needed_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("dmuon_jax.cli.doctor_command.NEEDED", ("jax", "no-such-thing"))
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "pip install no-such-thing" in out


def test_demo_hands_its_arguments_on(capsys):
    code, out, _ = run(capsys, "demo", "--help")
    assert code == 0 and "--save-every" in out
    code, _, err = run(capsys, "demo", "--size", "tiny", "--batch", "3")
    assert code == 2 and "--batch must be a multiple" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "one of the arguments --model --shapes is required"),
        (["plan", "--model", "lama-3.1-8b"], "did you mean llama-3.1-8b?"),
        (["plan", "--model", "pi0", "--device", "h20"], "did you mean h200?"),
        (["plan", "--model", "pi0", "--mesh", "8x8"], "must be like data=16,fsdp=8"),
        (["plan", "--model", "pi0", "--mesh", "a=0"], "must have 1 to 65536 devices"),
        (["plan", "--model", "pi0", "--mesh", "fsdp=65537"], "must have 1 to 65536"),
        (["plan", "--model", "pi0", "--mesh", "fsdp=2,expert=2"], "a model with experts"),
        (["plan", "--model", "pi0", "--mesh", "a=2,a=2"], "distinct axis names"),
        (["plan", "--model", "pi0", "--mesh", "data=2,model=4"], "--fsdp-axis must name"),
        (["tune", "--model", "pi0", "--mesh", "data=2,model=4"], "--fsdp-axis must name"),
        (["simulate", "--model", "pi0", "--mesh", "data=8"], "an axis called fsdp"),
        (["plan", "--model", "pi0", "--owner-axes", "data"], "owner_axes must be axes"),
        (["plan", "--model", "pi0", "--fsdp-axis", "x"], "must be axes of the mesh"),
        (["plan", "--shapes", "nowhere.json"], "No such file"),
        (["plan", "--shapes", STEP], "the file must be JSON"),
        (["plan", "--shapes", str(DATA)], "Is a directory"),
        (["plan", "--model", "pi0", "--costs", STEP], "--costs must be a table of costs"),
        (["plan", "--model", "pi0", "--save", "/nowhere/x"], "--save must be in a folder"),
        (["plan", "--model", "pi0", "--save", str(DATA)], "--save must name a file, got the"),
        (["plan", "--model", "pi0", "--plot", "/nowhere/x.png"], "--plot must be in a folder"),
        (["plan", "--model", "pi0", "--plot", str(DATA)], "--plot must name a file, got the"),
        (["plan", "--model", "pi0", "--plot", "x.foo"], "--plot must end in one of .png, "),
        (["plan", "--model", "pi0", "--plot", "x"], "--plot must end in one of .png, "),
        (["plan", "--model", "pi0", "--owner-axes", ""], "--owner-axes must name one axis"),
        (["plan", "--model", "pi0", "--owner-axes", " ,"], "--owner-axes must name one axis"),
        (["plan", "--model", "pi0", "--owner-axes", "fsdp,fsdp"], "once, got 'fsdp,fsdp'"),
        (["tune", "--model", "pi0", "--owner-axes", ""], "--owner-axes must name one axis"),
        (["plan", "--model", "pi0", "--owner-axes", "auto,fsdp"], "got ['auto']"),
        (["plan", "--model", "pi0", "--max-wave-mib", "0"], "whole number >= 1, got '0'"),
        (["plan", "--model", "pi0", "--method", "fast"], "invalid choice: 'fast'"),
        (["audit", __file__], "must hold an HloModule"),
        (["audit", STEP, "--plan", STEP], "a plan must be JSON"),
        (["audit", STEP, "--redundancy", "1", "--scope", "nothing"], "must hold matmuls"),
        (["audit", STEP, "--device", "h200", "--picture", "/nowhere/x.png"], "must be in a"),
        (["audit", STEP, "--device", "h200", "--picture", "x.foo"], "--picture must end in"),
        (["bench", "--layers", "0"], "whole number >= 1, got '0'"),
        (["simulate", "--model", "pi0", "--optimizers", "sgd"], "invalid choice: 'sgd'"),
        (["demo", "--data", "/nowhere"], "--data must name a file or a folder"),
        (["audit", "nowhere"], "No such file"),
        (["audit", STEP, "--picture", "x.png"], "--picture needs --device"),
        (["audit", STEP, "--exposed-fraction", "0.1"], "needs an audit that was given"),
        (["simulate", "--shapes", STEP], "simulate needs --model"),
        (["plann"], "invalid choice"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_use_is_a_sentence_and_exit_code_2(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and words in err and "Traceback" not in err
    if "audit" not in arguments:
        assert out == ""


def test_planning_from_the_shell_touches_no_device(shapes):
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    command = [sys.executable, "-m", "dmuon_jax", "plan", "--shapes", shapes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout  # no colours in a pipe


def test_colours_and_columns():
    assert Terminal(True, False).paint("x", "red") == "\x1b[31mx\x1b[0m"
    assert Terminal(False, False).paint("x", "red") == "x"
    assert table([("a", "1"), ("bcd", "10")], "") == "a     1\nbcd  10"


JSON_COMMANDS = {
    "plan": ["--shapes", "SHAPES", "--json"],
    "tune": ["--shapes", "SHAPES", "--dry-run", "--json"],
    "simulate": ["--model", "qwen2.5-1.5b", "--json"],
    "audit": [STEP, "--device", "h200", "--json"],
    "bench": ["--shapes", "SHAPES", "--repeats", "1", "--json"],
    "doctor": ["--json"],
}


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_every_command_gives_json(capsys, monkeypatch, tmp_path, command):
    def missing(*_, **__):
        raise NotImplementedError("needs the CUDA plugin")

    monkeypatch.setattr("dmuon_jax.cli.simulate_command.simulate", missing)
    path = tmp_path / "one.json"
    path.write_text('{"matrices": [{"name": "w", "shape": [32, 64], "count": 2}]}')
    arguments = [str(path) if x == "SHAPES" else x for x in JSON_COMMANDS[command]]
    code, out, _ = run(capsys, command, *arguments)
    assert code == int(command == "simulate") and json.loads(out)
    assert "--json" in run(capsys, command, "--help")[1]


def test_help_lists_every_command_and_its_exit_codes(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "") and "exit codes:" in out
    for command in (*JSON_COMMANDS, "demo"):
        assert f"    {command} " in out
        code, own, _ = run(capsys, command, "--help")
        assert code == 0 and own.startswith("usage: ")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt, 130, "stopped"),
        (NotImplementedError("not on this machine"), 1, "audit: not on this machine"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: [Errno 13]"),
    ],
)
def test_what_goes_wrong_inside_has_an_exit_code(capsys, monkeypatch, error, code, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("dmuon_jax.cli.audit_command.audit", fail)
    found, out, err = run(capsys, "audit", STEP)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["doctor", "bench", "tune --model pi0"])
def test_a_machine_without_its_platform_is_a_sentence(command):
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    full = [sys.executable, "-m", "dmuon_jax", *command.split()]
    done = subprocess.run(full, env=environment, capture_output=True, text=True)
    said = done.stdout if command == "doctor" else done.stderr
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "a device must be found, got none with JAX_PLATFORMS=cuda" in said


def test_a_reader_that_leaves_is_no_error(shapes):
    command = f"{sys.executable} -m dmuon_jax plan --shapes {shapes} | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("settings", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals(settings, coloured):
    main_end, worker_end = pty.openpty()
    environment = os.environ | {"TERM": "xterm"} | settings
    command = [sys.executable, "-m", "dmuon_jax", "doctor"]
    started = subprocess.Popen(command, stdout=worker_end, stderr=worker_end, env=environment)
    os.close(worker_end)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(main_end, 4096):
            shown += part
    os.close(main_end)
    assert started.wait() == 0 and b"devices" in shown
    assert (b"\x1b[32mok" in shown) is coloured and (b"\x1b" in shown) is coloured


def test_bars():
    assert bar(0, 0) == ""
    assert bar(1, 4, 8) == " [##------] 1/4"
    assert bar(4, 4, 8) == " [########] 4/4"


def test_long_work_with_parts_shows_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("dmuon_jax.cli.terminal.PATIENCE_S", 0.0)
    with Terminal(False, True).waiting("Working", 2) as advance:
        advance()
        deadline, err = 300, ""
        while "1/2" not in err and deadline:
            deadline -= 1
            time.sleep(0.01)
            err += capsys.readouterr().err
    assert "Working [##########----------] 1/2 ... " in err
    assert capsys.readouterr().err.endswith("\r\x1b[K")  # nothing is left of it


def test_long_work_says_so(capsys, monkeypatch):
    monkeypatch.setattr("dmuon_jax.cli.terminal.PATIENCE_S", 0.0)
    with Terminal(False, False).waiting("Working"):
        deadline = 200
        while not (err := capsys.readouterr().err) and deadline:
            deadline -= 1
            time.sleep(0.01)
    assert err == "Working ...\n"


def test_axes_that_divide_no_dimension_are_named(capsys):
    code, out, _ = run(capsys, "plan", "--model", "pi0", "--mesh", "fsdp=7")
    assert code == 0 and "fsdp=7 divides no dimension that is free in" in out
    assert "--fsdp-axis fsdp" not in out
    for more in ([], ["--fsdp-axis", ""]):  # sharded, or meant to be whole
        code, out, _ = run(capsys, "plan", "--model", "pi0", "--mesh", "fsdp=8", *more)
        assert code == 0 and "divides no dimension" not in out
