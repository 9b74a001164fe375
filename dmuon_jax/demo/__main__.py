"""``python -m dmuon_jax.demo``: trains, then shows the table, the plot and the plan."""

import argparse
import dataclasses
import os
import pathlib
import sys
import time

import jax
from jax.sharding import Mesh

from dmuon_jax import Plan, plan_owners
from dmuon_jax.demo import report, text, train
from dmuon_jax.demo.checkpoint import Store
from dmuon_jax.demo.contenders import LABELS, contenders
from dmuon_jax.demo.model import ModelConfig, muon_dimension_numbers

NUM_DEVICES = 8
CHECKPOINTS = "demo_checkpoints"
SIZES = {
    "small": ModelConfig(),
    # For a quick look, and for tests: the same shapes of leaves, nothing learnt.
    "tiny": ModelConfig(width=32, num_layers=1, num_heads=2, hidden=64, length=16),
}


def positive(value: str) -> int:
    """An argument that must be a whole number above zero."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dmuon_jax.demo",
        description="Trains a byte-level GPT with AdamW, optax.contrib.muon and dmuon "
        f"from one seed on {NUM_DEVICES} virtual CPU devices, and compares them.",
    )
    add = parser.add_argument
    add(
        "--data",
        type=pathlib.Path,
        metavar="FILE|DIR",
        help="text to train on (default: the .py files of this Python's library)",
    )
    add("--steps", type=positive, default=40, help="steps of each run (default: 40)")
    add("--batch", type=positive, default=8, help="sequences per step (default: 8)")
    add("--seed", type=int, default=0, help="weights and batches (default: 0)")
    add("--size", choices=sorted(SIZES), default="small", help="size of the model")
    add(
        "--method",
        choices=("direct", "gram"),
        help="dmuon's Newton-Schulz form (default: it chooses by shape)",
    )
    add(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("demo_out"),
        metavar="DIR",
        help="folder for checkpoints, plot and record (default: demo_out)",
    )
    add(
        "--save-every",
        type=positive,
        default=20,
        metavar="N",
        help="steps between checkpoints (default: 20); the last step has one anyway",
    )
    add("--resume", action="store_true", help="continue the checkpoints in --out")
    add(
        "--repeats",
        type=positive,
        default=5,
        metavar="N",
        help="timed updates of each optimizer (default: 5)",
    )
    return parser.parse_args(argv)


def make_mesh() -> Mesh:
    """Eight virtual CPU devices along one axis, with Auto axis types."""
    # The number of virtual devices can be set until the first use of a device, and by
    # one of jax's two ways only.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_platforms", "cpu")
    return Mesh(jax.devices(), (train.AXIS,))


def check(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Refuses arguments that parse but make no sense together."""
    if arguments.batch % mesh.size:
        raise text.InputError(
            f"--batch must be a multiple of the {mesh.size} devices, "
            f"got {arguments.batch}."
        )
    if arguments.seed < 0:
        raise text.InputError(f"--seed must be at least 0, got {arguments.seed}.")


def make_folder(path: pathlib.Path) -> None:
    """Makes the folder for what the demo writes."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise text.InputError(
            f"--out must name a folder that can be made, got {path} ({error.strerror})."
        ) from error


def find_checkpoints(store: Store, arguments: argparse.Namespace) -> dict[str, int]:
    """Steps done in each checkpoint to continue; deletes those not to be continued."""
    if not arguments.resume:
        if any([store.clear(label) for label in LABELS]):
            print(f"Starting anew: the checkpoints in {store.folder} are deleted.")
        return {}
    steps = {label: store.find(label) for label in LABELS}
    found = {label: step for label, step in steps.items() if step is not None}
    if not found:
        raise text.InputError(
            f"--resume must find checkpoints, got none (in {store.folder})."
        )
    if max(found.values()) > arguments.steps:
        raise text.InputError(
            f"--steps must be at least the {max(found.values())} steps of the "
            f"checkpoint, got {arguments.steps}."
        )
    return found


def demo(arguments: argparse.Namespace) -> None:
    """Runs the demo."""
    began = time.perf_counter()
    mesh = make_mesh()
    check(arguments, mesh)
    settings = train.Settings(
        SIZES[arguments.size], batch_size=arguments.batch, seed=arguments.seed
    )
    corpus = text.load_corpus(arguments.data, settings.model.length + 1)
    print(f"Text: {corpus.name}, {corpus.num_bytes / 1e6:.1f} MB.")
    identity = {**dataclasses.asdict(settings), "text": corpus.digest}
    store = Store(arguments.out / CHECKPOINTS, arguments.save_every, identity)
    found = find_checkpoints(store, arguments)
    make_folder(arguments.out)
    problem = train.make_problem(settings, corpus, mesh)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    print(
        f"Model: byte-level GPT with {num_parameters / 1e6:.2f} M parameters, FSDP "
        f"over {mesh.size} virtual CPU devices; {arguments.batch} x "
        f"{settings.model.length} bytes a step."
    )
    plan = plan_owners(
        problem.params,
        mesh,
        muon_weight_dimension_numbers=muon_dimension_numbers,
        method=arguments.method,
    )
    print(f"\n{plan.summary()}\n")
    runs = []
    for who in contenders(plan):
        run = train.start(problem, who)
        if who.label in found:
            train.resume(run, store, found[who.label])
            print(f"{who.label} continues after step {found[who.label]}.")
        bar = report.ProgressBar(who.label, arguments.steps)
        train.train(problem, run, arguments.steps, store, bar.show)
        runs.append(run)
    show(problem, runs, plan, arguments)
    print(f"Whole time: {time.perf_counter() - began:.0f} s.")


def show(
    problem: train.Problem,
    runs: list[train.Run],
    plan: Plan,
    arguments: argparse.Namespace,
) -> None:
    """Prints the table and what follows from it; writes the plot and the record."""
    print("\nTiming the updates in turn ...", flush=True)
    rows = report.make_rows(problem, runs, arguments.repeats)
    print(f"\n{report.format_table(rows)}\n")
    _, theirs, ours = runs
    print(
        "Training losses of dmuon and optax.contrib.muon differ by at most "
        f"{report.difference(theirs, ours):.1e} over {len(ours.losses)} steps; "
        f"an update takes {rows[1].update_ms / rows[2].update_ms:.2f} x less time."
    )
    plot, record = arguments.out / "demo.png", arguments.out / "demo.json"
    report.plot(plot, runs, plan)
    report.write_record(record, rows, runs)
    checkpoints = arguments.out / CHECKPOINTS
    print(f"Plot: {plot}   Record: {record}   Checkpoints: {checkpoints}")


def main(argv: list[str] | None = None) -> int:
    """Entry point: 0 when all went well, 2 for unusable input, 130 when stopped."""
    arguments = parse(argv)
    try:
        demo(arguments)
    except text.InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped; --resume continues from the checkpoints.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
