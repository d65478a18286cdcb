"""The fast tier of tests, and what it leaves out for ``--all``."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

#: FILE or FILE::TEST, below tests/ -> why the fast tier leaves it out.
LEFT_OUT = {
    "socket/test_backend_life.py": "each test starts and kills backends of its own",
    "socket/test_doctor_full.py": "starts backends one after another, and kills a rank",
    "socket/test_faults.py": "a backend, and processes that are killed",
    "socket/test_machines.py": "backends on two hosts",
    "socket/test_serve.py::test_status_sample_bench_and_stop": "starts a backend",
    "socket/test_serve.py::test_a_backend_that_ends_by_itself_ends_with_an_error": "starts a backend",
    "socket/test_cli_sample.py::test_the_page_example_makes_the_image": "starts a backend",
    "socket/test_launcher.py::test_backend_is_reused_until_its_topology_changes": "starts three backends",
    "socket/test_launcher.py::test_weights_that_nobody_keeps_make_room": "starts a backend",
    "socket/test_launcher.py::test_giving_up_during_a_load_ends_the_backend": "starts a backend",
    "socket/test_odd_files.py::test_a_backend_refuses_them_and_runs_on": "starts a backend",
    "socket/test_odd_loras.py::test_two_ranks_refuse_and_stay": "starts a backend",
    "socket/test_odd_loras.py::test_a_file_that_turns_bad_is_refused_before_the_ranks_hear": "a backend",
    "socket/test_odd_loras.py::test_paths_and_strengths_that_cannot_be": "starts a backend",
    "socket/test_allowed_folders.py::test_a_client_loads_from_the_allowed_folders_alone": "starts a backend",
    "socket/test_cli_sample.py::test_ranks_that_stay_give_the_latent_of_the_same_request": "starts a backend",
    "unit/test_compiled_blocks.py::test_batches_have_graphs_of_their_own_at_most_once": "traces five times",
    "ranks/test_compilers.py": "traces blocks on two ranks",
    "unit/test_inductor.py::test_inductor_keeps_the_latent": "a C++ compiler, for a minute",
    "unit/test_effect_order.py::test_inductor_alone_moves_them": "of Inductor, and once more a trace",
    "unit/test_effect_order.py::test_opaque_operations_run_in_the_order_of_the_code": "traces blocks",
    "unit/test_lora_fused.py::test_magnitudes_of_columns_run_through_all_of_them": "loads large matrices",
    "unit/test_lora_products.py::test_stacks_are_the_whole_differences": "every stack of every kind",
    "unit/test_lora_products.py::test_compiled_blocks_have_no_graphs_of_their_own_for_them": "traces blocks",
    "unit/test_qwen_image21_masks.py::test_compiled_blocks_share_the_mask_too": "traces blocks",
    "unit/test_compiled_first_frame.py::test_blocks_of_a_given_first_frame_are_compiled": "traces blocks",
    "unit/test_compiled_blocks.py::test_quantized_layers_are_one_node_of_a_graph": "traces blocks",
    "unit/test_compiled_blocks.py::test_staged_blocks_are_told_apart_from_compiled_ones": "traces blocks",
    "unit/test_variants.py::test_modulation_of_a_mask_is_cached_once_a_level": "three requests of a video",
    "unit/test_device_memory.py::test_the_heap_of_a_cpu_rank_shrinks_when_a_model_leaves": "starts a process",
    "unit/test_preflight.py::test_a_process_that_could_not_be_started_is_started_again": "starts a process",
    "unit/test_doctor_processes.py": "starts processes that import everything",
    "unit/test_doctor_overhead.py::test_a_lab_measures_it": "starts a program and measures",
    "unit/test_lean_imports.py::test_broken_packages_and_an_older_torch_do_not_hinder_ranks": "imports all",
    "socket/test_doors.py::test_ranks_of_several_machines_need_the_gpus_of_their_own": "starts ranks",
    "unit/test_preflight.py::test_a_process_answers_several_questions": "starts a process",
    "unit/test_probe_process.py::test_a_rank_that_a_signal_ends_is_named": "starts ranks",
    "unit/test_doctor_lab.py::test_files_of_a_doctor_that_was_killed_go_with_the_next_launch": "a process",
    "socket/test_silence.py::test_work_is_no_silence": "computes for seconds",
    "unit/test_memory_page.py::test_the_page_is_what_the_script_makes": "describes every file, for a minute",
    "unit/test_scaling_page.py::test_the_page_is_what_the_script_makes": "projects and counts every model",
    "socket/test_scaling.py::test_scaling_measures_two_ranks": "starts ranks and measures",
    "unit/test_benchmarks.py::test_peers_compares_rings_of_two_ranks": "starts ranks and measures",
    "socket/test_allowed_folders.py::test_a_folder_that_is_allowed_later_needs_another_backend": "two",
    "socket/test_odd_messages.py::test_it_is_refused_and_the_ranks_stay": "a backend; the fuzz has no ranks",
    "socket/test_odd_messages.py::test_freeing_what_is_not_there": "starts a backend",
    "socket/test_odd_messages.py::test_a_loop_of_links_is_refused": "starts a backend",
    "socket/test_odd_messages.py::test_what_cannot_be_described": "starts a backend",
    "socket/test_odd_messages.py::test_a_sample_after_all_of_them_is_exact": "starts a backend",
    "unit/test_measurements.py::test_a_package_named_backend_where_comfyui_runs_does_not_measure": "measures",
    "unit/test_planned_keys.py::test_keys_and_values_of_every_control_video_are_planned": "loads every one",
    "unit/test_demo.py::test_colours_and_places_follow_the_prompt": "makes images of the demo model",
    "unit/test_demo.py::test_shapes_mostly_follow_too": "makes images of the demo model",
    "unit/test_patches.py::test_equal_rows_of_modulation_are_computed_once": "many requests of a batch",
    "unit/test_patches.py::test_nothing_survives_a_request": "many requests of every kind",
    "unit/test_fallback.py::test_self_check_command": "starts processes that import everything",
    "unit/test_probe_process.py::test_what_is_measured_once_links_work_may_take_longer": "waits for seconds",
    "unit/test_lean_imports.py::test_nothing_is_hidden_where_something_else_needs_it": "imports everything",
    "unit/test_loading.py::test_a_stage_needs_half_of_the_memory": "writes and reads a large file",
    "comfy/test_auto.py::test_without_a_config_the_cpu_has_one_rank": "starts another backend",
    "comfy/test_comfy_graph.py::test_cancel_in_a_slow_first_step_frees_the_queue": "a step of a minute",
    "comfy/test_auto.py::test_degrees_that_are_set_are_taken": "starts another backend",
    "comfy/test_doctor_node.py::test_full_measures_ranks_and_those_of_graphs_start_again": "minutes of ranks",
    "comfy/test_doctor_node.py::test_cancel_ends_it_and_its_ranks": "ranks of the doctor",
    "comfy/test_page.py": "a browser, and another real ComfyUI",
    "comfy/test_folded_inputs.py": "a browser, and another real ComfyUI",
    "comfy/test_comfy_workflows.py": "a real ComfyUI makes an image of every template",
    "comfy/test_headless.py": "programs that make images in a real ComfyUI",
    "comfy/test_diffusers_folders.py": "a diffusers pipeline for every test",
    "comfy/test_fallback_graphs.py": "a real ComfyUI with every family's checkpoint",
    "comfy/test_family_graphs.py": "a real ComfyUI with every family's checkpoint",
    "comfy/test_variant_graphs.py": "a real ComfyUI with every family's checkpoint",
    "comfy/test_super_resolution.py": "a real ComfyUI with every family's checkpoint",
    "comfy/test_half_precision.py": "ComfyUI's model of every family",
    "comfy/test_lora.py": "a backend for every family",
    "comfy/test_native_products.py": "samples 20 seeds of every format; unit/test_matmul.py has the bits",
    "comfy/test_cached_arguments.py": "a backend in ComfyUI's process",
    "comfy/test_parallel_model.py": "a backend in ComfyUI's process, for every family",
    "comfy/test_parallel_model_plans.py": "a backend in ComfyUI's process",
    "comfy/test_parallel_model_refusals.py": "a backend in ComfyUI's process",
    "comfy/test_stock_loras.py": "a backend in ComfyUI's process",
    "comfy/test_stock_lora_files.py": "a backend in ComfyUI's process",
    "comfy/test_positions.py": "ComfyUI's tables of positions at every released size",
    "comfy/test_quantized.py": "ComfyUI's layouts; unit/test_quantized.py has our own formulas",
    "comfy/test_quantized_graphs.py": "two loads of every file, and ComfyUI's model of it",
    "comfy/test_samplers.py": "a backend in ComfyUI's process, for every family",
    "comfy/test_solvers.py": "ComfyUI's solvers on every schedule; unit/test_solvers.py has orders and bits",
    "comfy/test_variants.py": "ComfyUI's model of every variant",
    "comfy/test_comfy_graph.py::test_every_way_to_use_ranks_from_the_graph": "loads for every degree",
    "comfy/test_comfy_failures.py::test_killed_rank_is_named_and_the_next_queue_works": "another backend",
    "comfy/test_comfy_failures.py::test_nothing_is_left_when_comfyui_is_killed": "starts another ComfyUI",
    "comfy/test_comfy_graph.py::test_interrupt_takes_a_step_and_the_next_in_the_queue_starts_at_once": "slow",
}
#: FILE::TEST -> how many of its parameters, evenly spread, the fast tier takes.
SOME = {
    "unit/test_dequantized.py::test_bits_do_not_depend_on_the_passes": 5,
    "unit/test_dequantize_once.py::test_each_is_made_once_with_the_same_bits": 2,
    "unit/test_golden.py::test_flux_case": 9,
    "unit/test_header_metadata.py::test_ltx2_of_the_transformer_alone": 1,
    "unit/test_header_metadata.py::test_wan_models_that_the_header_alone_tells": 4,
    "unit/test_pack_imports.py::test_scripts_can_use_it_without_comfyui": 4,
    "unit/test_messages.py::test_values_travel_while_queries_and_keys_are_made_ready": 3,
    "unit/test_messages.py::test_float8_travels_in_as_many_messages": 1,
    "unit/test_messages.py::test_halves_travel_while_others_are_computed": 1,
    "unit/test_compiled_blocks.py::test_addresses_of_a_steady_micro_step_stay": 1,
    "unit/test_fuzz.py::test_frames_are_refused_or_accepted": 1,
    "unit/test_launches.py::test_a_step_in_steady_state_waits_for_nothing": 1,
    "unit/test_launches.py::test_nor_does_one_of_many_ranks": 1,
    "unit/test_steady_state.py::test_modulation_of_a_later_chunk_is_not_waited_for": 2,
    "unit/test_messages.py::test_flux_under_all_hybrids": 2,
    "unit/test_messages.py::test_every_family": 1,
    "unit/test_scaling_page.py::test_describe_counts_what_the_dry_run_does": 2,
    "unit/test_packed.py::test_loras_are_held_apart_from_the_weights": 1,
    "unit/test_scaling_page.py::test_lines_of_a_family_are_in_the_page": 1,
    "unit/test_scaling_page.py::test_a_dry_run_is_as_stored": 1,
    "unit/test_doctor_steps.py::test_a_released_model_is_timed_with_few_blocks": 1,
    "unit/test_parking.py::test_nothing_else_holds_the_memory_and_the_latent_is_the_same": 1,
    "unit/test_admission.py::test_tiny_models_are_admitted_with_what_they_hold": 2,
    "unit/test_planned_keys.py::test_a_family_holds_the_keys_and_values_that_are_planned": 2,
    "unit/test_gguf.py::test_gguf_blocks_with_scales_of_nan_are_refused_as_they_are_read": 2,
    "unit/test_patches.py::test_modulation_ahead_is_bounded": 1,
    "unit/test_rank_memory.py::test_weights_are_those_of_the_loaded_rank": 8,
    "unit/test_rank_memory.py::test_sharded_weights_are_those_of_the_loaded_rank": 5,
    "unit/test_rank_memory.py::test_activations_are_about_what_a_request_allocates": 1,
    "unit/test_rank_memory.py::test_activations_of_control_videos_are_about_what_they_allocate": 1,
    "unit/test_released.py::test_a_released_file": 30,
    "unit/test_lora_lists.py::test_a_list": 10,
    "unit/test_variant_refusals.py::test_refusals_name_the_remedy": 20,
    "unit/test_planner.py::test_choice_keeps_its_promises": 30,
    "unit/test_packed.py::test_every_format": 3,
    "unit/test_solvers.py::test_stochastic_solvers_keep_the_distribution": 4,
    "unit/test_lora_names.py::test_both_names_of_every_matrix": 3,
    "unit/test_computed_once.py::test_keys_and_values_of_the_prompt_are_computed_once_a_request": 1,
    "unit/test_computed_once.py::test_embedders_of_the_timestep_run_once_an_evaluation": 10,
    "unit/test_local_embedding.py::test_an_embedder_is_given_the_tokens_of_its_forward": 10,
    "unit/test_families.py::test_diffusers_folder_has_the_same_weights": 9,
    "unit/test_families.py::test_single_file_with_diffusers_names": 9,
    "unit/test_families.py::test_the_cost_of_a_block_is_what_it_multiplies": 6,
    "unit/test_packed.py::test_every_family_multiplies_by_float8": 4,
    "unit/test_fallback.py::test_half_precision_is_near": 2,
    "socket/test_bad_tensors.py::test_a_broken_tensor_is_refused_or_runs": 6,
    "comfy/test_comfy_graph.py::test_same_latent_as_ksampler": 2,
    "comfy/test_comfy_graph.py::test_same_latent_from_comfyuis_ksampler": 2,
    "comfy/test_comfy_failures.py::test_bad_input_is_one_sentence_and_the_next_queue_works": 4,
}
#: FILE::TEST of what the engine does alike for all families of one signature: the fast tier takes the first.
#: A family's golden latent, which shows its data, is not among them.
OF_SIGNATURES = (
    "unit/test_families.py::test_patches_against_full_buffers_equal_the_whole",
    "unit/test_tensor_parallel.py::test_megatron_halves_the_blocks_of_every_family",
    "comfy/test_families.py::test_unet_config_is_what_comfyui_detects_of_its_file",
)
TESTS = Path(__file__).parents[1]


def params(runs: Iterable) -> list:
    """Runs of a rank program as parameters: each with its id, and marked ``full`` where the fast tier leaves
    it out."""
    return [pytest.param(run, id=run.id, marks=() if run.is_fast else pytest.mark.full) for run in runs]


def choose(items: list):
    """Mark the tests ``full`` that the tables above leave out."""
    numbers = {}
    for item in items:
        name = name_of(item)
        numbers.setdefault(name, []).append(item)
        file = name.partition("::")[0]
        if name in LEFT_OUT or file in LEFT_OUT or (name in OF_SIGNATURES and not _represents(item)):
            item.add_marker(pytest.mark.full)
    for name, count in SOME.items():
        group = numbers.get(name, [])
        chosen = {round(i * (len(group) - 1) / max(1, count - 1)) for i in range(count)}
        for i, item in enumerate(group):
            if i not in chosen:
                item.add_marker(pytest.mark.full)


def name_of(item) -> str:
    """FILE::TEST, without parameters; the file below tests/."""
    return f"{Path(item.path).relative_to(TESTS)}::{item.originalname or item.name}"


def _represents(item) -> bool:
    """Is a test's family the representative of its signature, or no golden family?"""
    known, chosen = _families()
    cases = [value for value in item.callspec.params.values() if isinstance(value, str)]
    return not any(case in known and case not in chosen for case in cases)


@cache
def _families() -> tuple[set[str], set[str]]:
    """The golden families, and the representatives of their signatures."""
    import signatures  # here, since it imports diffusers, which most tests do not need
    from families import LATENT_FORMATS

    return set(LATENT_FORMATS), set(signatures.representatives(list(LATENT_FORMATS)).values())


def is_full(item) -> bool:
    """Does the test run under --all alone?"""
    return item.get_closest_marker("full") is not None


def is_named(item) -> bool:
    """Is the test asked for by its id, of a file's tests or of one's parameters?"""
    named = [Path(path).name + "::" + name for path, _, name in _arguments(item.config) if name]
    own = item.nodeid.rpartition("/")[2]
    return any(own == name or own.startswith((f"{name}[", f"{name}::")) for name in named)


def _arguments(config) -> list[tuple[str, str, str]]:
    return [argument.partition("::") for argument in config.args]
