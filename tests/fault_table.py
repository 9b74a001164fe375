"""The page of faults, from the docstrings of the tests.

A test that injects a fault says in its docstring::

    Fault: what goes wrong
    Happens: what a user then sees
    Kept: what is not lost

``python -m tests.fault_table --write`` writes ``notebooks/faults.md`` anew; a test compares.
"""

import ast
import dataclasses
import functools
import inspect
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
PAGE = FOLDER.parent / "notebooks/faults.md"
FIELDS = ("Fault", "Happens", "Kept")
# Besides assert, calls that check: by the start of their names.
CHECKS = ("raises", "assert_", "check_", "trees_close", "no_worse", "execute")

INTRODUCTION = """\
# Faults

Made from the tests by `python -m tests.fault_table --write`.

## What happens, and what is kept

Each row is a test that brings the fault about.
"""

SEEN = """\
## Faults that Muon has had elsewhere

Each kind has tests here that fail where it comes back.
"""

FAULTS = {
    "update depends on the sharding": [
        "test_layouts.test_updates_equal_the_reference",
        "test_fuzz.test_updates_equal_numpy",
    ],
    "collectives inside the iteration": [
        "test_layouts.test_collectives_and_bytes_equal_the_plan",
        "test_layouts.test_no_work_is_repeated",
    ],
    "default rule on stacked layers": [
        "test_routing.test_report_flags_the_default_rule_on_stacks"
    ],
    "wrong axes in scanned models": [
        "test_routing.test_trees_by_hand",
        "test_fuzz.test_updates_equal_numpy",
    ],
    "one norm for a stack": [
        "test_faults.test_each_matrix_of_a_stack_has_its_own_norm",
        "test_optax_parity.test_same_updates_and_state",
    ],
    "experts gathered or skipped": [
        "test_layouts.test_collectives_and_bytes_equal_the_plan"
    ],
    "fan in and fan out swapped": [
        "test_layouts.test_updates_equal_the_reference",
        "test_optax_parity.test_same_updates_and_state",
    ],
    "wrapped and nested trees": [
        "test_muon.test_nnx_optimizer_equals_the_plain_tree",
        "test_muon.test_linen_train_state",
        "test_routing.test_variables_of_nnx_and_boxes_of_linen_run",
        "test_faults.test_any_container_holds_the_parameters",
    ],
    "dimension does not divide": [
        "test_layouts.test_updates_equal_the_reference",
        "test_fuzz.test_bad_leaves_are_refused_by_name",
        "test_faults.test_any_number_of_matrices_of_any_shape",
    ],
    "one row or column": [
        "test_layouts.test_updates_equal_the_reference",
        "test_newton_schulz.test_special_matrices",
    ],
    "fused query, key and value": ["test_split.test_parts_equal_separate_matrices"],
    "fused gate and up": ["test_split.test_parts_equal_separate_matrices"],
    "head count of a shard": ["test_split.test_parts_equal_separate_matrices"],
    "replicas stacked as shards": ["test_layouts.test_updates_equal_the_reference"],
    "gradients not reduced": [
        "test_unreduced.test_updates_equal_those_of_the_sum",
        "test_faults.test_a_device_s_own_gradients_are_refused",
    ],
    "zero gradients": [
        "test_muon.test_zero_gradients_give_zero_updates",
        "test_optax_parity.test_zero_gradients_give_zero_updates",
    ],
    "overflow before normalising": [
        "test_newton_schulz.test_half_precision_gradients_do_not_overflow",
        "test_muon.test_named_methods_and_dtypes_run_and_stay_close",
    ],
    "skipped step": ["test_muon.test_a_skipped_step_leaves_no_trace"],
    "tiny gradients": [
        "test_newton_schulz.test_scale_does_not_matter_without_eps",
        "test_newton_schulz.test_eps_is_optax_eps_at_any_scale",
    ],
    "dtypes flip": ["test_muon.test_updates_keep_the_gradients_dtype"],
    "wrong branch on a device": ["test_fuzz.test_parcels_return_bit_for_bit"],
    "varying axes of kernels": [
        "test_kernels.test_one_program_lowers_for_any_platform",
        "test_kernels_triton.test_inside_vmap_and_scan",
    ],
    "leaked tracers": ["test_faults.test_no_tracer_leaks"],
    "injected hyperparameters": ["test_muon.test_learning_rate_can_be_injected"],
    "schedule of both halves": [
        "test_optax_parity.test_same_updates_and_state",
        "test_muon.test_equals_optax_on_a_mesh_with_the_same_state",
    ],
    "second compilation": [
        "test_muon.test_one_compilation_and_constant_state_over_five_steps",
        "test_layouts.test_shardings_are_kept_and_one_program_compiled",
    ],
    "state and parameter shardings": [
        "test_layouts.test_shardings_are_kept_and_one_program_compiled",
        "test_state_shardings.test_each_array_has_the_sharding_of_its_kind",
    ],
    "explicit meshes": [
        "test_layouts.test_updates_equal_the_reference",
        "test_unreduced.test_updates_equal_those_of_the_sum",
    ],
    "donated aliases": [
        "test_muon.test_init_under_jit_and_eval_shape_gives_the_same_state",
        "test_muon.test_equals_optax_on_a_mesh_with_the_same_state",
    ],
    "indefinite Gram matrix": [
        "test_newton_schulz.test_gram_in_half_precision_needs_its_restart",
        "test_newton_schulz.test_hard_spectra",
    ],
    "intermediates kept": [
        "test_newton_schulz.test_memory_does_not_grow_with_the_steps",
        "test_waves.test_memory_does_not_grow_with_steps",
    ],
    "processes disagree": [
        "test_processes.test_processes_that_plan_otherwise_are_told_so",
        "test_processes.test_train_kill_resume_with_other_process_counts",
        "test_planning.test_same_plan_in_two_processes",
    ],
    "import touches the backend": [
        "test_muon.test_import_and_construction_touch_no_device",
        "test_kernels.test_importing_touches_no_backend",
    ],
    "accumulation": ["test_muon.test_accumulation_equals_the_mean_gradient"],
    "resume on another mesh": [
        "test_elastic.test_steps_after_a_restore_equal_the_uninterrupted_run",
        "test_elastic.test_the_state_has_no_trace_of_mesh_or_plan",
        "test_elastic.test_a_checkpoint_of_optax_is_continued_and_given_back",
    ],
    "old GPUs": ["test_kernels.test_choice"],
    "ragged tiles": ["test_kernels_triton.test_ragged_shapes_through_the_entry_points"],
    "limits of the solver": [
        "test_planning.test_stopped_at_once",
        "test_planning.test_impossible_costs",
        "test_planning.test_fewer_matrices_than_devices",
        "test_planning_milp.test_failure_of_highs_is_said",
        "test_planning_milp.test_missing_highspy_is_said",
    ],
    "killed in a step": [
        "test_processes.test_train_kill_resume_with_other_process_counts"
    ],
    "killed in a save": [
        "test_processes.test_a_kill_during_a_save_keeps_the_checkpoint_before"
    ],
    "damaged plans": [
        "test_fuzz.test_damaged_plans_are_refused_or_harmless",
        "test_fuzz.test_foreign_and_future_plans_are_refused",
    ],
    "wrong kernels": [
        "test_kernels_tune.test_a_wrong_candidate_cannot_win",
        "test_kernels_triton.test_planted_faults_are_caught",
    ],
}
"""Kinds of faults reported for implementations of Muon in public, and the tests of each."""


