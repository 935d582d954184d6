//! `check-ptx`: reads the committed PTX, and what NVIDIA's assembler makes of it, and fails on anything that would be slow
//! or would not run. Needs no GPU and, but for the assembler, nothing beyond this program.

mod assembler;
mod assembly;
mod main_path;
mod module;
mod prediction;
mod report;
mod requirements;
mod resources;
mod rules;
mod sass;
mod table;

use crate::build_ptx::retarget;
use crate::layout;
use anyhow::{Context, Result, bail};
use microscale_kernels_abi::{Family, TARGETS, Target};
use module::Module;
use std::fmt;
use std::path::PathBuf;

/// Something that is wrong, and where.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    /// A file name with a line, or a kernel with a GPU.
    place: String,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// A family's PTX for a target.
struct Ptx {
    target: &'static Target,
    family: Family,
    file: PathBuf,
    /// The file's, with the target's name.
    text: String,
    module: Module,
}

#[derive(Default)]
struct Request {
    /// The report shows the kernels whose name contains this.
    kernel: String,
    install_ptxas: bool,
    require_ptxas: bool,
    write_table: bool,
}

/// Checks everything, prints the report, and fails if anything was found.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let request = parse(arguments)?;
    let ptx = read()?;
    let mut findings = rules::check(&ptx);
    findings.extend(strays(&ptx)?);
    let kernels: usize = ptx.iter().map(|ptx| ptx.module.entries.len()).sum();
    println!("text: {} files, {kernels} kernels, {}", ptx.len(), count(&findings));

    match assembler::find(request.install_ptxas)? {
        Some(assembler) => {
            println!("assembling with {}", assembler.version);
            let results = assembly::assemble_all(&assembler, &ptx)?;
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
            "--write-table" => request.write_table = true,
            other => bail!("check-ptx does not know `{other}`"),
        }
    }
    Ok(request)
}

fn read() -> Result<Vec<Ptx>> {
    let folder = layout::ptx()?;
    let read = |(target, family): (&'static Target, Family)| {
        let file = folder.join(layout::ptx_file(family, target));
        let text = std::fs::read_to_string(&file);
        let text = text
            .with_context(|| format!("cannot read {}; `cargo xtask build-ptx` writes it", file.display()))?;
        let text = retarget(&text, target);
        let module = Module::parse(&text).with_context(|| format!("in {}", file.display()))?;
        Ok(Ptx { target, family, file, text, module })
    };
    TARGETS.iter().flat_map(|target| Family::ALL.map(|family| (target, family))).map(read).collect()
}

/// Files beside the PTX that nothing owns: left over from a target or a family that was renamed or given up.
fn strays(ptx: &[Ptx]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for entry in std::fs::read_dir(layout::ptx()?)? {
        let file = entry?.path();
        let is_ptx = file.extension().is_some_and(|extension| extension == "ptx");
        if is_ptx && ptx.iter().all(|ptx| ptx.file != file) {
            let message =
                "no family and target have this name (microscale-kernels-abi lists them)".to_owned();
            findings.push(Finding { place: file.display().to_string(), message });
        }
    }
    Ok(findings)
}

fn count(findings: &[Finding]) -> String {
    match findings.len() {
        0 => "nothing wrong".to_owned(),
        1 => "1 thing wrong".to_owned(),
        n => format!("{n} things wrong"),
    }
}
