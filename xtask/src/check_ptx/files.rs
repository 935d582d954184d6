//! The committed PTX: one file per family and target.

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
    /// The text of all kernels, including those shared with the previous target.
    pub(super) text: String,
    pub(super) module: Module,
}

/// Reads all files.
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
    TARGETS.iter().flat_map(of_target).map(read).collect()
}

/// Finds files in `host/ptx/` without an owner, left over from a renamed or removed target or
/// family.
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
