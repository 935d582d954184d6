//! Assembles the PTX for real GPUs and checks the result.

use super::assembler::Assembler;
use super::files::Ptx;
use super::finding::Finding;
use super::main_path::{MainPath, main_path};
use super::requirements::requirements;
use super::resources::{self, REGISTERS, Resources, registers_of_a_warp};
use super::sass::{self, Code, Instruction};
use crate::{layout, process};
use anyhow::{Context, Result, bail};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{Kernel, Target, kernels};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A kernel as assembled for one GPU.
pub(super) struct Assembled {
    /// Its row in the table of kernels, if any.
    pub(super) kernel: Option<&'static Kernel>,
    pub(super) name: String,
    pub(super) resources: Resources,
    pub(super) code: Code,
    pub(super) main_path: Option<MainPath>,
}

/// A target's modules assembled for one GPU, or the error.
pub(super) struct Assembly {
    pub(super) target: &'static Target,
    /// For example `sm_103a`.
    pub(super) gpu: &'static str,
    pub(super) result: Result<Vec<Assembled>>,
}

/// Assembles every module on all cores: for the first GPU of its target, or for every GPU in the
/// table of targets.
///
/// Results are in the table's order.
pub(super) fn assemble_all(assembler: &Assembler, ptx: &[Ptx], every_gpu: bool) -> Result<Vec<Assembly>> {
    let folder = layout::root()?.join("target").join("check-ptx");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let gpus = |target: &Target| {
        let count = if every_gpu { target.assemble_for.len() } else { 1 };
        &target.assemble_for[..count]
    };
    let jobs: Vec<(&Ptx, &'static str)> =
        ptx.iter().flat_map(|ptx| gpus(ptx.target).iter().map(move |gpu| (ptx, *gpu))).collect();
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    let Some((ptx, gpu)) = jobs.get(job) else { break };
                    let result = assemble(assembler, ptx, gpu, &folder);
                    done.lock().expect("no worker panics").push((job, result));
                }
            });
        }
    });
    let mut done: Vec<(usize, Result<Vec<Assembled>>)> = done.into_inner().expect("no worker panics");
    done.sort_by_key(|(job, _)| *job);
    let mut assemblies: Vec<Assembly> = Vec::new();
    for (job, result) in done {
        let (ptx, gpu) = jobs[job];
        let of_gpu = |of: &&mut Assembly| (of.target.name, of.gpu) == (ptx.target.name, gpu);
        match assemblies.iter_mut().find(of_gpu) {
            Some(assembly) => match (&mut assembly.result, result) {
                (Ok(all), Ok(more)) => all.extend(more),
                (all, Err(error)) if all.is_ok() => *all = Err(error),
                _ => {}
            },
            None => assemblies.push(Assembly { target: ptx.target, gpu, result }),
        }
    }
    Ok(assemblies)
}

fn assemble(assembler: &Assembler, ptx: &Ptx, gpu: &str, folder: &Path) -> Result<Vec<Assembled>> {
    let name = format!("{}.{}", ptx.family.word(), ptx.target.name);
    let (file, cubin) =
        (folder.join(format!("{name}_on_{gpu}.ptx")), folder.join(format!("{name}_on_{gpu}.cubin")));
    std::fs::write(&file, &ptx.text).with_context(|| format!("cannot write {}", file.display()))?;
    let mut ptxas = Command::new(&assembler.ptxas);
    ptxas.args(["--verbose", "--gpu-name", gpu, "--output-file"]).arg(&cubin).arg(&file);
    let output = process::capture(&mut ptxas)?;
    let said = format!("{}{}", process::text(output.stdout)?, process::text(output.stderr)?);
    if !output.status.success() {
        // The assembler repeats itself. The first lines are sufficient.
        let errors: Vec<&str> = said.lines().filter(|line| !line.contains(" info ")).take(5).collect();
        bail!("{name} does not assemble: {}", errors.join("\n  "));
    }
    if let Some(warning) = serialised(&said) {
        bail!("{name}: {warning}");
    }
    let mut resources = resources::parse(&said);
    let listing = process::read(Command::new(&assembler.nvdisasm).arg("-c").arg(&cubin))?;
    let mut code = sass::parse(&listing);
    let kernel = |entry: &super::module::Entry| {
        let name = entry.name.clone();
        let resources = resources.remove(&name).with_context(|| format!("ptxas says nothing of {name}"))?;
        let code = code.remove(&name).with_context(|| format!("nvdisasm does not show {name}"))?;
        let kernel = kernels().find(|kernel| kernel.name == name);
        Ok(Assembled { kernel, name, resources, main_path: main_path(&code), code })
    };
    ptx.module.entries.iter().map(kernel).collect()
}

