//! Runs every kernel of every target with every option.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use half::bf16;
use microscale::{Dtype, Format};
use microscale_executor::{Approximation, Launch, Module, Schedule, Statistics};
use microscale_kernels_abi::gemm::{fp4, fp8::PACK_MXFP4};
use microscale_kernels_abi::{GemmConfig, Mainloop, TARGETS, Target};
use microscale_test_support::operands::Scales;
use microscale_test_support::weights::Activations;
use rayon::prelude::*;

use super::activations::activations_cases;
use super::case::ptx;
use super::cases::{Case, cases};
use super::fp4::{fp4_cases, fp4_experts_cases};
use super::fp8::fp8_cases;
use super::fp8_experts::fp8_experts_cases;
use super::gptq::gptq_cases;
use super::kv::kv_cases;
use super::weights::{Launched, Product, Weights, launch_ahead};

/// Returns the modules of all targets, parsed once.
pub(crate) fn modules() -> &'static [(&'static str, Module)] {
    static MODULES: OnceLock<Vec<(&'static str, Module)>> = OnceLock::new();
    MODULES.get_or_init(|| {
        let read = |target: &'static Target| {
            let text = ptx(target).to_string();
            Module::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", target.name))
        };
        TARGETS.iter().map(|target| (target.name, read(target))).collect()
    })
}

/// Returns the kernels whose text differs from the previous target's.
///
/// The others have been executed with that target.
pub(crate) fn own_kernels(target: &str) -> BTreeSet<String> {
    let target = TARGETS.iter().find(|of| of.name == target).expect("a target");
    let own = match target.before() {
        Some(before) => ptx(target).without(&ptx(before)),
        None => ptx(target),
    };
    own.names().map(str::to_owned).collect()
}

/// Returns launches that differ in choices that must not affect results.
fn launches() -> [Launch; 4] {
    let of = |schedule, approximation| Launch { schedule, approximation, ..Launch::default() };
    [
        of(Schedule::LowestFirst, Approximation::Nearest),
        of(Schedule::HighestFirst, Approximation::Low),
        of(Schedule::Random(1), Approximation::High),
        of(Schedule::Random(2), Approximation::Scattered(3)),
    ]
}

/// Runs the cases of a target's [own kernels](own_kernels) and returns the kernels' statistics.
///
/// Schedules and approximations alternate between cases. `all` runs a case in every one that may
/// change its result.
fn run(target: &str, module: &Module, cases: &[&Case], all: bool) -> BTreeMap<String, Statistics> {
    let own = own_kernels(target);
    let described = TARGETS.iter().find(|of| of.name == target).expect("a target");
    let runs = |case: &&Case| own.contains(&case.kernel) && case.runs_on(described);
    let cases: Vec<&Case> = cases.iter().copied().filter(runs).collect();
    let one = |(case, launch): (&Case, &Launch)| {
        let done = (case.make)().run(&[module], launch);
        done.map(|(_, statistics)| statistics)
            .map_err(|wrong| format!("{target}, {}: {wrong}\n  {}, {launch:?}", case.kernel, case.what))
    };
    let launches = launches();
    let of_case = |i: usize| {
        let case = cases[i];
        // One is enough for each GEMM case, which takes long.
        let all = all && case.by_tensor_cores && !case.kernel.contains("mma_");
        let own = if all { &launches[..] } else { &launches[i % 4..][..1] };
        own.iter().map(move |launch| (case, launch))
    };
    let runs: Vec<(&Case, &Launch)> = (0..cases.len()).flat_map(of_case).collect();
    let results: Vec<_> = runs.into_par_iter().map(one).collect();
    let wrong: Vec<_> = results.iter().filter_map(|result| result.as_ref().err().cloned()).collect();
    assert!(
        wrong.is_empty(),
        "{} of {} cases, for example:\n{}",
        wrong.len(),
        cases.len(),
        wrong[..wrong.len().min(5)].join("\n")
    );

    let mut seen: BTreeMap<String, Statistics> = BTreeMap::new();
    for (kernel, statistics) in results.into_iter().flatten().flatten() {
        seen.entry(kernel).or_default().merge(&statistics);
    }
    for kernel in &own {
        assert!(seen.contains_key(kernel), "{target}: no case runs {kernel}");
    }
    seen.retain(|kernel, _| own.contains(kernel));
    seen
}

/// Returns some of each kernel's cases, spread evenly.
fn sample(cases: &[Case]) -> Vec<&Case> {
    const OF_A_KERNEL: usize = 3;
    let mut by_kernel: BTreeMap<(&str, Option<u32>), Vec<&Case>> = BTreeMap::new();
    for case in cases {
        let mainloop = case.mainloop.map(|mainloop| mainloop as u32);
        by_kernel.entry((&case.kernel, mainloop)).or_default().push(case);
    }
    let each = by_kernel.into_values().flat_map(|own| {
        let step = own.len().div_ceil(OF_A_KERNEL);
        own.into_iter().step_by(step)
    });
    each.collect()
}

#[test]
fn some_cases_of_every_kernel_of_every_target_equal_the_library() {
    let cases = cases();
    let some = sample(&cases);
    for (target, module) in modules() {
        run(target, module, &some, false);
    }
}

