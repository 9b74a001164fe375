"""Mutants: small faults planted in the exchange and the planner, that tests must see.

``python -m tests.mutation --mutants 200`` draws mutants with Cosmic Ray (``pip install
cosmic-ray``) and runs the fast tests on each; then it prints those that survived. It works
on a copy in ``--folder`` and continues where it stopped.
"""

import argparse
import collections
import math
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult

ROOT = pathlib.Path(__file__).parents[1]
PLANNING = (
    "tests/test_planning_packing.py tests/test_planning_milp.py tests/test_planning.py "
    "tests/test_planning_branches.py "
    "-k 'not fixture and not two_processes and not real_models'"
)
EXCHANGE = "tests/test_exchange.py tests/test_split.py"
TESTS = {
    "dmuon_jax/layout.py": EXCHANGE,
    "dmuon_jax/exchange.py": EXCHANGE,
    "dmuon_jax/split.py": EXCHANGE,
    "dmuon_jax/planning/greedy.py": PLANNING,
    "dmuon_jax/planning/bounds.py": PLANNING,
    "dmuon_jax/planning/rounding.py": PLANNING,
    "dmuon_jax/planning/packing.py": PLANNING,
    "dmuon_jax/planning/branches.py": PLANNING,
}
"""What is mutated, and the tests that run on it."""

# Annotations are full of "|", which nothing evaluates to anything that matters.
POINTLESS = ("core/ReplaceBinaryOperator_BitOr_",)
LIMIT_S = 150.0
"""A mutant whose tests run on for longer counts as seen: some loop for ever."""


def copy_tree(folder: pathlib.Path) -> None:
    """The files under version control, as they are now."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def draw(db, count: int, seed: int) -> None:
    """Keeps one random mutant at each of ``count`` random places; skips the rest."""
    init([pathlib.Path(name) for name in TESTS], db, {})
    places = collections.defaultdict(list)
    for item in db.work_items:
        spec = item.mutations[0]
        if not spec.operator_name.startswith(POINTLESS):
            key = (str(spec.module_path), spec.start_pos, spec.end_pos)
            places[key].append((spec.operator_name, spec.occurrence, item.job_id))
    rng = random.Random(seed)
    chosen = rng.sample(sorted(places), min(count, len(places)))
    kept = {rng.choice(sorted(places[key]))[2] for key in chosen}
    skipped = [x.job_id for x in db.work_items if x.job_id not in kept]
    db.set_multiple_results(skipped, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    print(f"{len(kept)} of {len(places)} places drawn", flush=True)


def run(db, deadline: float) -> None:
    """Tests the mutants that have no result yet."""
    for item in db.pending_work_items:
        if time.monotonic() > deadline:
            return
        path = str(item.mutations[0].module_path)
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {TESTS[path]}"
        result = mutate_and_test(item.mutations, command, LIMIT_S)
        db.set_result(item.job_id, result)
        print(path, item.mutations[0].start_pos, result.test_outcome, flush=True)


def report(db) -> None:
    """Prints survivors, and the numbers of each file."""
    numbers = collections.defaultdict(collections.Counter)
    for item, result in db.completed_work_items:
        if result.worker_outcome == WorkerOutcome.SKIPPED:
            continue
        numbers[str(item.mutations[0].module_path)][result.test_outcome.value] += 1
        if result.test_outcome.value != "killed":
            print(f"\n{result.test_outcome.value}:\n{result.diff or result.output}")
    for path, counts in sorted(numbers.items()):
        print(f"{path}: {dict(sorted(counts.items()))}")
    print(f"{len(db.pending_work_items)} left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/mutation")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    copy_tree(options.folder)
    os.chdir(options.folder)
    fresh = not pathlib.Path("session.sqlite").exists()
    with use_db("session.sqlite") as db:
        if fresh:
            draw(db, options.mutants, options.seed)
        run(db, deadline)
        report(db)


if __name__ == "__main__":
    main()
