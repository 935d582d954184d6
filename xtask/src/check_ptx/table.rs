//! docs/sass.md: the shipped kernels on each GPU.
//!
//! The file is committed so that a change of the machine code shows in review.

use super::assembler::Assembler;
use super::assembly::{Assembled, Assembly, contains};
use super::prediction::{GPUS, Gpu, predict};
use super::report::accesses;
use crate::layout;
use anyhow::{Context, Result, bail};
use std::fmt::Write;

const INTRODUCTION: &str = "# What the kernels become

Made by `cargo xtask check-ptx --write-table` from the PTX in host/ptx and what NVIDIA's assembler makes of it; `check-ptx` fails if it is
out of date. Of each kernel the main path is shown, that of whole blocks.

- instructions: an element's, of the main path; of these the multiply-add units', and the logic unit's.
- loads, stores: bits of each global access × how many.
- converts: conversions to or from E2M1, E4M3 or E5M2 (F2FP).
- limiter, of bandwidth: the first resource to run out if nothing ever waited, and what then is reached of the memory's bandwidth. It is a
  bound (xtask/src/check_ptx/prediction.rs has the rates and their sources). On an H200 kernels that are bound by issue reach
  80 to 85 % of it, and no kernel more than about 88 % of the data sheet's bandwidth, which a copy does not exceed either.
";

/// Writes the table, or compares it with the committed one.
pub(super) fn run(assembler: &Assembler, assemblies: &[Assembly], write: bool) -> Result<()> {
    let file = layout::root()?.join("docs").join("sass.md");
    let made = table(assembler, assemblies);
    if write {
        std::fs::write(&file, made).with_context(|| format!("cannot write {}", file.display()))?;
        println!("wrote {}", file.display());
        return Ok(());
    }
    let committed = std::fs::read_to_string(&file).with_context(|| {
        format!("cannot read {}; `cargo xtask check-ptx --write-table` writes it", file.display())
    })?;
    let version = |text: &str| text.lines().find(|line| line.starts_with("Assembler: ")).map(str::to_owned);
    if version(&committed) != version(&made) {
        println!(
            "table: SKIPPED, docs/sass.md is of another assembler: {}",
            version(&committed).unwrap_or_default()
        );
        return Ok(());
    }
    let mut different = committed.lines().zip(made.lines()).filter(|(committed, made)| committed != made);
    if committed == made {
        println!("table: docs/sass.md is up to date");
        return Ok(());
    }
    let first =
        different.next().map(|(committed, made)| format!("\n  committed {committed}\n  made      {made}"));
    bail!(
        "docs/sass.md is not what the PTX becomes, in {} lines; `cargo xtask check-ptx --write-table` rewrites it{}",
        different.count() + 1,
        first.unwrap_or_default()
    )
}

fn table(assembler: &Assembler, assemblies: &[Assembly]) -> String {
    let mut text = format!("{INTRODUCTION}\nAssembler: {}\n", assembler.version.trim());
    for gpu in &GPUS {
        let Some(assembly) = assemblies.iter().find(|assembly| assembly.gpu == gpu.assembled_for) else {
            continue;
        };
        let mut kernels: Vec<_> = assembly.result.iter().flatten().collect();
        // Kernels for aligned rows come first, then kernels for any matrix.
        kernels.sort_by_key(|kernel| (kernel.name.ends_with("_unaligned"), &kernel.name));
        write!(
            text,
            "\n## {} ({}: {} multiprocessors, {} GHz, {} GB/s)\n\n| kernel | registers | occupancy | instructions | loads | stores | converts | limiter | of bandwidth |\n|---|---|---|---|---|---|---|---|---|\n",
            gpu.name, gpu.assembled_for, gpu.multiprocessors, gpu.clock_ghz, gpu.bandwidth_gbs
        )
        .expect("a string");
        for kernel in kernels {
            text += &row(gpu, kernel);
        }
    }
    text
}

fn row(gpu: &Gpu, kernel: &Assembled) -> String {
    let prediction = predict(gpu, kernel);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "–".into());
    let converts: Vec<&str> = ["E2M1", "E4M3", "E5M2"]
        .into_iter()
        .filter(|element| contains(&kernel.code, ("F2FP", element)))
        .collect();
    let cells = [
        kernel.name.clone(),
        kernel.resources.registers.to_string(),
        or_dash(prediction.as_ref().map(|p| format!("{:.0} %", p.occupancy))),
        or_dash(prediction.as_ref().map(|p| {
            let [all, multiply, logic] = p.instructions;
            format!("{all:.1}; {multiply:.1}, {logic:.1}")
        })),
        accesses(kernel, "LDG"),
        accesses(kernel, "STG"),
        if converts.is_empty() { "–".into() } else { converts.join(" ") },
        or_dash(prediction.as_ref().map(|p| p.limiter.into())),
        or_dash(prediction.as_ref().map(|p| format!("{:.0} %", p.of_bandwidth))),
    ];
    format!("| {} |\n", cells.join(" | "))
}