/// The instructions of the tensor cores.
const PRODUCTS: &[&str] = &["HMMA", "HGMMA", "QGMMA", "OMMA", "UTCOMMA"];

/// The instructions of a warp group's products, whose descriptors are in uniform registers.
const WARP_GROUP_PRODUCTS: [&str; 2] = ["HGMMA", "QGMMA"];

/// Returns the assembler's warning that asynchronous matrix products (wgmma) are serialized, if
/// any.
fn serialised(said: &str) -> Option<&str> {
    said.lines().find(|line| line.contains("wgmma") && line.contains("serialized")).map(str::trim)
}

/// Kernels that may use local memory.
///
/// `gptq_columns_mxfp4` has two values for each of a block's 32 columns in registers, next to a
/// search, and spills two words on Blackwell. No form without spills was found.
const MAY_SPILL: [&str; 1] = ["gptq_columns_mxfp4"];

/// Checks that everything assembles, uses no local memory and fits the register file, except for
/// [`MAY_SPILL`].
///
/// Also checks that required conversion instructions survive, and that the products of a warp group
/// follow one another. A defect on several GPUs is reported once.
pub(super) fn check(assemblies: &[Assembly]) -> Vec<Finding> {
    let mut gpus: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
    for assembly in assemblies {
        for message in wrong(assembly) {
            gpus.entry((assembly.target.name, message)).or_default().push(assembly.gpu);
        }
    }
    let finding = |((target, message), gpus): ((&str, String), Vec<&str>)| Finding {
        place: format!("{target} on {}", gpus.join(", ")),
        message,
    };
    gpus.into_iter().map(finding).collect()
}

fn wrong(assembly: &Assembly) -> Vec<String> {
    let kernels = match &assembly.result {
        Ok(kernels) => kernels,
        Err(error) => return vec![format!("{error:#}")],
    };
    let of_kernel = |kernel: &Assembled| {
        let may_spill = MAY_SPILL.contains(&kernel.name.as_str()) || spills_outside_of_products(kernel);
        let spills = local_memory(kernel.resources).filter(|_| !may_spill);
        let messages = [
            spills,
            too_many_registers(kernel),
            lost_conversion(kernel, assembly.target),
            moves_between_products(&kernel.code),
        ];
        messages.map(|message| message.map(|message| format!("{}: {message}", kernel.name)))
    };
    kernels.iter().flat_map(of_kernel).flatten().collect()
}

/// Returns a message if a kernel's largest thread block needs more registers than a multiprocessor
/// has.
///
/// No GPU could launch such a kernel.
fn too_many_registers(assembled: &Assembled) -> Option<String> {
    let (kernel, registers) = (assembled.kernel?, assembled.resources.registers);
    let all = registers_of_a_warp(registers) * kernel.threads.div_ceil(WARP);
    (all > REGISTERS).then(|| {
        format!(
            "{} threads of {registers} registers: a multiprocessor has {REGISTERS} in all",
            kernel.threads
        )
    })
}

fn local_memory(used: Resources) -> Option<String> {
    let Resources { stack, spill_stores, spill_loads, .. } = used;
    let any = stack + spill_stores + spill_loads > 0;
    any.then(|| {
        format!("local memory: {stack} bytes of stack, {spill_stores} spilled, {spill_loads} reloaded")
    })
}

