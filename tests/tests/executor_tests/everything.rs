//! Every kernel of every target, with every option.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use microscale_executor::{Approximation, Launch, Module, Schedule, Statistics};
use microscale_kernels_abi::{TARGETS, kernels};
use rayon::prelude::*;

use super::case::ptx;
use super::cases::{Case, cases};

/// The modules of all targets, read once.
pub(crate) fn modules() -> &'static [(&'static str, Module)] {
    static MODULES: OnceLock<Vec<(&'static str, Module)>> = OnceLock::new();
    MODULES.get_or_init(|| {
        let read = |name| Module::parse(&ptx(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        TARGETS.iter().map(|target| (target.name, read(target.name))).collect()
    })
}

/// What a launch must not depend on.
fn launches() -> [Launch; 4] {
    let of = |schedule, approximation| Launch { schedule, approximation, ..Launch::default() };
    [
        of(Schedule::LowestFirst, Approximation::Nearest),
        of(Schedule::HighestFirst, Approximation::Low),
        of(Schedule::Random(1), Approximation::High),
        of(Schedule::Random(2), Approximation::Scattered(3)),
    ]
}

/// Each target, each with all cases; how concurrent lanes are scheduled and what approximate instructions give goes round.
#[test]
fn every_kernel_of_every_target_equals_the_library() {
    let cases = cases();
    for (target, module) in modules() {
        let one = |(case, launch): (&Case, &Launch)| {
            let done = (case.make)().run(&[module], launch);
            done.map(|(_, statistics)| statistics)
                .map_err(|wrong| format!("{target}, {}: {wrong}\n  {}, {launch:?}", case.kernel, case.what))
        };
        // All of them where results depend on it.
        let launches = launches();
        let of_case = |i: usize| {
            let case = &cases[i];
            let own = if case.by_tensor_cores { &launches[..] } else { &launches[i % 4..][..1] };
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
        let (mut executed, mut all) = (0, 0);
        for kernel in kernels() {
            let statistics =
                seen.get(kernel.name).unwrap_or_else(|| panic!("{target}: no case runs {}", kernel.name));
            let instructions = module.kernel(kernel.name).unwrap().len();
            let never = statistics.coverage.never_executed().count();
            // What is left are ways that no option leads to, such as -0 dropped from MXFP8, which the compiler cannot know.
            let some = never * 10 <= instructions * 4;
            assert!(some, "{target}, {}: {never} of {instructions} never executed", kernel.name);
            executed += instructions - never;
            all += instructions;
        }
        assert!(executed * 10 >= all * 9, "{target}: only {executed} of {all} instructions executed");
        let lanes: u64 = seen.values().map(|statistics| statistics.lane_instructions).sum();
        println!(
            "{target}: {} cases, {lanes} lane-instructions, {executed} of {all} instructions executed",
            cases.len()
        );
    }
}