/// Runs every case of a target's own kernels, and checks that hardly any instruction is never
/// executed.
fn every_kernel_of(target: &str) {
    let cases = cases();
    let all: Vec<&Case> = cases.iter().collect();
    let (_, module) = modules().iter().find(|(name, _)| *name == target).expect("a target");
    let seen = run(target, module, &all, true);
    let (mut executed, mut all) = (0, 0);
    for (kernel, statistics) in &seen {
        let instructions = module.kernel(kernel).unwrap().len();
        let never = statistics.coverage.never_executed().count();
        // No option reaches the other instructions, such as dropping −0 for MXFP8. The compiler
        // cannot know that.
        let some = never * 10 <= instructions * 4;
        assert!(some, "{target}, {kernel}: {never} of {instructions} never executed");
        executed += instructions - never;
        all += instructions;
    }
    // A target that shares all its kernels has none of its own.
    assert!(executed * 10 >= all * 9, "{target}: only {executed} of {all} instructions executed");
    let lanes: u64 = seen.values().map(|statistics| statistics.lane_instructions).sum();
    println!("{target}: {lanes} lane-instructions, {executed} of {all} instructions executed");
}

/// Declares a test for each target, so that each can be run by itself.
macro_rules! every_kernel {
    ($($test:ident = $target:literal,)+) => {
        const _: () = assert!([$($target),+].len() == TARGETS.len());
        $(
            #[test]
            #[ignore = "takes minutes for every option: .ci/long does it, or cargo test-all"]
            fn $test() {
                every_kernel_of($target);
            }
        )+
    };
}

every_kernel! {
    every_kernel_of_sm_80_equals_the_library = "sm_80",
    every_kernel_of_sm_90_equals_the_library = "sm_90",
    every_kernel_of_sm_90a_equals_the_library = "sm_90a",
    every_kernel_of_sm_100f_equals_the_library = "sm_100f",
    every_kernel_of_sm_120f_equals_the_library = "sm_120f",
}

#[test]
fn weights_do_not_depend_on_the_sm_count() {
    let product = Product::<bf16>::new(
        Format::Nvfp4,
        (131, 640, 3),
        Weights::Of(Scales::Common),
        Activations::Common,
        7,
    );
    let (_, module) = &modules()[1];
    let configs = GemmConfig::for_operands(Format::Nvfp4, Dtype::Bf16);
    for config in configs.filter(|config| config.mainloop == Mainloop::Gemv && config.tile_n <= 8) {
        let config = config.with_slices(2);
        let results = [1, 2, 5, 100].map(|room| {
            let Launched { case, out } = launch_ahead(&product, config, 4, room);
            let thread_blocks = case.steps[0].elements;
            let (memory, _) = case.run(&[module], &Launch::default()).expect("no fault");
            (thread_blocks, memory.bytes(out).expect("results"))
        });
        let [(one, expected), others @ ..] = &results;
        assert!(others.iter().any(|(thread_blocks, _)| thread_blocks != one), "{config}");
        for (thread_blocks, found) in others {
            assert!(found == expected, "{config}: {thread_blocks} thread blocks");
        }
    }
}

#[test]
fn activations_and_kv_caches_equal_the_library_in_every_case() {
    let mut cases = Vec::new();
    activations_cases(&mut cases);
    kv_cases(&mut cases);
    check_all(&cases);
}

#[test]
fn experts_with_fp4_activations_equal_the_definition_in_every_case() {
    let mut cases = Vec::new();
    fp4_experts_cases(&mut cases);
    check_all(&cases);
}

#[test]
fn decoding_fp4_to_16_bits_equals_the_definition_in_every_case() {
    let mut cases = Vec::new();
    fp4_cases(&mut cases);
    let decoders = Format::MULTIPLIED
        .into_iter()
        .flat_map(|format| [Dtype::F16, Dtype::Bf16].map(|dtype| fp4::decoders(format, dtype)))
        .flatten();
    let kernels: Vec<_> = decoders.flat_map(|of| [of.rows, of.packed].map(|id| id.kernel().name)).collect();
    cases.retain(|case| kernels.contains(&&*case.kernel));
    check_all(&cases);
}

#[test]
fn experts_with_fp8_activations_equal_the_definition_in_every_case() {
    let mut cases = Vec::new();
    fp8_experts_cases(&mut cases);
    check_all(&cases);
}

#[test]
fn sums_of_blocks_equal_the_definition_in_every_case() {
    let mut cases = Vec::new();
    fp8_cases(&mut cases);
    cases.retain(|case| case.kernel.contains("mxfp4_gemm") && case.kernel.contains("fp8block"));
    check_all(&cases);
}

#[test]
fn fast_accumulation_and_kernels_before_it_equal_the_definition_in_every_case() {
    let mut cases = Vec::new();
    fp8_cases(&mut cases);
    let before = ["fp8_quantize_f16", "fp8_quantize_bf16", PACK_MXFP4.kernel().name];
    cases.retain(|case| case.kernel.contains("fp8fast") || before.contains(&&*case.kernel));
    check_all(&cases);
}

#[test]
fn gptq_equals_the_library_in_every_case() {
    let mut cases = Vec::new();
    gptq_cases(&mut cases);
    check_all(&cases);
}

/// Runs every case on every target that has kernels of its own for it.
fn check_all(cases: &[Case]) {
    let launches = [Schedule::LowestFirst, Schedule::HighestFirst, Schedule::Random(1)]
        .map(|schedule| Launch { schedule, ..Launch::default() });
    for (target, module) in modules() {
        let own = own_kernels(target);
        let runs = cases.par_iter().enumerate().filter(|(_, case)| own.contains(&case.kernel));
        let wrong: Vec<_> = runs
            .filter_map(|(i, case)| {
                let wrong = (case.make)().run(&[module], &launches[i % launches.len()]).err()?;
                Some(format!("{target}, {}: {wrong}\n  {}", case.kernel, case.what))
            })
            .collect();
        let first = &wrong[..wrong.len().min(6)];
        assert!(
            wrong.is_empty(),
            "{} of {} cases, for example:\n{}",
            wrong.len(),
            cases.len(),
            first.join("\n")
        );
    }
}