/// Returns whether a kernel spills only outside its products' innermost loops.
///
/// This concerns kernels that already use all registers available to their number of threads. They
/// spill once per work tile, which is free.
fn spills_outside_of_products(assembled: &Assembled) -> bool {
    let code = &assembled.code;
    let named = |names: &'static [&str]| {
        let all = code.instructions.iter().enumerate();
        all.filter(|(_, instruction)| names.contains(&instruction.name())).map(|(place, _)| place)
    };
    let back = (0..code.instructions.len()).filter_map(|end| Some(code.target(end)?..=end));
    let loops: Vec<RangeInclusive<usize>> = back.filter(|range| !range.is_empty()).collect();
    // The code of a repeated wait is after all loops and jumps back into one. A product's loop is
    // therefore the shortest backward jump around it.
    let innermost = |place| {
        loops.iter().filter(|range| range.contains(&place)).min_by_key(|range| range.end() - range.start())
    };
    let is_clean = |place| {
        innermost(place).is_some_and(|range| !named(&["LDL", "STL"]).any(|place| range.contains(&place)))
    };
    assembled.kernel.is_some_and(|kernel| kernel.resident == 1)
        && named(PRODUCTS).next().is_some()
        && named(PRODUCTS).all(is_clean)
}

fn lost_conversion(assembled: &Assembled, target: &Target) -> Option<String> {
    let lost = requirements(target, assembled.kernel?)
        .find(|requirement| !contains(&assembled.code, requirement.sass))?;
    let (name, modifier) = lost.sass;
    Some(format!("no {name}…{modifier} in the machine code"))
}

/// Returns a message if descriptors move to uniform registers between products of a warp group.
///
/// The tensor cores wait for that. The assembler moves them if it takes a loop's values for
/// divergent, as it does when lanes diverge after the loop's exit.
fn moves_between_products(code: &Code) -> Option<String> {
    let starts: BTreeSet<usize> = code.labels.values().copied().collect();
    // The moves since the last product. None if a label or a new group of products follows it.
    let mut moves = None;
    for (place, instruction) in code.instructions.iter().enumerate() {
        let name = instruction.name();
        if starts.contains(&place) || name == "WARPGROUP" {
            moves = None;
        }
        if WARP_GROUP_PRODUCTS.contains(&name) {
            if let Some(moves @ 1..) = moves {
                return Some(format!(
                    "{moves} moves to uniform registers (R2UR) between products, which wait for them"
                ));
            }
            moves = Some(0);
        } else if name == "R2UR" {
            moves = moves.map(|moves| moves + 1);
        }
    }
    None
}

/// Returns whether the code has an instruction with this modifier, or with any if it is empty.
pub(super) fn contains(code: &Code, (name, modifier): (&str, &str)) -> bool {
    let has = |instruction: &Instruction| modifier.is_empty() || instruction.has(modifier);
    code.instructions.iter().any(|instruction| instruction.name() == name && has(instruction))
}

#[cfg(test)]
mod tests {
    use super::super::sass::tests::listing;
    use super::*;
    use microscale_kernels_abi::{Converts, TARGETS};

    fn assembled(name: &str, resources: Resources, code: &str) -> Assembly {
        let target = TARGETS.iter().find(|target| target.hardware_fp4).unwrap();
        let kernel = kernels().find(|kernel| kernel.name == name);
        let code = listing(code);
        let kernel = Assembled { kernel, name: name.to_owned(), resources, main_path: None, code };
        Assembly { target, gpu: "sm_000", result: Ok(vec![kernel]) }
    }

