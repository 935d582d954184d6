//! The PTX of a target: the modules of all kernel families as one.

use std::io;
use std::path::Path;

use microscale_kernels_abi::{Family, Ptx, Target};

/// The modules of a target in a folder, put together: declarations once, then every kernel.
///
/// # Errors
/// If a file cannot be read, its name with the reason; if two families declare the same memory differently.
pub fn of_target(folder: &Path, target: &'static Target) -> io::Result<Ptx> {
    let mut all = Ptx::parse(target, "");
    for family in Family::ALL {
        all.join(Ptx::read(folder, family, target)?).map_err(io::Error::other)?;
    }
    Ok(all)
}
