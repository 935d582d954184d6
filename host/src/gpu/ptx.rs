//! The embedded PTX, kernel by kernel. `build.rs` compresses it.

use std::ops::Range;

use microscale_kernels_abi::{Family, KernelId, TARGETS, Target};

/// Where a kernel's text without its target's head lies in [`COMPRESSED`], and how long it is.
struct Piece {
    compressed: Range<usize>,
    length: usize,
}

include!(concat!(env!("OUT_DIR"), "/pieces.rs"));

/// Each kernel's text, a raw deflate stream each.
static COMPRESSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ptx.deflate"));

/// A kernel's PTX for a target that [has](Family::is_for) its family: a module with it alone.
///
/// # Panics
/// If the target does not, and if what `build.rs` wrote is not what it compressed, which a test of all kernels excludes.
pub(super) fn of(id: KernelId, target: &Target) -> String {
    let place = TARGETS.iter().position(|of| of.name == target.name).expect("every target is embedded");
    let Piece { compressed, length } = &PIECES[place][id.family() as usize][id.index()];
    let text = miniz_oxide::inflate::decompress_to_vec_with_limit(&COMPRESSED[compressed.clone()], *length)
        .ok()
        .and_then(|text| String::from_utf8(text).ok())
        .expect("build.rs has compressed it");
    format!("{}{text}", target.head())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_every_target_is_embedded_by_itself() {
        for target in &TARGETS {
            for id in KernelId::all().filter(|id| id.family().is_for(target)) {
                let (text, name) = (of(id, target), id.kernel().name);
                assert!(text.contains(&format!("\n.target {}\n", target.name)), "{name} for {}", target.name);
                assert_eq!(text.matches(".entry ").count(), 1, "{name}");
                assert!(text.contains(&format!(".visible .entry {name}(")), "{name}");
                assert!(text.trim_end().ends_with('}'), "{name}");
            }
        }
    }
}