    fn messages(assembly: Assembly) -> Vec<String> {
        check(&[assembly]).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn thread_blocks_that_exceed_the_register_file_are_found() {
        let kernel = kernels().find(|kernel| kernel.threads == 512 && kernel.resident == 0).unwrap().name;
        let found =
            |registers| messages(assembled(kernel, Resources { registers, ..Default::default() }, "EXIT"));
        assert_eq!(found(128).iter().filter(|message| message.contains("registers")).count(), 0);
        assert_eq!(found(129).iter().filter(|message| message.contains("registers")).count(), 1);
    }

    #[test]
    fn spills_and_stack_frames_are_found() {
        assert_eq!(
            messages(assembled("k", Resources { registers: 255, ..Default::default() }, "EXIT")),
            [""; 0]
        );
        for used in [
            Resources { stack: 8, ..Default::default() },
            Resources { spill_stores: 4, ..Default::default() },
            Resources { spill_loads: 4, ..Default::default() },
        ] {
            let found = messages(assembled("k", used, "EXIT"));
            assert!(found.len() == 1 && found[0].starts_with("k: local memory"), "{found:?}");
        }
    }

    #[test]
    fn resident_kernels_may_spill_outside_of_their_products() {
        let used = Resources { stack: 8, spill_stores: 8, spill_loads: 8, ..Default::default() };
        let resident = kernels().find(|kernel| kernel.resident == 1).unwrap().name;
        let plain = kernels().find(|kernel| kernel.resident == 0).unwrap().name;
        let outside = ".L_1:\nSTL [R1], R2\n.L_2:\nHGMMA.64x128x16.F32 R24, R92\n@P0 BRA `(.L_2)\nLDL R2, [R1]\n@P1 BRA `(.L_1)\nEXIT";
        let inside = outside.replace("LDL R2, [R1]\n", "").replace("\nHGMMA", "\nLDL R2, [R1]\nHGMMA");
        let count = |name, code: &str| {
            messages(assembled(name, used, code)).into_iter().filter(|said| said.contains("local")).count()
        };
        assert_eq!([count(resident, outside), count(resident, &inside), count(plain, outside)], [0, 1, 1]);
        let more = ".L_3:\nLDL R2, [R1]\nHGMMA.64x256x16.F32 R24, R92\nHGMMA.64x256x16.F32 R24, R92\n@P0 BRA `(.L_3)\nEXIT";
        assert_eq!(count(resident, &outside.replace("EXIT", more)), 1, "a second loop");
        assert_eq!(count(resident, "EXIT"), 1, "no products");
    }

    #[test]
    fn moves_between_products_of_a_warp_group_are_found() {
        let found = |code: &str| messages(assembled("k", Resources::default(), code)).len();
        let products = |between: &str| {
            format!(
                "R2UR UR4, R0\nWARPGROUP.ARRIVE\nQGMMA.64x8x32 R24, R40\n{between}QGMMA.64x8x32 R24, R44\nEXIT"
            )
        };
        assert_eq!(found(&products("R2UR UR6, R1\n")), 1);
        // Uniform arithmetic, a move before a new group of products, and a move before a label.
        for between in
            ["UIADD3 UR6, UR6, 0x2, URZ\n", "R2UR UR6, R1\nWARPGROUP.ARRIVE\n", "R2UR UR6, R1\n.L_1:\n"]
        {
            assert_eq!(found(&products(between)), 0, "{between}");
        }
    }

    #[test]
    fn a_fault_on_several_gpus_is_reported_once() {
        let used = Resources { stack: 8, ..Default::default() };
        let on = |gpu| Assembly { gpu, ..assembled("k", used, "EXIT") };
        let found = check(&[on("sm_000"), on("sm_001")]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].place.ends_with(" on sm_000, sm_001"), "{found:?}");
    }

    #[test]
    fn a_lost_conversion_is_found() {
        let name = kernels().find(|kernel| kernel.converts == Converts::E2m1).unwrap().name;
        let kept = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R0, R0, R5, RZ\nEXIT";
        assert_eq!(messages(assembled(name, Resources::default(), kept)), [""; 0]);
        let lost = "F2FP.BF16.F32.PACK_AB R0, R0, R5\nEXIT";
        let expected = format!("{name}: no F2FP…E2M1 in the machine code");
        assert_eq!(messages(assembled(name, Resources::default(), lost)), [expected]);
    }

    #[test]
    fn serialized_products_are_found() {
        let warning =
            "Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in 'k'";
        assert_eq!(serialised(&format!("ptxas info : 0 bytes gmem\n{warning}\n")), Some(warning));
        assert_eq!(serialised("ptxas info : Compiling entry function 'k' for 'sm_90a'\n"), None);
    }

    #[test]
    fn assembler_errors_are_found() {
        let failed = Assembly {
            target: &TARGETS[0],
            gpu: "sm_000",
            result: Err(anyhow::anyhow!("does not assemble: x")),
        };
        let found = check(&[failed]);
        assert_eq!(found[0].to_string(), "sm_80 on sm_000: does not assemble: x");
    }
}
