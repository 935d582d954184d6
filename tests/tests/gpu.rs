//! Compares GPUs with the CPU, bit for bit.
//!
//! Without a GPU, every test reports itself as ignored with the reason. With
//! `MICROSCALE_REQUIRE_GPU=1`, a missing GPU is a failure.

// The cases of the executor's tests, which run on the GPU here.
mod executor_tests {
    pub(crate) mod activations;
    pub(crate) mod case;
    pub(crate) mod cases;
    pub(crate) mod expert_parts;
    pub(crate) mod experts;
    pub(crate) mod fp4;
    pub(crate) mod fp8;
    pub(crate) mod fp8_experts;
    pub(crate) mod gemm;
    mod gemm_sizes;
    pub(crate) mod gptq;
    pub(crate) mod kv;
    pub(crate) mod operations;
    pub(crate) mod products;
    pub(crate) mod quantizing;
    pub(crate) mod steps;
    pub(crate) mod weights;
    mod weights_sizes;
}
mod gpu_tests {
    pub(crate) mod activations;
    pub(crate) mod allocations;
    pub(crate) mod amax;
    pub(crate) mod dequantize;
    pub(crate) mod device_buffers;
    pub(crate) mod empty;
    pub(crate) mod errors;
    pub(crate) mod executor;
    pub(crate) mod expert_views;
    pub(crate) mod foreign_memory;
    pub(crate) mod gemm_experts;
    pub(crate) mod gemm_fp4;
    pub(crate) mod gemm_fp8;
    pub(crate) mod gemm_weights;
    pub(crate) mod gemv;
    pub(crate) mod gemv_weights;
    pub(crate) mod gptq;
    pub(crate) mod groups;
    pub(crate) mod kv;
    pub(crate) mod layout;
    pub(crate) mod plans;
    pub(crate) mod quantize;
    pub(crate) mod quantized_results;
    pub(crate) mod raw;
    pub(crate) mod search;
    pub(crate) mod support;
}

use std::process::ExitCode;
use std::sync::Arc;

