"""The recipes of ``notebooks/recipes``, each run in small."""

import functools
import importlib
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax import plan_owners
from dmuon_jax.proof import audit

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks" / "recipes"
COMPARED = (
    "orbax_resume",
    "from_optax_muon",
)  # with exact losses, in tests of their own
RECIPES = sorted(
    path.stem for path in FOLDER.glob("*.py") if path.stem not in ("toy", *COMPARED)
)
STEPS = 6


@pytest.fixture
def recipe(monkeypatch):
    """Loads a recipe by name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@functools.cache
def straight_losses(recipe):
    """What one optimizer on one mesh gives."""
    orbax = recipe("orbax_resume")
    started = orbax.start(Mesh(np.array(jax.devices()), ("fsdp",)), "fsdp")
    _, _, losses = recipe("toy").train(*started, list(orbax.batches(STEPS)))
    return losses


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_learns(recipe, name):
    if name == "equinox_tree":
        pytest.importorskip("equinox")
    losses = recipe(name).main(STEPS)
    assert len(losses) == STEPS and np.all(np.isfinite(losses))
    assert min(losses[-2:]) < 0.95 * losses[0], losses


def test_resumed_run_goes_on_as_if_never_stopped(recipe):
    resumed = recipe("orbax_resume").main(STEPS)
    np.testing.assert_allclose(resumed, straight_losses(recipe), rtol=1e-5)


def test_changed_optimizer_goes_on_as_optax_would(recipe):
    migration = recipe("from_optax_muon")
    changed = migration.main(STEPS)
    tx, params = optax.contrib.muon(0.02, weight_decay=0.01), migration.init_params()
    data = list(migration.batches(STEPS))
    _, _, straight = recipe("toy").train(tx, params, tx.init(params), data)
    np.testing.assert_allclose(changed, straight, rtol=1e-5)


def test_zero_sharded_masters_gather_nothing_over_replicas(recipe):
    hsdp = recipe("hsdp_zero")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
    plan = plan_owners(hsdp.master_weights(mesh))
    assert plan.exchange_bytes.all_gather == 0 < plan.exchange_bytes.all_to_all
    plain = hsdp.init_params()
    plain = jax.device_put(plain, hsdp.by_rows(plain, mesh))
    assert plan_owners(plain).exchange_bytes.all_gather > 0


def test_scan_stacks_are_matrices_and_embeddings_are_not(recipe):
    scanned = recipe("scanned_layers")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    plan = plan_owners(
        scanned.init_params(mesh),
        muon_weight_dimension_numbers=scanned.hidden_matrices,
    )
    assert sorted(leaf.num_parcels for leaf in plan.leaves) == [scanned.LAYERS] * 2
    assert not any("embed" in leaf.path for leaf in plan.leaves)


def test_virtual_devices_are_made():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    program = "import toy, jax; toy.use_virtual_devices(); print(jax.device_count())"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, cwd=FOLDER, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"8\n", b"")


def launch(hosts, folder, port, arguments):
    """Losses that ``ssh.sh`` prints where every host is this machine."""
    here = folder / "run-here"
    here.write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n')
    here.chmod(here.stat().st_mode | stat.S_IEXEC)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": str(FOLDER.parents[1]),
        "PYTHON": sys.executable,
        "RUN": str(here),
        "PORT": str(port),
        "TRAIN_ARGS": f"--checkpoint {folder / 'checkpoint'} {arguments}",
    }
    script = str(FOLDER / "launch" / "ssh.sh")
    done = subprocess.run(
        [script, *["127.0.0.1"] * hosts],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    words = [line.split() for line in done.stdout.splitlines()]
    return [float(word[1]) for word in words if word[:1] == ["loss"]]


@pytest.mark.parametrize(
    "hosts", [2, pytest.param(4, marks=pytest.mark.slow)], ids="{} processes".format
)
def test_many_hosts_save_and_resume(recipe, tmp_path, hosts):
    port = 20000 + os.getpid() % 20000 + hosts
    first = launch(hosts, tmp_path, port, "--cpu-devices 2 --steps 3")
    again = launch(1, tmp_path, port + 1, f"--cpu-devices 4 --steps {STEPS}")
    np.testing.assert_allclose(first + again, straight_losses(recipe), atol=1e-5)


def test_launcher_fails_where_a_process_fails(tmp_path):
    environment = os.environ | {"RUN": "false"}
    script = str(FOLDER / "launch" / "ssh.sh")
    done = subprocess.run([script, "a", "b"], env=environment, capture_output=True)
    assert done.returncode != 0
    assert subprocess.run([script], capture_output=True).returncode == 2


SRUN = """#!/usr/bin/env bash
# Two tasks on this machine, numbered as SLURM numbers them.
while [[ $1 == --* ]]; do shift; done
tasks=()
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task"; done
"""


def test_slurm_starts_processes_that_find_each_other(recipe, tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parents[1]),
        "PYTHON": sys.executable,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "SLURM_SUBMIT_DIR": str(FOLDER / "launch"),
        # What JAX reads: the job's number (for the port), nodes and number of tasks.
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    spooled = tmp_path / "slurm_script"  # SLURM runs a copy of the script
    spooled.write_text((FOLDER / "launch" / "slurm.sh").read_text())
    done = subprocess.run(
        ["bash", str(spooled), "--cpu-devices", "4", "--steps", "3"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [
        float(x.split()[1]) for x in done.stdout.splitlines() if x.startswith("loss")
    ]
    # Two processes that did not find each other would each print all losses.
    np.testing.assert_allclose(losses, straight_losses(recipe)[:3], atol=1e-5)
    assert (tmp_path / "checkpoint").is_dir()


@pytest.mark.parametrize("name", ["slurm.sh", "ssh.sh"])
def test_launchers_are_sound_shell(name):
    script = str(FOLDER / "launch" / name)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    # A process of JAX takes the GPU of its own number, so it must see all of its node's.
    assert "--gpus-per-task" not in pathlib.Path(script).read_text()


def test_warming_up_runs_each_collective(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER / "launch")
    train = importlib.import_module("train")
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    rows = jax.ShapeDtypeStruct(
        (8, 8), np.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    found = audit(train.each_collective(mesh).lower(rows).compile())
    assert {x.kind for x in found.collectives} == {
        "all-to-all",
        "all-gather",
        "all-reduce",
    }
    train.warm_up(mesh)
