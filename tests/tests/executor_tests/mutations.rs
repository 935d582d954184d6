//! Changes kernels on purpose. The cases must detect the changes.
//!
//! A mutation changes one instruction that some case executes. Not every mutation can be detected:
//! a comparison may never meet equality, and a rounding may not matter before a coarser one. Of
//! each kind of mutation at least one must be detected per kernel, except for kinds that often
//! change nothing. Of all mutations of a kind, a minimum percentage must be detected.

use std::collections::BTreeMap;

use microscale_executor::{Launch, Module};
use microscale_kernels_abi::{GemmConfig, TARGETS, kernels_for};
use rayon::prelude::*;

use super::case::ptx;
use super::cases::{Case, cases};
use super::everything::modules;
use super::weights::kernel_of;

/// A kind of mutation: its name, and a function that changes an instruction if the kind applies.
type Change = (&'static str, fn(&str) -> Option<String>);

const CHANGES: [Change; 11] = [
    ("another rounding mode", |text| {
        let modes = [
            ("add.rz.f32", "add.rn.f32"),
            ("add.rp.f32", "add.rn.f32"),
            ("add.rn.f32", "add.rz.f32"),
            ("fma.rn.f32", "fma.rz.f32"),
            ("div.rn.f32", "div.rz.f32"),
            ("cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32"),
            ("cvt.rz.f16x2.f32", "cvt.rn.f16x2.f32"),
            ("cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
        ];
        replaced(text, &modes)
    }),
    ("another operation", |text| {
        replaced(text, &[("mul.rn.f32", "add.rn.f32"), ("or.b32", "and.b32"), ("sub.s32", "add.s32")])
    }),
    ("the other extreme", |text| {
        let extremes = [
            ("max.NaN", "min.NaN"),
            ("max.u32", "min.u32"),
            ("min.u32", "max.u32"),
            ("min.u16x2", "max.u16x2"),
            ("min.bf16x2", "max.bf16x2"),
            ("min.f16x2", "max.f16x2"),
        ];
        replaced(text, &extremes)
    }),
    ("a bound off by one", |text| {
        let comparisons = [
            ("setp.lt.u64", "setp.le.u64"),
            ("setp.le.u64", "setp.lt.u64"),
            ("setp.ge.u64", "setp.gt.u64"),
            ("setp.gt.u64", "setp.ge.u64"),
            ("setp.lt.u32", "setp.le.u32"),
            ("setp.gt.u32", "setp.ge.u32"),
        ];
        replaced(text, &comparisons)
    }),
    ("a guard dropped", |text| {
        let (_, rest) = text.strip_prefix('@')?.split_once(char::is_whitespace)?;
        rest.trim_start().starts_with("bra").then(String::new)
    }),
    ("a guard turned round", |text| {
        let rest = text.strip_prefix('@')?;
        Some(rest.strip_prefix('!').map_or_else(|| format!("@!{rest}"), |rest| format!("@{rest}")))
    }),
    ("another lane", |text| {
        // The lane that has a matrix' scales.
        if let Some((head, operands)) = split(text, "mov.b16") {
            let lane: u16 = operands.last()?.parse().ok()?;
            return Some(joined(head, &operands, 1, &(lane ^ 1).to_string()));
        }
        let (head, operands) = split(text, "shfl.sync.")?;
        // The last operand but two: the lane, or the difference between lanes.
        let lane = operands.len().checked_sub(3)?;
        let other = if operands[lane] == "1" { "2" } else { "1" };
        Some(joined(head, &operands, lane, other))
    }),
    ("swapped nibbles or bytes", |text| {
        if let Some((head, operands)) = split(text, "prmt.b32") {
            let [to, low, high, selector] = &operands[..] else { return None };
            if low == high {
                return None;
            }
            return Some(format!("{head} {to}, {high}, {low}, {selector};"));
        }
        let (head, operands) = split(text, "cvt.rn.satfinite.e")?;
        let [to, high, low] = &operands[..] else { return None };
        Some(format!("{head} {to}, {low}, {high};"))
    }),
    ("a place moved", |text| {
        let moved = ["st.global", "ld.global", "st.shared", "ld.shared", "cp.async.c"];
        let moved = moved.iter().any(|opcode| text.starts_with(opcode));
        let (before, rest) = text.split_once('[').filter(|_| moved)?;
        let (address, after) = rest.split_once(']')?;
        let (base, offset) = address.split_once('+').unwrap_or((address, "0"));
        Some(format!("{before}[{base}+{}]{after}", offset.trim().parse::<u64>().ok()? + 16))
    }),
    ("no waiting", |text| {
        let waits = ["bar.sync", "bar.warp.sync", "cp.async.wait_group"];
        waits.iter().any(|opcode| text.starts_with(opcode)).then(String::new)
    }),
    ("a constant changed", |text| {
        let (head, operands) =
            ["and.b32", "add.s32", "shl.b32", "shr.u32"].iter().find_map(|head| split(text, head))?;
        let number: i32 = operands.last()?.parse().ok()?;
        // The bit to change in a mask: the lowest one, or the highest where the lowest may be the
        // end of a significand.
        let bit = match (head, number) {
            ("and.b32", 0x8000..) => 1 << number.ilog2(),
            ("and.b32", ..0) => i32::MIN,
            ("and.b32", _) => 1 << number.trailing_zeros(),
            _ => 1,
        };
        Some(joined(head, &operands, operands.len() - 1, &(number ^ bit).to_string()))
    }),
];

/// Kinds that often change nothing, with the percentage of all kernels' mutations to detect.
///
/// Sums and products may be exact or irrelevant by themselves. Bounds may choose between a fast and
/// a general path with the same bytes. Guards may skip harmless instructions.
const OFTEN_NOTHING: [(&str, usize); 3] =
    [("another rounding mode", 30), ("a bound off by one", 40), ("a guard dropped", 60)];

/// The percentage of mutations of other kinds that must be detected.
const MOSTLY_NOTICED: usize = 75;

/// Returns the entry of [`OFTEN_NOTHING`] for a kind.
fn least_of_often_nothing(what: &str) -> Option<usize> {
    OFTEN_NOTHING.iter().find(|(kind, _)| *kind == what).map(|(_, least)| *least)
}

fn replaced(text: &str, pairs: &[(&str, &str)]) -> Option<String> {
    pairs.iter().find(|(from, _)| text.contains(from)).map(|(from, to)| text.replacen(from, to, 1))
}

/// Splits an instruction with this opcode prefix into its opcode and operands.
fn split<'a>(text: &'a str, opcode: &str) -> Option<(&'a str, Vec<&'a str>)> {
    let (head, operands) = text.strip_suffix(';')?.split_once(char::is_whitespace)?;
    head.starts_with(opcode).then(|| (head, operands.split(',').map(str::trim).collect()))
}

fn joined(head: &str, operands: &[&str], changed: usize, to: &str) -> String {
    let mut operands = operands.to_vec();
    operands[changed] = to;
    format!("{head} {};", operands.join(", "))
}

/// Positions per kernel at which each kind of mutation is tried.
const PLACES: usize = 5;

/// A kernel as a module of its own, its executed lines, and its cases.
struct Kernel<'a> {
    name: &'static str,
    header: &'a str,
    lines: Vec<&'a str>,
    executed: Vec<usize>,
    cases: Vec<(&'a Case, Launch)>,
}

impl<'a> Kernel<'a> {
    fn new(name: &'static str, text: &'a str, module: &Module, all: &'a [Case]) -> Self {
        let header = &text[..text.find(".visible .entry").expect("a kernel")];
        let start = text.find(&format!(".visible .entry {name}(")).expect("the kernel");
        let end = start + text[start..].find("\n}\n").expect("its end") + 2;
        let lines: Vec<_> = text[start..end].lines().collect();
        let first_line = text[..start].lines().count() + 1;
        // A few dozen cases of all kinds, and every tail.
        let (tails, own): (Vec<_>, Vec<_>) =
            all.iter().filter(|case| runs(case, name)).partition(|case| case.tail);
        let mut coverage = microscale_executor::Statistics::default();
        let own = own.iter().step_by(own.len().div_ceil(32).max(1));
        let cases = tails.iter().chain(own).map(|&case| {
            let (_, done) = (case.make)().run(&[module], &Launch::default()).expect("it is right");
            let most = done.iter().map(|(_, statistics)| statistics.warp_instructions).max();
            for (_, statistics) in done.iter().filter(|(kernel, _)| kernel == name) {
                coverage.merge(statistics);
            }
            // A mutation may cause an endless loop. The limit is always sufficient for the original
            // kernel.
            (case, Launch::default().limit(most.expect("a launch") * 4 + 1000))
        });
        let cases = cases.collect();
        let compiled = module.kernel(name).expect("it lowers");
        let executed = (0..compiled.len()).filter(|&index| coverage.coverage.executed(index));
        let mut executed: Vec<_> =
            executed.map(|index| compiled.instruction(index).0 as usize - first_line).collect();
        executed.dedup();
        Self { name, header, lines, executed, cases }
    }

    /// Tries a kind of mutation. Returns how often it was made, and how often it was detected.
    fn try_change(&self, module: &Module, change: fn(&str) -> Option<String>) -> (usize, usize) {
        let apply = |&line: &usize| Some((line, change(self.lines.get(line)?.trim())?));
        let places: Vec<_> = self.executed.iter().filter_map(apply).collect();
        let step = places.len().div_ceil(PLACES).max(1);
        let mut tried = (0, 0);
        for (line, changed) in places.iter().step_by(step) {
            let mut lines = self.lines.clone();
            lines[*line] = changed;
            let text = format!("{}{}\n", self.header, lines.join("\n"));
            let Ok(mutant) = Module::parse(&text) else { continue };
            // An invalid instruction does not count as a mutation.
            if mutant.kernel(self.name).is_err() {
                continue;
            }
            let runs = |(case, launch): &(&Case, Launch)| (case.make)().run(&[&mutant, module], launch);
            let noticed = self.cases.iter().any(|case| runs(case).is_err());
            tried = (tried.0 + 1, tried.1 + usize::from(noticed));
        }
        tried
    }
}

/// Returns whether a case runs a kernel.
fn runs(case: &Case, name: &str) -> bool {
    case.kernel == name
        || name.starts_with("nvfp4_plan") && (case.make)().steps.iter().any(|step| step.kernel == name)
}

#[test]
#[ignore = "takes minutes: .ci/long does it, or cargo test-all"]
fn changes_to_kernels_are_noticed() {
    // With the shares of another target: of sm_90a and sm_120f, only the kernels that the other target
    // does not have are looked at, too few for shares of their own.
    let mut kinds: BTreeMap<(&str, &str), (usize, usize)> = BTreeMap::new();
    for (target, shares) in
        [("sm_90", "sm_90"), ("sm_100f", "sm_100f"), ("sm_90a", "sm_90"), ("sm_120f", "sm_100f")]
    {
        let described = TARGETS.iter().find(|of| of.name == target).expect("a target");
        let all: Vec<Case> = cases().into_iter().filter(|case| case.runs_on(described)).collect();
        let text = ptx(described).to_string();
        let (_, module) = modules().iter().find(|(name, _)| *name == target).expect("a target");
        let of_kernel = |kernel: &'static microscale_kernels_abi::Kernel| {
            let kernel = Kernel::new(kernel.name, &text, module, &all);
            let tried = CHANGES.map(|(what, change)| (what, kernel.try_change(module, change)));
            (kernel.name, tried)
        };
        // Of the GEMM, only kernels with the smallest token tile: the others are the same text with
        // other numbers.
        let packed = || GemmConfig::all().filter(|config| !config.mainloop.is_gemv());
        let shared_with = TARGETS.iter().find(|of| of.name == shares).expect("a target");
        let is_own = |kernel: &microscale_kernels_abi::Kernel| {
            target == shares || !kernel.targets.contain(shared_with)
        };
        let wanted = |name: &str| match packed().find(|config| kernel_of(*config) == name) {
            Some(GemmConfig { mainloop, tile_m, tile_n, .. }) => {
                let of_mainloop = packed().filter(|config| config.mainloop == mainloop);
                let smallest = of_mainloop.min_by_key(|config| config.accumulator_bytes());
                smallest.is_some_and(|smallest| (smallest.tile_m, smallest.tile_n) == (tile_m, tile_n))
            }
            None => true,
        };
        let wanted = |kernel: &&'static microscale_kernels_abi::Kernel| is_own(kernel) && wanted(kernel.name);
        let results: Vec<_> = kernels_for(described).par_bridge().filter(wanted).map(of_kernel).collect();
        let mut unnoticed = Vec::new();
        for (name, tried) in &results {
            let noticed = tried.iter().filter(|(_, (_, noticed))| *noticed > 0).count();
            let tryable = tried.iter().filter(|(_, (made, _))| *made > 0).count();
            assert!(
                noticed >= 5.min(tryable),
                "{target}, {name}: only {noticed} kinds of change noticed, {tried:?}"
            );
            for &(what, (made, noticed)) in tried {
                if made != 0 && noticed == 0 && least_of_often_nothing(what).is_none() {
                    unnoticed.push(format!("{target}, {name}: {what} in {made} places"));
                }
                let sum = kinds.entry((shares, what)).or_default();
                *sum = (sum.0 + made, sum.1 + noticed);
            }
        }
        assert!(unnoticed.is_empty(), "not noticed: {unnoticed:#?}");
    }
    for ((target, what), (made, noticed)) in kinds {
        println!("{target}, {what}: {noticed} of {made} noticed");
        let least = least_of_often_nothing(what).unwrap_or(MOSTLY_NOTICED);
        assert!(noticed * 100 >= made * least, "{target}, {what}: only {noticed} of {made} noticed");
        assert!(made > 50, "{target}, {what}: only {made} made");
    }
}
