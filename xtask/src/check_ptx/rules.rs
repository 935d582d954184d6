//! Rules about the PTX text: required and forbidden statements.

use super::files::Ptx;
use super::finding::Finding;
use super::module::{Entry, Module, Statement};
use super::requirements::requirements;
use microscale_kernels_abi::{Kernel, Target};
use std::collections::BTreeMap;

/// Checks every file.
pub(super) fn check(ptx: &[Ptx]) -> Vec<Finding> {
    let findings = ptx.iter().map(|ptx| {
        let file = ptx.file.file_name().unwrap_or_default().to_string_lossy();
        let kernels = ptx.family.kernels().iter().filter(|kernel| kernel.targets.contain(ptx.target));
        check_module(&file, &ptx.module, ptx.target, &kernels.collect::<Vec<_>>())
    });
    findings.flatten().collect()
}

fn check_module(file: &str, module: &Module, target: &Target, kernels: &[&Kernel]) -> Vec<Finding> {
    let at = |line: usize, message: String| Finding { place: format!("{file}:{line}"), message };
    let mut findings: Vec<Finding> = header(module, target).map(|message| at(1, message)).collect();
    findings.extend(entry_set(module, kernels).map(|message| at(1, message)));
    let outside = module.directives.iter().filter_map(|s| Some(at(s.line, forbidden_outside(s)?)));
    findings.extend(outside);
    for entry in &module.entries {
        let forbidden = forbidden_inside(entry);
        findings.extend(forbidden.map(|(line, message)| at(line, format!("{}: {message}", entry.name))));
        if let Some(kernel) = kernels.iter().find(|kernel| kernel.name == entry.name) {
            findings.extend(missing(entry, target, kernel).map(|message| at(entry.line, message)));
        }
    }
    findings
}

/// Checks that the file's target matches its name and that its PTX version is the intended one.
///
/// A newer PTX version would need a newer driver.
fn header(module: &Module, target: &Target) -> impl Iterator<Item = String> {
    let (major, minor) = target.ptx_feature.trim_start_matches("ptx").split_at(1);
    let expected = [format!(".version {major}.{minor}"), format!(".target {}", target.name)];
    let present = |expected: &String| module.directives.iter().any(|s| s.text == *expected);
    let absent: Vec<String> = expected.into_iter().filter(|expected| !present(expected)).collect();
    absent.into_iter().map(|directive| format!("`{directive}` is missing"))
}

/// Checks that a file has exactly the kernels of the family's table that the target has.
///
/// Otherwise a launch would fail on some GPUs only.
fn entry_set(module: &Module, kernels: &[&Kernel]) -> impl Iterator<Item = String> {
    let has = |name: &str| module.entries.iter().any(|entry| entry.name == name);
    let known = |name: &str| kernels.iter().any(|kernel| kernel.name == name);
    let absent = kernels.iter().map(|k| k.name).filter(|name| !has(name));
    let unknown = module.entries.iter().map(|e| e.name.as_str()).filter(|name| !known(name));
    let mut messages: Vec<String> = absent.map(|name| format!("the kernel {name} is missing")).collect();
    messages
        .extend(unknown.map(|name| format!("{name} is not in the family's table (microscale-kernels-abi)")));
    messages.into_iter()
}

fn forbidden_outside(statement: &Statement) -> Option<String> {
    let text = statement.text.as_str();
    if text.contains(".func") {
        // `.extern .func` names a function that is never linked. Any other function was not
        // inlined.
        return Some(format!("a function that is no kernel: `{text}`"));
    }
    text.starts_with(".local").then(|| format!("local memory: `{text}`"))
}

/// Returns a kernel's forbidden instructions: the first of each kind with its line, and their
/// number.
fn forbidden_inside(entry: &Entry) -> impl Iterator<Item = (usize, String)> {
    let mut kinds: BTreeMap<&str, (&Statement, usize)> = BTreeMap::new();
    for statement in &entry.body {
        if let Some(kind) = forbidden(statement) {
            kinds.entry(kind).or_insert((statement, 0)).1 += 1;
        }
    }
    kinds.into_iter().map(|(kind, (first, count))| {
        let more = if count > 1 { format!(", and {} more", count - 1) } else { String::new() };
        (first.line, format!("{kind}: `{}`{more}", first.text))
    })
}

/// Returns why an instruction is forbidden in all kernels, or `None` if it is allowed.
fn forbidden(statement: &Statement) -> Option<&'static str> {
    let opcode = statement.opcode();
    if opcode[0] == "call" {
        return Some("a call");
    }
    if opcode.contains(&"local") || statement.text.contains("__local_depot") {
        return Some("local memory");
    }
    let accesses = ["ld", "ldu", "st", "atom", "red", "prefetch", "prefetchu"].contains(&opcode[0]);
    let spaces = ["global", "shared", "const", "param"];
    let placed = opcode.iter().any(|part| spaces.contains(&part.split("::").next().unwrap_or_default()));
    (accesses && !placed).then_some("an access without a state space")
}

