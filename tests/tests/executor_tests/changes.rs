//! Kernels that are changed on purpose, in places that a list of instructions names. The cases must
//! detect every change.

use std::collections::BTreeSet;

use microscale_executor::{Launch, Module, Schedule, Statistics};
use microscale_kernels_abi::TARGETS;
use rayon::prelude::*;

use super::case::ptx;
use super::cases::Case;
use super::everything::modules;

/// Changes of a kernel, at lines that some case executes.
pub(super) struct Changes<'a> {
    lines: &'a [String],
    executed: &'a BTreeSet<usize>,
    /// Descriptions, and the kernel's lines.
    all: Vec<(String, Vec<String>)>,
}

impl<'a> Changes<'a> {
    /// The kernel's lines.
    pub(super) fn lines(&self) -> &'a [String] {
        self.lines
    }

    /// The executed lines with this text.
    pub(super) fn find(&self, text: &str) -> Vec<usize> {
        let has = |line: &usize| self.lines.get(*line).is_some_and(|line| line.contains(text));
        self.executed.iter().copied().filter(has).collect()
    }

    /// Adds a change: other texts of some lines.
    pub(super) fn add(&mut self, what: &str, changes: &[(usize, String)]) {
        let mut changed = self.lines.to_vec();
        changes.iter().for_each(|(line, text)| changed[*line].clone_from(text));
        let at = changes.first().map_or(0, |(line, _)| *line);
        self.all.push((format!("{what}, line {at}: {}", self.lines[at]), changed));
    }

    /// Adds changes that leave out one line each.
    pub(super) fn leave_out(&mut self, lines: &[usize]) {
        lines.iter().for_each(|&line| self.add("left out", &[(line, String::new())]));
    }
}

/// Runs the changes that `make` adds, `least` or more, by the kernel's cases whose description has
/// one of `parts`.
pub(super) fn every_change_is_noticed(
    target: &str,
    kernel: &str,
    (cases, parts): (&[Case], &[&str]),
    make: impl Fn(&mut Changes<'_>),
    least: usize,
) {
    let described = TARGETS.iter().find(|of| of.name == target).expect("a target");
    let text = ptx(described).to_string();
    let (_, module) = modules().iter().find(|(name, _)| *name == target).expect("a target");
    let header = &text[..text.find(".visible .entry").expect("a kernel")];
    let start = text.find(&format!(".visible .entry {kernel}(")).expect("the kernel");
    let end = start + text[start..].find("\n}\n").expect("its end") + 2;
    let lines: Vec<String> = text[start..end].lines().map(str::to_owned).collect();
    let first = text[..start].lines().count() + 1;

    let mut runs: Vec<(&Case, Launch)> = Vec::new();
    let mut seen = Statistics::default();
    let is_one = |case: &Case| parts.iter().any(|part| case.what.contains(part));
    for case in cases.iter().filter(|case| case.kernel == kernel && is_one(case)) {
        let launch = Launch::default().schedule(Schedule::HighestFirst);
        let (_, done) = (case.make)().run(&[module], &launch).expect("it is right");
        done.iter().filter(|(name, _)| name == kernel).for_each(|(_, of)| seen.merge(of));
        let most = done.iter().map(|(_, statistics)| statistics.warp_instructions).max();
        // A change may cause an endless loop.
        let launch = launch.limit(most.expect("a launch") * 4);
        runs.push((case, launch.clone()));
        runs.push((case, launch.schedule(Schedule::LowestFirst)));
    }
    assert_eq!(runs.len(), 2 * parts.len());
    let compiled = module.kernel(kernel).expect("it lowers");
    let executed = (0..compiled.len()).filter(|&index| seen.coverage.executed(index));
    let executed = executed.map(|index| compiled.instruction(index).0 as usize - first).collect();

    let mut changes = Changes { lines: &lines, executed: &executed, all: Vec::new() };
    make(&mut changes);
    let all = changes.all;
    assert!(all.len() >= least, "only {} changes", all.len());
    let is_unnoticed = |(what, lines): &&(String, Vec<String>)| {
        let text = format!("{header}{}\n", lines.join("\n"));
        let changed = Module::parse(&text).unwrap_or_else(|error| panic!("{what}: {error}"));
        runs.iter().all(|(case, launch)| (case.make)().run(&[&changed, module], launch).is_ok())
    };
    let unnoticed: Vec<&String> = all.par_iter().filter(is_unnoticed).map(|(what, _)| what).collect();
    assert!(unnoticed.is_empty(), "{kernel}: {} of {}: {unnoticed:#?}", unnoticed.len(), all.len());
    println!("{kernel}: all {} changes noticed", all.len());
}
