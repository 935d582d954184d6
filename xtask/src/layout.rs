//! Paths in the repository.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// The repository's root. Asked of cargo at run time, so that a shared target folder cannot name another
/// checkout.
pub(crate) fn root() -> Result<PathBuf> {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").context("start this program with `cargo xtask`")?;
    let mut root = PathBuf::from(xtask);
    root.pop();
    Ok(root)
}

/// The kernels' crate, a workspace of its own.
pub(crate) fn kernels() -> Result<PathBuf> {
    Ok(root()?.join("kernels-gpu"))
}

/// The folder of generated PTX that the library embeds.
pub(crate) fn ptx() -> Result<PathBuf> {
    Ok(root()?.join("host").join("ptx"))
}