fn missing(entry: &Entry, target: &Target, kernel: &Kernel) -> impl Iterator<Item = String> {
    let absent = requirements(target, kernel)
        .filter(|requirement| !entry.body.iter().any(|s| s.text.contains(requirement.ptx)))
        .map(|requirement| format!("{}: `{}` is missing", entry.name, requirement.ptx));
    absent.collect::<Vec<_>>().into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_kernels_abi::launch::Targets;
    use microscale_kernels_abi::{Converts, TARGETS};

    const KERNEL: Kernel = Kernel {
        name: "f4_quantize_k",
        dtype: None,
        threads: 32,
        elements: 32,
        shared: 0,
        converts: Converts::E2m1,
        resident: 0,
        targets: Targets::All,
    };
    const CONVERT: &str = "{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %f1, %f2; mov.b16 %rs1, {t, 0}; }";

    /// Returns the findings in a module with one kernel for sm_120f.
    fn findings(outside: &str, name: &str, body: &str) -> Vec<String> {
        let head = ".version 8.8\n.target sm_120f\n.address_size 64\n";
        findings_in(&format!("{head}{outside}\n.visible .entry {name}()\n{{\n{body}\nret;\n}}\n"))
    }

    fn findings_in(text: &str) -> Vec<String> {
        let target = TARGETS.iter().find(|target| target.name == "sm_120f").unwrap();
        let found = check_module("f", &Module::parse(text).unwrap(), target, &[&KERNEL]);
        found.into_iter().map(|finding| finding.to_string()).collect()
    }

    #[test]
    fn a_good_kernel_passes() {
        let good = [
            "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];",
            "ld.param.b64 %rd1, [k_0];\nst.volatile.shared::cta.b32 [%r1], %r2;\nld.const.b32 %r1, [c];",
            "@%p1 atom.relaxed.gpu.global.add.u64 %rd1, [%rd2], %rd3;\nredux.sync.max.u32 %r1, %r2, -1;",
            "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;\n$L_call:\n@%p1 bra $L_call;\nstacksave;",
        ];
        for body in good {
            assert_eq!(findings("", KERNEL.name, &format!("{CONVERT}\n{body}")), [""; 0], "{body}");
        }
    }

    #[test]
    fn each_forbidden_instruction_is_found() {
        let bad = [
            ("call.uni (r), helper, (a);", "a call"),
            ("@%p1 call helper, (a);", "a call"),
            (".local .align 8 .b8 __local_depot0[16];", "local memory"),
            ("mov.b64 %SPL, __local_depot0;", "local memory"),
            ("ld.local.b32 %r1, [%rd1];", "local memory"),
            ("@!%p2 st.local.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};", "local memory"),
            ("ld.b32 %r1, [%rd1];", "an access without a state space"),
            ("ld.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];", "an access without a state space"),
            ("$L_1: @%p1 st.b8 [%rd1], %r1;", "an access without a state space"),
            ("$L_1:\nst.volatile.b32 [%rd1], %r1;", "an access without a state space"),
            ("atom.add.u32 %r1, [%rd1], 1;", "an access without a state space"),
            ("red.relaxed.gpu.add.u32 [%rd1], 1;", "an access without a state space"),
        ];
        for (body, expected) in bad {
            let found = findings("", KERNEL.name, &format!("{CONVERT}\n{body}"));
            assert!(found.len() == 1 && found[0].contains(expected), "{body}: {found:?}");
            assert!(found[0].contains(KERNEL.name), "the kernel is named: {found:?}");
        }
    }

    #[test]
    fn the_first_fault_of_a_kind_is_shown() {
        let body = format!("{CONVERT}\nst.b8 [%rd1], %r1;\nst.b8 [%rd2], %r1;\nst.b8 [%rd3], %r1;");
        let expected = "f:8: f4_quantize_k: an access without a state space: `st.b8 [%rd1], %r1`, and 2 more";
        assert_eq!(findings("", KERNEL.name, &body), [expected]);
    }

    #[test]
    fn functions_other_than_kernels_are_found() {
        let bad = [
            ".extern .func (.param .b32 r) memcpy(.param .b64 a);",
            ".func helper(.param .b32 a)\n{\nret;\n}",
            ".visible .func helper()\n{\nret;\n}",
        ];
        for outside in bad {
            let found = findings(outside, KERNEL.name, CONVERT);
            assert!(found.len() == 1 && found[0].starts_with("f:4: a function"), "{outside}: {found:?}");
        }
    }

    #[test]
    fn a_missing_conversion_is_found() {
        let found = findings("", KERNEL.name, "cvt.rn.f16x2.e2m1x2 %r1, t;");
        assert_eq!(found, ["f:5: f4_quantize_k: `cvt.rn.satfinite.e2m1x2.f32` is missing"]);
    }

    #[test]
    fn a_missing_and_an_unknown_kernel_are_found() {
        let found = findings("", "other", CONVERT);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0], "f:1: the kernel f4_quantize_k is missing");
        assert!(found[1].starts_with("f:1: other is not in the family's table"), "{found:?}");
    }

    #[test]
    fn a_file_for_another_target_is_found() {
        let body = format!(".address_size 64\n.visible .entry {}()\n{{\n{CONVERT}\nret;\n}}\n", KERNEL.name);
        let found = findings_in(&format!(".version 8.8\n.target sm_120\n{body}"));
        assert_eq!(found, ["f:1: `.target sm_120f` is missing"]);
        let found = findings_in(&format!(".version 9.3\n.target sm_120f\n{body}"));
        assert_eq!(found, ["f:1: `.version 8.8` is missing"]);
    }
}
