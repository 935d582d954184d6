//! Changes the kernels of pairs of thread blocks (`tcgen05`) on purpose: scales of another k-step,
//! another thread block's half, arrivals at one thread block only, missing fences and waits. The
//! cases must detect every change.

use std::collections::BTreeSet;

use microscale_executor::{Launch, Module, Schedule, Statistics};
use microscale_kernels_abi::TARGETS;
use rayon::prelude::*;

use super::case::ptx;
use super::cases::Case;
use super::everything::modules;
use super::fp4::fp4_cases;

/// The kernels: one per format. Others have other numbers.
const KERNELS: [&str; 2] = ["nvfp4_gemm_bf16_tcgen05_256x128_c2", "mxfp4_gemm_bf16_tcgen05_256x128_c2"];
/// Cases: rows in both thread blocks, tokens in both halves, more K-iterations than stages, more
/// work tiles than accumulators.
const CASES: [&str; 3] = [
    "rows: 260, cols: 704, tokens: 130",
    "rows: 70, cols: 640, tokens: 40",
    "rows: 520, cols: 256, tokens: 8",
];

/// Instructions that a kernel needs, each wherever a case executes it.
const NEEDED: [&str; 8] = [
    "fence.proxy.async",
    "fence.mbarrier_init",
    "tcgen05.cp",
    "tcgen05.mma",
    "tcgen05.commit",
    "tcgen05.dealloc",
    "mbarrier.arrive.",
    "cp.async.bulk",
];

/// A change: its description, and the kernel's lines.
type Mutant = (String, Vec<String>);

/// Returns the changes of a kernel, at lines that some case executes.
fn mutants(lines: &[String], executed: &BTreeSet<usize>) -> Vec<Mutant> {
    let mut all = Vec::new();
    let mut add = |what: &str, changes: &[(usize, String)]| {
        let mut changed = lines.to_vec();
        changes.iter().for_each(|(line, text)| changed[*line].clone_from(text));
        let at = changes.first().map_or(0, |(line, _)| *line);
        all.push((format!("{what}, line {at}: {}", lines[at]), changed));
    };
    let find = |text: &str| -> Vec<usize> {
        let has = |line: &usize| lines.get(*line).is_some_and(|line| line.contains(text));
        executed.iter().copied().filter(has).collect()
    };
    let none = |line: usize| (line, String::new());
    for line in NEEDED.into_iter().flat_map(find) {
        add("left out", &[none(line)]);
    }
    // The first and the last of these fences are next to barriers, which order allocations, too.
    let [_, fences @ .., _] = &find("tcgen05.fence::after_thread_sync")[..] else { panic!("no fences") };
    fences.iter().for_each(|&line| add("left out", &[none(line)]));
    // Other waits and fences of the same warp may follow.
    for text in ["tcgen05.wait::ld", "tcgen05.fence::before_thread_sync"] {
        add("all left out", &find(text).into_iter().map(none).collect::<Vec<_>>());
    }
    // The cluster's barriers at the start and at the end.
    let waits = find("barrier.cluster.wait");
    for (arrive, &wait) in find("barrier.cluster.arrive").into_iter().zip(&waits) {
        add("no barrier", &[none(arrive), none(wait)]);
    }
    // Each thread block takes itself for the first one.
    for line in find("%cluster_ctarank") {
        add("the first rank", &[(line, lines[line].replace("%cluster_ctarank", "0"))]);
    }
    // Commits and copies reach the first thread block only.
    for line in find("mov.b16").into_iter().filter(|&line| lines[line].ends_with(",3;")) {
        add("one thread block", &[(line, lines[line].replace(",3;", ",1;"))]);
    }
    // The products have the scales of the next k-step: of rows, or of tokens.
    let scales = |line: usize| -> Vec<&str> { lines[line].split(['[', ']']).collect() };
    for pair in find("tcgen05.mma").windows(2) {
        for place in [3, 5] {
            let [this, next] = [scales(pair[0])[place], scales(pair[1])[place]];
            if this != next {
                let changed = lines[pair[0]].replace(&format!("[{this}]"), &format!("[{next}]"));
                add("scales of another k-step", &[(pair[0], changed)]);
            }
        }
    }
    // Waits that do not wait. At the end, all of them wait for the last commits.
    let ready = |line: usize| {
        let register = lines[line].split("selp.b32 ").nth(1).and_then(|rest| rest.split(',').next());
        (line, format!("mov.b32 {},1;", register.expect("a result")))
    };
    let end = find("griddepcontrol.launch_dependents")[0];
    let (before, last): (Vec<_>, Vec<_>) =
        find("mbarrier.try_wait").into_iter().partition(|&line| line < end);
    before.into_iter().for_each(|line| add("no wait", &[ready(line)]));
    add("no wait at the end", &last.into_iter().map(ready).collect::<Vec<_>>());
    all
}

#[test]
fn changes_to_pairs_of_thread_blocks_are_noticed() {
    let target = TARGETS.iter().find(|target| target.name == "sm_100f").expect("a target");
    let text = ptx(target).to_string();
    let (_, module) = modules().iter().find(|(name, _)| *name == target.name).expect("a target");
    let mut cases = Vec::new();
    fp4_cases(&mut cases);
    for name in KERNELS {
        let header = &text[..text.find(".visible .entry").expect("a kernel")];
        let start = text.find(&format!(".visible .entry {name}(")).expect("the kernel");
        let end = start + text[start..].find("\n}\n").expect("its end") + 2;
        let lines: Vec<String> = text[start..end].lines().map(str::to_owned).collect();
        let first = text[..start].lines().count() + 1;

        let mut runs: Vec<(&Case, Launch)> = Vec::new();
        let mut seen = Statistics::default();
        let is_one = |case: &Case| CASES.iter().any(|part| case.what.contains(part));
        for case in cases.iter().filter(|case| case.kernel == name && is_one(case)) {
            let launch = Launch::default().schedule(Schedule::HighestFirst);
            let (_, done) = (case.make)().run(&[module], &launch).expect("it is right");
            done.iter().filter(|(kernel, _)| kernel == name).for_each(|(_, of)| seen.merge(of));
            let most = done.iter().map(|(_, statistics)| statistics.warp_instructions).max();
            // A change may cause an endless loop.
            let launch = launch.limit(most.expect("a launch") * 4);
            runs.push((case, launch.clone()));
            runs.push((case, launch.schedule(Schedule::LowestFirst)));
        }
        assert_eq!(runs.len(), 2 * CASES.len());
        let compiled = module.kernel(name).expect("it lowers");
        let executed = (0..compiled.len()).filter(|&index| seen.coverage.executed(index));
        let executed = executed.map(|index| compiled.instruction(index).0 as usize - first).collect();

        let all = mutants(&lines, &executed);
        assert!(all.len() > 35, "only {} changes", all.len());
        let is_unnoticed = |(what, lines): &&Mutant| {
            let text = format!("{header}{}\n", lines.join("\n"));
            let mutant = Module::parse(&text).unwrap_or_else(|error| panic!("{what}: {error}"));
            runs.iter().all(|(case, launch)| (case.make)().run(&[&mutant, module], launch).is_ok())
        };
        let unnoticed: Vec<&String> = all.par_iter().filter(is_unnoticed).map(|(what, _)| what).collect();
        assert!(unnoticed.is_empty(), "{name}: {} of {}: {unnoticed:#?}", unnoticed.len(), all.len());
        println!("{name}: all {} changes noticed", all.len());
    }
}