use gpu_tests::allocations::Counting;
use gpu_tests::{
    activations, amax, dequantize, device_buffers, empty, errors, executor, expert_views, foreign_memory,
    gemm_experts, gemm_fp4, gemm_fp8, gemm_weights, gemv, gemv_weights, gptq, groups, kv, layout, plans,
    quantize, quantized_results, search,
};
use libtest_mimic::{Arguments, Failed, Trial};
use microscale::gpu::{Gpu, devices};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A test: its name and body.
type Test = (&'static str, fn(&Gpu));

/// Every test.
const TESTS: &[Test] = &[
    ("quantize_equals_the_cpu_for_every_option", quantize::equals_the_cpu_for_every_option),
    ("quantize_equals_the_cpu_on_every_16_bit_pattern", quantize::equals_the_cpu_on_every_16_bit_pattern),
    (
        "quantize_equals_the_cpu_on_every_f32_exponent_and_tie",
        quantize::equals_the_cpu_on_every_f32_exponent_and_tie,
    ),
    ("quantize_equals_the_cpu_on_golden_inputs", quantize::equals_the_cpu_on_golden_inputs),
    ("quantize_equals_the_cpu_on_ties_of_quotients", quantize::equals_the_cpu_on_ties_of_quotients),
    (
        "quantize_equals_the_cpu_on_random_magnitudes_and_global_scales",
        quantize::equals_the_cpu_on_random_magnitudes_and_global_scales,
    ),
    ("quantize_equals_the_cpu_on_whole_tiles", quantize::equals_the_cpu_on_whole_tiles),
    ("activations_equal_those_of_the_cpu", activations::equal_those_of_the_cpu),
    ("activations_by_expert_equal_those_of_the_cpu", activations::by_expert_equal_those_of_the_cpu),
    (
        "activations_of_masked_experts_equal_those_of_the_cpu",
        activations::of_masked_experts_equal_those_of_the_cpu,
    ),
    ("kv_caches_equal_those_of_the_cpu", kv::caches_equal_those_of_the_cpu),
    ("executor_reciprocals_match_the_gpu", executor::reciprocals_match_the_gpu),
    ("executor_matches_the_gpu", executor::matches_the_gpu),
    ("executor_tensor_copies_match_the_gpu", executor::tensor_copies_match_the_gpu),
    ("search_equals_the_cpu", search::equals_the_cpu),
    ("search_equals_the_cpu_with_importance", search::equals_the_cpu_with_importance),
    ("search_refuses_hessians", search::refuses_hessians),
    ("gptq_equals_the_cpu", gptq::equals_the_cpu),
    ("gptq_equals_the_cpu_on_a_layer", gptq::equals_the_cpu_on_a_layer),
    ("gptq_losses_equal_the_cpus", gptq::losses_equal_the_cpus),
    ("gptq_refuses_what_the_cpu_refuses", gptq::refuses_what_the_cpu_refuses),
    ("quantize_equals_the_cpu_on_degenerate_tensors", quantize::equals_the_cpu_on_degenerate_tensors),
    (
        "quantize_refuses_global_scales_that_the_cpu_refuses",
        quantize::refuses_global_scales_that_the_cpu_refuses,
    ),
    ("quantize_refuses_what_the_cpu_refuses", quantize::refuses_what_the_cpu_refuses),
    ("quantize_handles_empty_matrices", quantize::handles_empty_matrices),
    ("dequantize_equals_the_cpu_on_every_code_and_scale", dequantize::equals_the_cpu_on_every_code_and_scale),
    ("dequantize_equals_the_cpu_on_every_shape", dequantize::equals_the_cpu_on_every_shape),
    ("amax_equals_the_cpu", amax::equals_the_cpu),
    ("amax_of_empty_matrices_is_zero", amax::of_empty_matrices_is_zero),
    ("amax_adds_up_and_clears", amax::adds_up_and_clears),
    ("amax_may_start_anywhere", amax::may_start_anywhere),
    ("errors_equal_the_cpu", errors::equal_the_cpu),
    ("errors_of_another_shape_are_refused", errors::of_another_shape_are_refused),
    ("formats_without_kernels_are_refused", errors::of_formats_without_kernels_are_refused),
    ("gemv_equals_the_cpu_for_every_kernel", gemv::equals_the_cpu_for_every_kernel),
    ("gemv_equals_the_cpu_on_published_shapes", gemv::equals_the_cpu_on_published_shapes),
    ("gemv_refuses_what_the_cpu_refuses", gemv::refuses_what_the_cpu_refuses),
    ("gemv_replays_in_a_graph", gemv::replays_in_a_graph),
    (
        "gemv_weights_is_near_the_exact_sum_for_every_kernel",
        gemv_weights::is_near_the_exact_sum_for_every_kernel,
    ),
    (
        "gemv_weights_of_out_of_range_scales_equals_the_cpu",
        gemv_weights::of_out_of_range_scales_equals_the_cpu,
    ),
    (
        "gemv_weights_of_unaligned_activations_equals_the_cpu",
        gemv_weights::of_unaligned_activations_equals_the_cpu,
    ),
    ("gemv_weights_is_near_the_cpus_on_layers_of_models", gemv_weights::is_near_the_cpus_on_layers_of_models),
    (
        "gemv_weights_is_mostly_within_a_unit_in_the_last_place",
        gemv_weights::is_mostly_within_a_unit_in_the_last_place,
    ),
    ("gemv_weights_refuses_what_the_cpu_refuses", gemv_weights::refuses_what_the_cpu_refuses),
    ("gemv_weights_of_empty_operands_is_empty", gemv_weights::of_empty_operands_is_empty),
    ("gemv_weights_from_host_memory_is_the_same", gemv_weights::from_host_memory_is_the_same),
    ("gemv_weights_replays_in_a_graph", gemv_weights::replays_in_a_graph),
    (
        "gemm_weights_is_near_the_exact_sum_for_every_kernel",
        gemm_weights::is_near_the_exact_sum_for_every_kernel,
    ),
    ("gemm_weights_is_near_the_cpus_on_layers_of_models", gemm_weights::is_near_the_cpus_on_layers_of_models),
    ("gemm_fp4_is_near_the_exact_sum", gemm_fp4::is_near_the_exact_sum),
    ("gemm_fp4_products_in_turn_have_their_own_factors", gemm_fp4::products_in_turn_have_their_own_factors),
    (
        "gemm_fp4_has_the_definitions_bits_with_block_scales",
        gemm_fp4::has_the_definitions_bits_with_block_scales,
    ),
    (
        "groups_of_values_have_the_results_of_their_own_plans",
        groups::of_values_have_the_results_of_their_own_plans,
    ),
    ("groups_of_fp4_have_the_results_of_their_own_plans", groups::of_fp4_have_the_results_of_their_own_plans),
    ("groups_of_fp8_have_the_results_of_their_own_plans", groups::of_fp8_have_the_results_of_their_own_plans),
    ("groups_are_enqueued_without_allocating", groups::are_enqueued_without_allocating),
    ("gemm_fp4_takes_global_scales_per_token", gemm_fp4::takes_global_scales_per_token),
    ("gemm_fp4_experts_are_near_the_cpus", gemm_fp4::experts_are_near_the_cpus),
    ("gemm_fp8_equals_its_definition", gemm_fp8::equals_its_definition),
    ("gemm_fp8_fast_accumulation_equals_its_definition", gemm_fp8::fast_accumulation_equals_its_definition),
    (
        "gemm_fp8_fast_accumulation_of_mxfp4_has_the_bits_of_fp8",
        gemm_fp8::fast_accumulation_of_mxfp4_has_the_bits_of_fp8,
    ),
    ("gemm_fp8_is_refused_where_it_would_lose", gemm_fp8::is_refused_where_it_would_lose),
    ("gemm_fp8_experts_equal_their_own_products", gemm_fp8::experts_equal_their_own_products),
    (
        "gemm_fp8_experts_are_refused_where_they_do_not_fit",
        gemm_fp8::experts_are_refused_where_they_do_not_fit,
    ),
    (
        "quantized_results_of_values_have_the_bytes_of_two_calls",
        quantized_results::of_values_have_the_bytes_of_two_calls,
    ),
    (
        "quantized_results_of_fp4_have_the_bytes_of_two_calls",
        quantized_results::of_fp4_have_the_bytes_of_two_calls,
    ),
    (
        "quantized_results_of_fp8_have_the_bytes_of_two_calls",
        quantized_results::of_fp8_have_the_bytes_of_two_calls,
    ),
    (
        "quantized_results_of_experts_have_the_bytes_of_two_calls",
        quantized_results::of_experts_have_the_bytes_of_two_calls,
    ),
    (
        "quantized_results_are_refused_where_they_do_not_fit",
        quantized_results::are_refused_where_they_do_not_fit,
    ),
    ("quantized_results_are_enqueued_without_allocating", quantized_results::are_enqueued_without_allocating),
    ("gemm_fp4_refuses_operands_that_do_not_match", gemm_fp4::refuses_operands_that_do_not_match),
    ("products_of_empty_operands_give_bias_and_residual", empty::gives_bias_and_residual),
    ("gemm_weights_of_devices_is_the_same", gemm_weights::of_devices_is_the_same),
    (
        "gemm_weights_refuses_a_workspace_that_is_too_small",
        gemm_weights::refuses_a_workspace_that_is_too_small,
    ),
    ("gemm_weights_replays_in_a_graph", gemm_weights::replays_in_a_graph),
    ("gemm_weights_applies_an_epilogue", gemm_weights::applies_an_epilogue),
    ("plans_made_twice_are_the_same", plans::made_twice_are_the_same),
    ("plans_run_without_allocating", plans::run_without_allocating),
    ("plans_ask_for_their_workspace", plans::ask_for_their_workspace),
    ("plans_serve_unaligned_activations", plans::serve_unaligned_activations),
    (
        "plans_of_configurations_that_do_not_fit_are_refused",
        plans::of_configurations_that_do_not_fit_are_refused,
    ),
    (
        "gemm_experts_is_near_the_exact_sum_for_every_kernel",
        gemm_experts::is_near_the_exact_sum_for_every_kernel,
    ),
    ("gemm_experts_replays_in_a_graph_for_other_tokens", gemm_experts::replays_in_a_graph_for_other_tokens),
    (
        "gemm_experts_writes_no_results_until_pairs_are_sorted",
        gemm_experts::writes_no_results_until_pairs_are_sorted,
    ),
    ("gemm_experts_applies_an_epilogue", gemm_experts::applies_an_epilogue),
    ("gemm_experts_refuses_mismatched_operands", gemm_experts::refuses_mismatched_operands),
    ("gemm_experts_of_views_are_multiplied_in_every_order", expert_views::are_multiplied_in_every_order),
    ("gemm_experts_of_mismatched_views_are_refused", expert_views::of_mismatched_views_are_refused),
    ("layout_converting_equals_the_cpu", layout::converting_equals_the_cpu),
    ("layout_converting_overwrites_its_target", layout::converting_overwrites_its_target),
    ("layout_swizzled_scales_match_torchao", layout::swizzled_scales_match_torchao),
    ("device_buffers_need_no_report", device_buffers::need_no_report),
    ("device_buffers_used_tensors_are_overwritten", device_buffers::used_tensors_are_overwritten),
    ("device_buffers_may_start_anywhere", device_buffers::may_start_anywhere),
    ("device_buffers_keep_gaps_between_rows", device_buffers::keep_gaps_between_rows),
    ("device_buffers_that_are_too_short_are_refused", device_buffers::that_are_too_short_are_refused),
    ("layers_share_an_amax", device_buffers::layers_share_an_amax),
    ("global_scales_may_be_in_device_memory", device_buffers::global_scales_may_be_in_device_memory),
    ("reports_add_up_and_clear", device_buffers::reports_add_up_and_clear),
    ("foreign_memory_is_quantized_and_back", foreign_memory::is_quantized_and_back),
    ("foreign_memory_takes_an_amax", foreign_memory::takes_an_amax),
    ("foreign_memory_is_multiplied", foreign_memory::is_multiplied),
    (
        "foreign_memory_with_the_wrong_alignment_is_refused",
        foreign_memory::with_the_wrong_alignment_is_refused,
    ),
    ("foreign_memory_of_another_context_is_refused", foreign_memory::of_another_context_is_refused),
    ("foreign_memory_becomes_a_tensor_and_back", foreign_memory::becomes_a_tensor_and_back),
    ("foreign_memory_works_on_another_librarys_stream", foreign_memory::works_on_another_librarys_stream),
    (
        "operations_allocate_nothing_and_do_not_wait",
        foreign_memory::operations_allocate_nothing_and_do_not_wait,
    ),
    ("streams_overlap", device_buffers::streams_overlap),
    ("graphs_capture_and_replay", device_buffers::graphs_capture_and_replay),
    ("more_than_2_to_the_32_elements", device_buffers::more_than_2_to_the_32_elements),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // The tests share one GPU, and some fill its memory.
    arguments.test_threads = Some(1);
    let required = std::env::var("MICROSCALE_REQUIRE_GPU").is_ok_and(|value| value == "1");
    let trials = match devices().and_then(|_| Gpu::new(0)) {
        Ok(gpu) => on_gpu(Arc::new(gpu)),
        Err(why) if required => {
            let why = format!("MICROSCALE_REQUIRE_GPU=1, but {why}");
            vec![Trial::test("a_gpu_is_there", move || Err(Failed::from(why)))]
        }
        Err(why) => {
            println!("\n{} GPU tests are skipped: {why}", TESTS.len());
            TESTS.iter().map(|(name, _)| Trial::test(*name, || Ok(())).with_ignored_flag(true)).collect()
        }
    };
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn on_gpu(gpu: Arc<Gpu>) -> Vec<Trial> {
    println!("\nGPU tests on {:?}", gpu.info());
    let trial = |&(name, test): &Test| {
        let gpu = gpu.clone();
        Trial::test(name, move || {
            test(&gpu);
            Ok(())
        })
    };
    TESTS.iter().map(trial).collect()
}
