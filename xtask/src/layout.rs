//! Paths in the repository.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// Returns the repository's root.
///
/// Cargo passes it at run time, so a shared target folder cannot name another checkout.
pub(crate) fn root() -> Result<PathBuf> {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").context("start this program with `cargo xtask`")?;
    let mut root = PathBuf::from(xtask);
    root.pop();
    Ok(root)
}

/// Returns the folder of the kernels' crate, which is a workspace of its own.
pub(crate) fn kernels() -> Result<PathBuf> {
    Ok(root()?.join("kernels-gpu"))
}

/// Returns the folder of generated PTX that the library embeds.
pub(crate) fn ptx() -> Result<PathBuf> {
    Ok(root()?.join("host").join("ptx"))
}
