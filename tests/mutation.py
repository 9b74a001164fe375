"""Mutants: small faults planted in the exchange and the planner, that tests must see.

``python -m tests.mutation --mutants 200`` draws mutants with Cosmic Ray (``pip install
cosmic-ray``) and runs the fast tests on each; then it prints those that survived. It works
on a copy in ``--folder`` and continues where it stopped.
"""

import argparse
import collections
import hashlib
import json
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
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

ROOT = pathlib.Path(__file__).parents[1]
PLANNING = (
    "tests/test_planning_packing.py tests/test_planning_milp.py tests/test_planning.py "
    "tests/test_planning_branches.py "
    "-k 'not fixture and not two_processes and not real_models and not wall'"
)
EXCHANGE = (
    "tests/test_exchange.py tests/test_split.py "
    "-k 'not x-float16 and not fsdp-float16 and not Explicit'"
)
BUFFERS = "tests/test_buffers.py -k 'not float16'"
TESTS = {
    "dmuon_jax/layout.py": EXCHANGE,
    "dmuon_jax/exchange.py": f"tests/test_buffers.py {EXCHANGE}",
    "dmuon_jax/blocks.py": EXCHANGE,
    "dmuon_jax/wire.py": EXCHANGE,
    "dmuon_jax/split.py": EXCHANGE,
    "dmuon_jax/planning/buffers.py": BUFFERS,
    "dmuon_jax/planning/greedy.py": PLANNING,
    "dmuon_jax/planning/bounds.py": PLANNING,
    "dmuon_jax/planning/rounding.py": PLANNING,
    "dmuon_jax/planning/packing.py": PLANNING,
    "dmuon_jax/planning/branches.py": PLANNING,
}
"""What is mutated, and the tests that run on it."""

# Annotations are full of "|", where any other operator is an error at once.
# "is" equals "==" for small integers.
POINTLESS = (
    "core/ReplaceBinaryOperator_BitOr_",
    "core/ReplaceComparisonOperator_Eq_Is",
    "core/ReplaceComparisonOperator_NotEq_IsNot",
)
PATIENCE = 4.0
"""A mutant whose tests run so many times as long as without it counts as seen."""


def copy_tree(folder: pathlib.Path) -> None:
    """Copies the files that git does not ignore, as they are now."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def draw(db, files: list[str], count: int, seed: int) -> None:
    """Keeps one random mutant at each of ``count`` random places; skips the rest."""
    init([pathlib.Path(name) for name in files], db, {})
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


def path_of(item) -> str:
    return str(item.mutations[0].module_path)


def command(tests: str) -> str:
    return f"{sys.executable} -m pytest -x -q -p no:cacheprovider {tests}"


def limits_s(commands: set[str]) -> dict[str, float]:
    """Time limits of tests; runs them without a mutant, once for each state of the files.

    Raises:
      SystemExit: if they fail.
    """
    tree = hashlib.sha256()
    files = [*pathlib.Path("dmuon_jax").rglob("*.py"), *pathlib.Path("tests").glob("*.py")]
    for path in sorted(files):
        tree.update(path.read_bytes())
    kept = pathlib.Path(f"limits-{tree.hexdigest()[:16]}.json")
    limits = json.loads(kept.read_text()) if kept.exists() else {}
    for tests in sorted(commands - set(limits)):
        start = time.monotonic()
        outcome, output = run_tests(command(tests), 600.0)
        if outcome != TestOutcome.SURVIVED:
            sys.exit(f"the tests must pass without a mutant, got\n{output}")
        limits[tests] = PATIENCE * (time.monotonic() - start)
        kept.write_text(json.dumps(limits))
    return limits


def run(db, items, deadline: float) -> None:
    """Tests mutants, after the program without a fault."""
    limits = limits_s({TESTS[path_of(item)] for item in items})
    for item in items:
        if time.monotonic() > deadline:
            return
        tests = TESTS[path_of(item)]
        result = mutate_and_test(item.mutations, command(tests), limits[tests])
        db.set_result(item.job_id, result)
        print(path_of(item), item.mutations[0].start_pos, result.test_outcome, flush=True)


def report(db) -> None:
    """Prints survivors, and the numbers of each file."""
    numbers = collections.defaultdict(collections.Counter)
    for item, result in db.completed_work_items:
        if result.worker_outcome == WorkerOutcome.SKIPPED:
            continue
        numbers[path_of(item)][result.test_outcome.value] += 1
        if result.test_outcome.value != "killed":
            print(f"\n{result.test_outcome.value}:\n{result.diff or result.output}")
    for path, counts in sorted(numbers.items()):
        print(f"{path}: {dict(sorted(counts.items()))}")
    print(f"{len(db.pending_work_items)} left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--files", nargs="+", default=list(TESTS), choices=TESTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/mutation")
    parser.add_argument("--again", action="store_true", help="test survivors again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    copy_tree(options.folder)
    os.chdir(options.folder)
    fresh = not pathlib.Path("session.sqlite").exists()
    with use_db("session.sqlite") as db:
        if fresh:
            draw(db, options.files, options.mutants, options.seed)
        items = db.pending_work_items
        if options.again:
            done = db.completed_work_items
            items = [x for x, y in done if y.test_outcome == TestOutcome.SURVIVED]
        run(db, items, deadline)
        report(db)


if __name__ == "__main__":
    main()
