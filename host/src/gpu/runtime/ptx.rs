//! The embedded PTX. `build.rs` compresses it, a few kernels together.

use std::io::Read;
use std::ops::Range;

use lzma_rust2::LzmaReader;
use microscale_kernels_abi::{Family, KernelId, TARGETS, Target};

/// The place of a kernel's text, without its target's head: the number of a part, and where it is in there.
struct Piece {
    part: usize,
    place: Range<usize>,
}

/// Kernels that are compressed together: their place in [`COMPRESSED`], and the length of their text.
struct Part {
    compressed: Range<usize>,
    length: usize,
}

include!(concat!(env!("OUT_DIR"), "/pieces.rs"));

/// The parts, an LZMA stream each.
static COMPRESSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ptx.lzma"));

/// A module with one kernel, for a target that [has](microscale_kernels_abi::Kernel::targets) it.
///
/// # Panics
/// If the target does not, and if what `build.rs` wrote is not what it compressed, which a test of all kernels excludes.
pub(in crate::gpu) fn of(id: KernelId, target: &Target) -> String {
    let place = TARGETS.iter().position(|of| of.name == target.name).expect("every target is embedded");
    let Piece { part, place } = &PIECES[place][id.family() as usize][id.index()];
    let text = PARTS[*part].inflated();
    let text = text.as_deref().and_then(|text| text.get(place.clone())).expect("build.rs has compressed it");
    format!("{}{text}", target.head())
}

impl Part {
    /// The text; none if it is not what was compressed.
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
