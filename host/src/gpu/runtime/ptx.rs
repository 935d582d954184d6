//! The embedded PTX, which `build.rs` compresses in groups of a few kernels.

use std::io::Read;
use std::ops::Range;

use lzma_rust2::LzmaReader;
use microscale_kernels_abi::{Family, KernelId, TARGETS, Target};

/// The location of a kernel's text, without the target's header: part number, range in the part.
struct Piece {
    part: usize,
    place: Range<usize>,
}

/// Kernels that are compressed together: the range in [`COMPRESSED`] and the text's length.
struct Part {
    compressed: Range<usize>,
    length: usize,
}

include!(concat!(env!("OUT_DIR"), "/pieces.rs"));

/// The parts, each one LZMA stream.
static COMPRESSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ptx.lzma"));

/// The module with one kernel, for a target that the kernel [supports][targets].
///
/// [targets]: microscale_kernels_abi::Kernel::targets
///
/// # Panics
/// If the kernel does not support the target, or if the output of `build.rs` is corrupt. A test of
/// all kernels excludes the latter.
pub(in crate::gpu) fn of(id: KernelId, target: &Target) -> String {
    let place = TARGETS.iter().position(|of| of.name == target.name).expect("every target is embedded");
    let Piece { part, place } = &PIECES[place][id.family() as usize][id.index()];
    let text = PARTS[*part].inflated();
    let text = text.as_deref().and_then(|text| text.get(place.clone())).expect("build.rs has compressed it");
    format!("{}{text}", target.head())
}

impl Part {
    /// The decompressed text, or `None` if the compressed data is corrupt.
    fn inflated(&self) -> Option<String> {
        let mut text = String::with_capacity(self.length);
        let reader = LzmaReader::new_mem_limit(&COMPRESSED[self.compressed.clone()], u32::MAX, None);
        reader.ok()?.read_to_string(&mut text).ok()?;
        (text.len() == self.length).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_every_target_is_embedded_by_itself() {
        for target in &TARGETS {
            for id in KernelId::all().filter(|id| id.kernel().targets.contain(target)) {
                let (text, name) = (of(id, target), id.kernel().name);
                assert!(text.contains(&format!("\n.target {}\n", target.name)), "{name} for {}", target.name);
                assert_eq!(text.matches(".entry ").count(), 1, "{name}");
                assert!(text.contains(&format!(".visible .entry {name}(")), "{name}");
                assert!(text.trim_end().ends_with('}'), "{name}");
            }
        }
    }
}
