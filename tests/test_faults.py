"""Faults that Muon has had elsewhere, and the tests that would see them here."""

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon
from tests.references import orthogonalized, relative

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
    "damaged or foreign cache": [
        "test_records.test_damaged_and_foreign_entries_are_ignored_and_replaced",
        "test_records.test_every_truncation_is_seen",
        "test_measure.test_damaged_entries_cost_one_warning_and_are_timed_again",
        "test_kernels_tune.test_a_damaged_table_costs_one_warning_and_is_measured_anew",
    ],
    "cache that cannot be written": [
        "test_records.test_a_full_disk_is_said_once_and_loses_nothing",
        "test_records.test_a_disk_that_is_really_full",
        "test_records.test_a_home_that_is_really_read_only",
        "test_records.test_a_limit_on_file_sizes_costs_one_warning",
        "test_measure.test_a_cache_that_cannot_be_written_costs_one_warning",
        "test_kernels_tune.test_a_table_that_cannot_be_written_costs_one_warning",
    ],
    "many processes write the cache": [
        "test_records.test_many_processes_write_and_read_one_folder",
        "test_kernels_tune.test_what_others_measured_meanwhile_is_kept",
    ],
    "killed while writing the cache": [
        "test_records.test_a_kill_in_the_middle_of_a_write_leaves_a_whole_entry_or_none"
    ],
    "killed while measuring": [
        "test_measure.test_a_kill_while_measuring_keeps_what_was_done",
        "test_costs.test_a_kill_of_the_measuring_process_ends_the_others",
    ],
    "out of memory or time while measuring": [
        "test_measure.test_what_does_not_fit_into_memory_is_scaled_and_said",
        "test_measure.test_time_that_runs_out_leaves_the_scaled_roofline",
    ],
    "processes measure otherwise": [
        "test_costs.test_two_processes_use_the_first_ones_table",
        "test_costs.test_no_process_waits_for_one_that_cannot_measure",
        "test_costs.test_processes_that_would_not_all_measure_are_told_so",
    ],
    "wrong kernels": [
        "test_kernels_tune.test_a_wrong_candidate_cannot_win",
        "test_kernels_triton.test_planted_faults_are_caught",
    ],
}


@functools.cache
def names_in(module):
    text = (pathlib.Path(__file__).parent / f"{module}.py").read_text()
    nodes = ast.walk(ast.parse(text))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tests_of_each_fault_exist(fault):
    for name in FAULTS[fault]:
        module, test = name.split(".")
        assert test in names_in(module)


def mesh4(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(kind,))


def first_step(params, grads, **options):
    tx = dmuon(1.0, ns_steps=1, **options)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    return updates


def test_each_matrix_of_a_stack_has_its_own_norm():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 8, 8)).astype(np.float32)
    x[1, 2] *= 100
    dims = optax.contrib.MuonDimensionNumbers(-2, -1)
    arrays = jax.device_put(x, NamedSharding(mesh4(), P(None, "x")))
    got = first_step(arrays, arrays, muon_weight_dimension_numbers=dims)
    want = orthogonalized(x, dims, ((3.4445, -4.7750, 2.0315),))
    for index in np.ndindex(2, 4):
        assert relative(got[index], -want[index]) <= 1e-4


def test_any_number_of_matrices_of_any_shape():
    rng = np.random.default_rng(0)
    numbers = {(72, 40): 1, (10, 64): 3, (7, 5): 5, (3, 3): 19, (1, 1): 2}
    host = {
        f"{shape} {i}": rng.normal(size=shape).astype(np.float32)
        for shape, count in numbers.items()
        for i in range(count)
    }
    arrays = jax.device_put(host, NamedSharding(mesh4(), P()))
    got = first_step(arrays, arrays)
    for name, x in host.items():
        factor = max(1.0, x.shape[1] / x.shape[0]) ** 0.5
        want = -factor * orthogonalized(x, (0, 1), ((3.4445, -4.7750, 2.0315),))
        assert relative(got[name], want) <= 1e-4, name


def test_any_container_holds_the_parameters():
    rng = np.random.default_rng(0)
    host = [rng.normal(size=s).astype(np.float32) for s in ((8, 12), (12, 4), (4,))]
    a, b, c = jax.device_put(host, NamedSharding(mesh4(), P()))
    want = first_step({"a": a, "b": b, "c": c}, {"a": a, "b": b, "c": c})
    trees = [
        [a, (b, c)],
        (a, {"b": [b], "c": None, "d": c}),
        FrozenDict({"a": a, "deep": {"b": b, "c": c}}),
        optax.EmaState(a, {"b": b, "c": c}),
    ]
    for tree in trees:
        got = first_step(tree, tree)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        for x, name in zip(jax.tree.leaves(got), "abc", strict=True):
            np.testing.assert_array_equal(x, want[name])
        state = jax.tree.leaves(dmuon(1.0).init(tree))
        assert all(isinstance(x, jax.Array) for x in state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_device_s_own_gradients_are_refused(kind):
    mesh = mesh4(kind)
    whole = NamedSharding(mesh, P(None, None))
    tx = dmuon(1.0, ns_steps=1, momentum_shardings=whole)
    params = jax.device_put({"w": jnp.ones((8, 8))}, whole)
    state = tx.init(params)

    def device_step(params, state, grads):
        return tx.update(grads, state, params)[0]

    step = jax.shard_map(
        device_step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P()
    )
    grads = jax.device_put({"w": jnp.ones((32, 8))}, NamedSharding(mesh, P("x", None)))
    with pytest.raises(NotImplementedError, match=r"outside shard_map.*\['w'\]"):
        jax.eval_shape(step, params, state, grads)


def test_no_tracer_leaks():
    mesh = mesh4()
    params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x")))}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    made = []

    @jax.jit
    def init(params):
        made.append(dmuon(0.1, ns_steps=1, param_shardings=shardings))
        return made[0].init(params)

    with jax.checking_leaks():
        state = init(params)
        updates, _ = jax.jit(made[0].update)(params, state, params)
    fresh = dmuon(0.1, ns_steps=1)
    want, _ = jax.jit(fresh.update)(params, fresh.init(params), params)
    np.testing.assert_array_equal(updates["w"], want["w"])
