//! The committed PTX: a file a family and target.

use super::finding::Finding;
use super::module::Module;
use crate::layout;
use anyhow::{Context, Result};
use microscale_kernels_abi::{Family, PtxFile, TARGETS, Target};
use std::path::PathBuf;

/// A family's PTX for a target.
pub(super) struct Ptx {
    pub(super) target: &'static Target,
    pub(super) family: Family,
    pub(super) file: PathBuf,
    /// All the kernels', those that the target shares with the one before included.
    pub(super) text: String,
    pub(super) module: Module,
}

/// Reads them all.
pub(super) fn read() -> Result<Vec<Ptx>> {
    let folder = layout::ptx()?;
    let read = |(target, family): (&'static Target, Family)| {
        let file = folder.join(PtxFile { family, target }.to_string());
        let text = microscale_kernels_abi::Ptx::read(&folder, family, target)
            .context("cannot read the PTX; `cargo xtask build-ptx` writes it")?
            .to_string();
        let module = Module::parse(&text).with_context(|| format!("in {}", file.display()))?;
        Ok(Ptx { target, family, file, text, module })
    };
    let of_target = |target| Family::ALL.into_iter().map(move |family| (target, family));
    let all = TARGETS.iter().flat_map(of_target).filter(|(target, family)| family.is_for(target));
    all.map(read).collect()
}

/// Files beside the PTX that nothing owns: left over from a target or a family that was renamed or given up.
pub(super) fn strays(ptx: &[Ptx]) -> Result<Vec<Finding>> {
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
