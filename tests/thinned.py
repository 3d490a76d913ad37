"""Tests with many parameters of which every n-th runs in `make test`; all of them run in `make test-all`.

What they hold is held by others as well: laws, the fuzzer, or their own neighbours. Parameters that vary fastest take turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

EVERY = {
    "test_answers.py::test_a_loss_in_any_form_is_that_of_the_whole_batch": 2,
    "test_argument_entries.py::test_what_a_forward_changes_in_a_dictionary_is_there_for_the_script": 3,
    "test_awaited_state.py::test_what_a_forward_leaves_is_there_for_the_loss": 2,
    "test_backward_proof.py::test_rounding_is_not_taken_for_mixing": 3,
    "test_by_size.py::test_a_loss_fn_that_decides_by_size_runs_in_two_passes": 3,
    "test_by_size.py::test_what_does_the_same_for_any_number_is_cut": 2,
    "test_caching.py::test_the_books_balance": 3,
    "test_call_attributes.py::test_a_call_runs_with_what_the_model_was_then": 6,
    "test_call_contents.py::test_between_steps_all_may_change": 3,
    "test_call_contents.py::test_what_is_set_after_the_call_does_not_reach_its_forward": 3,
    "test_compose.py::test_composed_checkpoints_are_the_traced_ones_to_the_byte": 6,
    "test_compose.py::test_the_traced_peak_is_affine_and_right_at_a_size_that_was_not_traced": 4,
    "test_cuda.py::test_recurrent_networks_are_traced": 3,
    "test_cuda.py::test_what_is_written_elsewhere_is_none": 4,
    "test_cuda.py::test_what_is_written_through_data_before_a_call_runs_again_is_an_error_in_the_next_steps": 3,
    "test_cuda.py::test_what_is_written_through_data_before_the_backward_is_an_error_in_the_next_steps": 3,
    "test_decides.py::test_gradients_are_exact_although_nothing_is_decided_at_first": 4,
    "test_decides.py::test_losses_of_some_of_the_samples_are_exact": 3,
    "test_divisors.py::test_a_loss_may_count_what_is_nowhere_in_the_batch": 4,
    "test_doors.py::test_what_forward_hooks_keep_is_joined": 2,
    "test_elastic.py::test_a_bad_state_is_refused_in_three_parts_and_nothing_of_it_is_taken": 4,
    "test_elastic.py::test_an_interrupted_epoch_goes_on_and_the_next_ones_follow": 4,
    "test_elastic.py::test_thirty_steps_on_one_two_three_and_one_process_by_other_plans": 3,
    "test_elsewhere.py::test_the_zoo_is_traced_for_a_card": 3,
    "test_evaluate.py::test_a_model_that_returns_something_else_is_joined_as_that": 2,
    "test_evaluate.py::test_masks_that_an_evaluation_made_may_be_trained_with": 3,
    "test_extents.py::test_a_micro_batch_holds_no_more_than_fits_of_samples_that_are_long_in_different_tensors": 3,
    "test_free_losses.py::test_a_loss_by_hand_runs_nothing_twice": 5,
    "test_fuzz.py::test_what_was_found_once": 8,
    "test_fuzz_shares.py::test_what_was_found_once": 10,
    "test_guest_trainer.py::test_the_trainer_trains_a_wrapped_model_as_it_trains_a_plain_one": 4,
    "test_idioms.py::test_it_trains_as_without_memfit": 3,
    "test_installed_once.py::test_hooks_of_a_first_forward_are_there_once": 3,
    "test_kept.py::test_an_output_may_be_read_in_inference_mode": 3,
    "test_kept.py::test_memory_may_run_out_in_what_is_kept": 3,
    "test_known_losses.py::test_losses_of_classes": 3,
    "test_known_losses.py::test_losses_of_numbers": 3,
    "test_known_losses.py::test_ways_from_the_output_to_the_loss": 3,
    "test_laws.py::test_every_loss_in_every_mode": 6,
    "test_laws.py::test_the_familys_own_loss": 5,
    "test_laws.py::test_twenty_steps_with_clipping_and_a_schedule": 4,
    "test_laws_gpu.py::test_every_loss": 4,
    "test_ledger.py::test_traced_is_what_real_tensors_take": 8,
    "test_levers.py::test_blocks_are_computed_again_on_the_state_that_they_began_with": 6,
    "test_looks.py::test_a_loss_with_what_has_no_graph": 3,
    "test_looks.py::test_a_metric_before_the_loss_is_free": 3,
    "test_migration.py::test_accumulating_two_is_training_on_two": 2,
    "test_no_sync.py::test_a_familys_step_does_not_wait_more_often": 2,
    "test_no_sync.py::test_a_step_does_not_wait_more_often": 3,
    "test_no_trace.py::test_failing_and_interrupted_planning_leaves_no_trace": 4,
    "test_numbers.py::test_a_stage_that_mixes_samples_is_refused_at_once": 4,
    "test_numbers.py::test_another_stage_is_another_kind_of_call": 4,
    "test_optimizer_code.py::test_what_a_step_moves_is_moved_once": 4,
    "test_overlap.py::test_memory_that_runs_out_in_the_last_backward": 6,
    "test_packed_sequences.py::test_gradients_are_those_of_the_whole_batch": 2,
    "test_phases.py::test_every_phase_holds_what_was_traced": 4,
    "test_phases.py::test_gradients_that_stay_lie_beside_what_memfit_gathers": 3,
    "test_planning_run.py::test_a_profile_is_of_micro_batches_that_ran_with_its_blocks_checkpointed": 2,
    "test_planning_run.py::test_running_out_of_memory_while_sizes_are_timed_only_makes_them_smaller": 3,
    "test_planning_run.py::test_what_a_disturbance_made_look_too_large_is_measured_again_before_it_is_refused": 2,
    "test_planning_run.py::test_what_runs_holds_what_was_traced": 5,
    "test_ranks.py::test_a_rank_that_runs_out_of_memory_begins_its_share_again": 4,
    "test_ranks.py::test_gradients_are_reduced_once_however_many_micro_batches_there_are": 4,
    "test_ranks.py::test_the_parameters_do_not_depend_on_the_number_of_processes": 4,
    "test_ranks_by_size.py::test_a_forward_that_only_the_whole_would_change_is_said": 3,
    "test_ranks_by_size.py::test_a_loss_fn_is_computed_of_each_share": 6,
    "test_ranks_faults.py::test_a_sum_that_runs_out_of_memory_is_taken_up_again": 2,
    "test_ranks_faults.py::test_random_faults_of_what_is_held_in_parts": 3,
    "test_ranks_faults.py::test_rank_0_evaluates_and_saves_alone": 2,
    "test_ranks_laws.py::test_outputs_that_no_loss_uses_and_losses_in_two_passes": 8,
    "test_ranks_laws.py::test_the_familys_own_loss": 6,
    "test_ranks_laws.py::test_the_familys_own_loss_in_parts": 8,
    "test_read_after.py::test_a_loss_of_the_models_own_that_is_only_read": 3,
    "test_read_after.py::test_what_is_read_after_the_step": 3,
    "test_recovery.py::test_a_repeated_proof_that_cannot_run_is_left_out_and_said": 2,
    "test_recovery.py::test_after_any_of_them_the_batch_trains_once_in_smaller_micro_batches": 4,
    "test_recovery.py::test_leaving_layers_out_is_no_mixing_of_samples": 2,
    "test_recovery.py::test_script_mode_recovers_wherever_its_passes_fail": 4,
    "test_replaced_state.py::test_state_is_that_of_plain_pytorch": 4,
    "test_replay.py::test_any_loss_of_the_whole_output": 3,
    "test_script_mode.py::test_a_compiled_script_around_a_cut_model": 2,
    "test_script_mode.py::test_a_few_samples_are_planned_as_many_are": 6,
    "test_script_mode.py::test_nested_inputs_and_outputs": 3,
    "test_script_mode.py::test_numbers_that_change_at_every_step_leave_nothing_behind": 3,
    "test_script_mode.py::test_outputs_read_around_the_loss": 4,
    "test_shard.py::test_losses_that_are_computed_before_a_backward_keep_their_gradients_apart": 4,
    "test_shard.py::test_rank_0_evaluates_and_saves_alone": 3,
    "test_shard.py::test_the_same_training_with_a_part_of_the_state": 8,
    "test_shard.py::test_the_same_training_with_parts_of_everything": 6,
    "test_shard.py::test_what_one_level_saved_another_loads": 3,
    "test_simulated_laws.py::test_an_allocation_that_fails_while_planning_is_survived": 2,
    "test_simulated_laws.py::test_planning_leaves_no_trace_on_the_device": 2,
    "test_simulated_laws.py::test_what_counts_is_looked_at_on_the_device": 3,
    "test_simulated_laws.py::test_what_is_counted_is_read_once_a_step": 2,
    "test_sizes.py::test_a_size_between_two_traced_ones_needs_what_its_own_trace_says": 8,
    "test_split.py::test_batches_of_other_lengths_are_known_by_their_shapes": 2,
    "test_state_moves.py::test_a_loss_fn_that_cuts_its_batch_moves_state_as_often_as_it_would": 3,
    "test_state_moves.py::test_a_loss_reads_parameters_that_all_samples_have_written": 3,
    "test_state_moves.py::test_a_loss_that_draws_from_an_iterator_draws_once_per_batch": 3,
    "test_state_moves.py::test_calls_move_state_in_their_order_whichever_is_used_first": 4,
    "test_state_moves.py::test_state_moves_as_often_as_the_scripts_own_checkpoint_computes": 2,
    "test_state_moves.py::test_state_of_a_forward_moves_once_per_batch": 8,
    "test_state_moves.py::test_state_of_a_loss_moves_once_per_batch": 2,
    "test_state_moves.py::test_wherever_an_iterator_is_held": 3,
    "test_strays.py::test_they_are_the_mean_over_processes": 3,
    "test_takeover.py::test_a_script_for_distributed_data_parallel_trains_as_one_process_would": 4,
    "test_untidy.py::test_it_is_as_without_memfit": 2,
    "test_weighting.py::test_every_family_by_its_own_loss": 2,
    "test_wholenorm.py::test_running_statistics_are_those_of_the_whole_batch": 4,
}


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what is not every n-th."""
    met: dict[str, int] = defaultdict(int)
    for item in items:
        name = item.nodeid.split("/")[-1].split("[")[0]
        every = EVERY.get(name)
        if every is None or item.get_closest_marker("slow") is not None:
            continue
        at, met[name] = met[name], met[name] + 1
        if (at + at // every) % every:
            item.add_marker(pytest.mark.slow)
