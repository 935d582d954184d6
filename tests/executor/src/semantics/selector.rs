//! Selectors of the block scales of `mma` (ISA 9.7.14, "Block Scaling for mma.sync").

use microscale_formats::Format;

/// The values that the two parts of a selector may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selector {
    /// The first byte to use of a word. MXFP4 uses two bytes, NVFP4 all four.
    pub(crate) bytes: &'static [u32],
    /// The pair of lanes of A, or the lane of B, among four neighbours.
    pub(crate) threads: &'static [u32],
}

impl Selector {
    /// Returns the selectors of A's scales.
    pub(crate) fn of_a(format: Format) -> Self {
        Self { threads: &[0, 1], ..Self::of_b(format) }
    }

    /// Returns the selectors of B's scales.
    pub(crate) fn of_b(format: Format) -> Self {
        let bytes: &[u32] = if format == Format::Nvfp4 { &[0] } else { &[0, 2] };
        Self { bytes, threads: &[0, 1, 2, 3] }
    }
}
