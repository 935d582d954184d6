//! `check-ptx`: checks the committed PTX and the machine code that NVIDIA's assembler makes of it.
//!
//! It fails on anything that would be slow or would not run. It needs no GPU, and no other program
//! than the assembler.

mod assembler;
mod assembly;
mod files;
mod finding;
mod main_path;
mod module;
mod prediction;
mod report;
mod requirements;
mod resources;
mod rules;
mod sass;
mod table;

use anyhow::{Context, Result, bail};
use finding::Finding;

#[derive(Default)]
struct Request {
    /// The report shows the kernels whose names contain this text.
    kernel: String,
    install_ptxas: bool,
    require_ptxas: bool,
    /// Assembles for all GPUs of a target instead of one.
    every_gpu: bool,
    write_table: bool,
}

/// Runs all checks, prints the report, and fails if there are findings.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let request = parse(arguments)?;
    let ptx = files::read()?;
    let mut findings = rules::check(&ptx);
    findings.extend(files::strays(&ptx)?);
    let kernels: usize = ptx.iter().map(|ptx| ptx.module.entries.len()).sum();
    println!("text: {} files, {kernels} kernels, {}", ptx.len(), count(&findings));

    match assembler::find(request.install_ptxas)? {
        Some(assembler) => {
            println!("assembling with {}", assembler.version);
            let results = assembly::assemble_all(&assembler, &ptx, request.every_gpu)?;
            let found = assembly::check(&results);
            println!("assembler: {} modules, {}", results.len(), count(&found));
            let found_nothing = found.is_empty();
            findings.extend(found);
            report::print(&results, &request.kernel)?;
            if found_nothing {
                table::run(&assembler, &results, request.write_table)?;
            }
        }
        None if request.require_ptxas => bail!("ptxas was not found\n{}", assembler::HOW_TO_GET_IT),
        None => println!("assembler: SKIPPED, ptxas was not found\n{}", assembler::HOW_TO_GET_IT),
    }

    if !findings.is_empty() {
        let list: Vec<String> = findings.iter().map(Finding::to_string).collect();
        bail!("{}\n{}", count(&findings), list.join("\n"));
    }
    Ok(())
}

fn parse(arguments: &[String]) -> Result<Request> {
    let mut request = Request::default();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--kernel" => request.kernel = arguments.next().context("--kernel needs a text")?.clone(),
            "--install-ptxas" => request.install_ptxas = true,
            "--require-ptxas" => request.require_ptxas = true,
            "--every-gpu" => request.every_gpu = true,
            "--write-table" => request.write_table = true,
            other => bail!("check-ptx does not know `{other}`"),
        }
    }
    Ok(request)
}

fn count(findings: &[Finding]) -> String {
    match findings.len() {
        0 => "nothing wrong".to_owned(),
        1 => "1 thing wrong".to_owned(),
        n => format!("{n} things wrong"),
    }
}