@dataclasses.dataclass(frozen=True)
class Test:
    """A test as it is written.

    Attributes:
      module: name of its file.
      name: name of the function.
      doc: its docstring.
      checks: number of its asserts, and of calls that assert.
    """

    __test__ = False

    module: str
    name: str
    doc: str
    checks: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault that a test injects, in sentences."""

    fault: str
    happens: str
    kept: str
    test: str


@functools.cache
def all_tests() -> tuple[Test, ...]:
    """Every test of this folder, in the order of files and lines."""
    found = []
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                doc = ast.get_docstring(node) or ""
                found.append(Test(path.stem, node.name, doc, count_checks(node)))
    return tuple(found)


def count_checks(test: ast.FunctionDef) -> int:
    total = 0
    for node in ast.walk(test):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            total += name.startswith(CHECKS) or "check=True" in ast.unparse(node)
        total += isinstance(node, ast.Assert)
    return total


def read_row(test: Test) -> Row | None:
    """The fault of a test, if its docstring names one.

    Raises:
      ValueError: if it names one, but not all that belongs to it.
    """
    fields: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(test.doc).splitlines():
        start, colon, rest = line.partition(":")
        if colon and start in FIELDS:
            name, line = start, rest
        if name:
            fields[name] = f"{fields.get(name, '')} {line.strip()}".strip()
    if "Fault" not in fields:
        return None
    if missing := set(FIELDS) - set(fields):
        raise ValueError(
            f"a fault must have {', '.join(FIELDS)}, got none of {sorted(missing)} "
            f"at {test.module}.{test.name}"
        )
    return Row(*(fields[x] for x in FIELDS), test=f"{test.module}.{test.name}")


def rows() -> list[Row]:
    return [row for test in all_tests() if (row := read_row(test))]


def page() -> str:
    """``notebooks/faults.md``."""
    head = "| fault | what happens | what is kept | test |"
    lines = [INTRODUCTION, head, "|---|---|---|---|"]
    lines += [f"| {x.fault} | {x.happens} | {x.kept} | `{x.test}` |" for x in rows()]
    lines += ["", SEEN, "| fault | tests |", "|---|---|"]
    for fault, tests in FAULTS.items():
        lines.append(f"| {fault} | {', '.join(f'`{x}`' for x in tests)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
