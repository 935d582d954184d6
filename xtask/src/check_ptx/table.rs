//! docs/lab/sass.md: the shipped kernels on each GPU.
//!
//! The file is committed so that a change of the machine code shows in review.

use super::assembler::Assembler;
use super::assembly::{Assembled, Assembly, contains};
use super::prediction::{GPUS, Gpu, predict};
use super::report::accesses;
use crate::layout;
use anyhow::{Context, Result, bail};
use std::fmt::Write;

const INTRODUCTION: &str = "# Registers and instructions of the kernels

`cargo xtask check-ptx --write-table` makes this file from the PTX in host/ptx and the output of
NVIDIA's assembler; `check-ptx` fails if it is out of date. The figures describe the main path of
each kernel, which handles whole blocks.

- instructions: all instructions per element on the main path, then the shares of the multiply-add
  units and of the logic unit.
- loads, stores: bits of each global access × their number.
- converts: conversions to or from E2M1, E4M3 or E5M2 (F2FP).
- limiter, of bandwidth: the first resource to run out if nothing ever waited, and the share of the
  memory's bandwidth that this allows. It is a bound (xtask/src/check_ptx/prediction.rs has the
  rates and their sources). On an H200, kernels that are limited by issue reach 80 to 85 % of it,
  and no kernel exceeds about 88 % of the data sheet's bandwidth, which is also a copy's limit.
";

/// Writes the table, or compares it with the committed one.
pub(super) fn run(assembler: &Assembler, assemblies: &[Assembly], write: bool) -> Result<()> {
    let file = layout::root()?.join("docs/lab/sass.md");
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
            "table: SKIPPED, docs/lab/sass.md is of another assembler: {}",
            version(&committed).unwrap_or_default()
        );
        return Ok(());
    }
    let mut different = committed.lines().zip(made.lines()).filter(|(committed, made)| committed != made);
    if committed == made {
        println!("table: docs/lab/sass.md is up to date");
        return Ok(());
    }
    let first =
        different.next().map(|(committed, made)| format!("\n  committed {committed}\n  made      {made}"));
    bail!(
        "docs/lab/sass.md is not what the PTX becomes, in {} lines; `cargo xtask check-ptx --write-table` rewrites it{}",
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
