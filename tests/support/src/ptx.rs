//! The PTX of a target: the modules of all kernel families as one.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use microscale_kernels_abi::{Family, PtxFile, Target};

/// The modules of a target in a folder, put together: directives and declarations once, then every kernel.
///
/// # Errors
/// If a file cannot be read, its name with the reason.
pub fn of_target(folder: &Path, target: &Target) -> io::Result<String> {
    let (mut head, mut entries, mut seen) = (String::new(), String::new(), BTreeSet::new());
    for family in Family::ALL {
        let path = folder.join(PtxFile { family, target }.to_string());
        let text = std::fs::read_to_string(&path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        let text = target.named(&text).concat();
        let start = text.find("\n.visible .entry ").unwrap_or(text.len());
        for line in text[..start].lines().filter(|line| seen.insert((*line).to_owned())) {
            head += line;
            head.push('\n');
        }
        entries += &text[start..];
    }
    Ok(head + &entries)
}
